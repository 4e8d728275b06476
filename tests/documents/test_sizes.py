"""The table of sizes in docs/speed.md is what the code says."""

import re
from pathlib import Path

import pytest

from configuration_itnet import ITNetConfig, preset_names
from modeling_itnet.analysis.parameters import parameter_table

PAGE = (Path(__file__).parents[2] / "docs" / "speed.md").read_text(encoding="utf-8")
SIZES = re.findall(
    r"^\| (itnet-\w+) \| (\d+) \| (\d+) \| (\d+) \| ([\d.]+) M \| ([\d.]+) M \| .* \|$", PAGE, re.MULTILINE
)


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
