"""The Python code of every document runs as it stands, block after block, in an empty folder."""

import contextlib
import io
import os
import re
from pathlib import Path

import pytest
import torch

from configuration_itnet import preset_names
from modeling_itnet.hub import create_checkpoint

from .extract import ROOT, documents, python_blocks

WITH_BLOCKS = [path for path in documents() if python_blocks(path)]
PRESET_CARDS = {f"{name}.md" for name in preset_names()}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def run(blocks: list[str], name: str) -> None:
    namespace = {"__name__": "__document__"}
    with contextlib.redirect_stdout(io.StringIO()):
        for block in blocks:
            exec(compile(block, name, "exec"), namespace)


@pytest.mark.parametrize("path", [path for path in WITH_BLOCKS if path.name not in PRESET_CARDS], ids=name_of)
def test_blocks_run(path, tmp_path, monkeypatch):
    torch.manual_seed(0)
    # Paths in examples/ start at the root, from where they read; the other documents write into the current folder.
    monkeypatch.chdir(ROOT if "examples" in path.parts else tmp_path)
    run(python_blocks(path), name_of(path))


def test_the_readme_has_its_ten_lines():
    (block,) = python_blocks(ROOT / "README.md")
    assert len([line for line in block.splitlines() if line]) <= 10


def test_cards_of_presets_run(tmp_path, monkeypatch):
    """The cards differ by the name of the preset alone, so that one of them stands for the large ones too."""
    monkeypatch.chdir(tmp_path)
    create_checkpoint("itnet-tiny", tmp_path / "itnet-tiny")
    tiny = python_blocks(ROOT / "model_cards" / "itnet-tiny.md")
    assert tiny
    run(tiny, "model_cards/itnet-tiny.md")
    for card in sorted(PRESET_CARDS):
        blocks = [
            block.replace(card.removesuffix(".md"), "itnet-tiny")
            for block in python_blocks(ROOT / "model_cards" / card)
        ]
        assert blocks == tiny, card


@pytest.mark.parametrize("path", documents(), ids=name_of)
def test_local_links_exist(path):
    code = r"^```.*?^```|^    [^\n]*|`[^`]*`"
    text = re.sub(code, "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if not target.startswith("http"):
            assert os.path.exists(path.parent / target), f"{name_of(path)} links to {target}"
