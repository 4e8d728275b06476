"""The README's code runs, and its figures are what the code says."""

import re
from pathlib import Path

import pytest

from configuration_itnet import ITNetConfig, preset_names
from modeling_itnet.parameters import parameter_table

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
SIZES = re.findall(
    r"^\| (itnet-\w+) \| (\d+) \| (\d+) \| (\d+) \| ([\d.]+) M \| ([\d.]+) M \| .* \|$", README, re.MULTILINE
)


def test_python_blocks_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    namespace = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    assert namespace["out"].shape == (2, 50, 4, 16)


@pytest.mark.parametrize("row", SIZES, ids=[row[0] for row in SIZES])
def test_size_table(row):
    name, layers, width, heads, *millions = row
    config = ITNetConfig.from_preset(name, modality="image")
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (
        int(layers),
        int(width),
        int(heads),
    )
    for sharing, printed in zip(("per_head", "shared"), millions, strict=True):
        table = parameter_table(name, ITNetConfig.from_preset(name, kernel_output_sharing=sharing))
        assert table.total / 1e6 == pytest.approx(float(printed), abs=0.051)


def test_every_size_is_listed():
    assert {row[0] for row in SIZES} >= set(preset_names()) - {"itnet-pc"}


def test_local_links_exist():
    root = Path(__file__).parents[1]
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if not target.startswith("http"):
            assert (root / target).exists(), target
