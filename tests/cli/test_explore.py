"""``itnet explore``: pages of what is given, or of a made-up input; their size; mistakes in one line."""

import json
import re

import numpy as np
import pytest
import torch
from PIL import Image

from modeling_itnet import ITNetConfig, ITNetForImageClassification
from modeling_itnet.analysis.explorer import explore_kernels
from modeling_itnet.hub import create_checkpoint


def description(path) -> dict:
    """What a page says about itself."""
    text = path.read_text(encoding="utf-8")
    return json.loads(re.search('id="description">(.*?)</script>', text, re.S).group(1))


@pytest.mark.parametrize("modality", ["image", "text", "point_cloud", "graph", "multimodal"])
def test_made_up_inputs(run, tmp_path, modality):
    create_checkpoint("itnet-tiny", tmp_path / "m", modality=modality, num_hidden_layers=1)
    printed = run("explore", "m", "-o", "out/page.html")
    page = description(tmp_path / "out" / "page.html")
    assert page["title"] == "m" and len(page["samples"]) == 1 and page["precision"] == "float32"
    assert re.fullmatch(r"out/page\.html \(\d\.\d\d MB\)\n", printed)


def test_given_inputs(run, fail, tmp_path):
    create_checkpoint("itnet-tiny", tmp_path / "t", task="causal-lm", num_hidden_layers=2)
    run("explore", "t", "one text", "another", "-o", "t.html", "--layer", "-1", "--head", "0", "--title", "Two")
    page = description(tmp_path / "t.html")
    assert "one" in "".join(page["samples"][0]["parts"][0]["labels"])
    assert (page["title"], page["heads"], [layer["number"] for layer in page["layers"]]) == ("Two", [0], [1])
    assert "`layers` ([5])" in fail("explore", "t", "a text", "--layer", "5")
    assert "`precision` ('float8')" in fail("explore", "t", "a text", "--precision", "float8")
    assert "no such file" in fail("explore", "t", "missing.txt")
    assert "is too small" in fail("explore", "t", "a text", "--max-megabytes", "0.01")


def test_image_and_text_in_turn(run, fail, tmp_path):
    create_checkpoint("itnet-tiny", tmp_path / "m", modality="multimodal", num_hidden_layers=1)
    Image.fromarray(np.zeros((32, 32, 3), dtype=np.uint8)).save(tmp_path / "x.png")
    run("explore", "m", "x.png", "What is it?")
    assert len(description(tmp_path / "kernels.html")["samples"]) == 1
    assert "an image file and a text in turn" in fail("explore", "m", "x.png")


def test_large_models_leave_out_layers_then_heads():
    """Half precision first; the page names what it holds, and keeps to its size."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 96, "num_attention_heads": 3, "num_hidden_layers": 3, "intermediate_size": 16}
    config = ITNetConfig(modality="image", image_size=16, patch_size=8, kernel_hidden_size=64, num_labels=2, **sizes)
    model, inputs = ITNetForImageClassification(config).eval(), {"pixel_values": torch.randn(1, 3, 16, 16)}
    held = []
    for limit in (9_000_000, 2_500_000, 1_200_000, 400_000):
        page = explore_kernels(model, inputs, max_bytes=limit)
        assert len(page.encode()) <= limit
        found = json.loads(re.search('id="description">(.*?)</script>', page, re.S).group(1))
        held.append((found["precision"], [layer["number"] for layer in found["layers"]], found["heads"]))
    assert held[0] == ("float32", [0, 1, 2], [0, 1, 2]) and held[1] == ("float16", [0, 1, 2], [0, 1, 2])
    assert held[2][0] == "float16" and held[2][1][-1] == 2 and len(held[2][1]) < 3
    assert held[3] == ("float16", [2], [0])
