"""Kernel norms against one pair of positions at a time, and the picture that is made of them."""

import re
import sys

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from PIL import Image

from itnet_kernels import kernel_matrices
from modeling_itnet import ITNetModel
from modeling_itnet.analysis import kernels
from modeling_itnet.analysis.explorer import explore_kernels
from modeling_itnet.analysis.kernels import kernel_norms
from modeling_itnet.analysis.plots import plot_cloud_kernel, plot_image_kernel, plot_text_kernel

PADDED = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1, 1]])

# id -> (model, settings, further inputs)
CASES = {
    "image": ("image", {}, {}),
    "image-classification": ("image-classification", {}, {}),
    "image-without-cls": ("image", {"pooling": "mean"}, {}),
    "text-padded": ("masked-lm", {}, {"attention_mask": PADDED}),
    "text-causal": ("text", {"is_causal": True}, {}),
    "signal-shared-three-layers": ("signal", {"kernel_output_sharing": "shared", "kernel_num_layers": 3}, {}),
}


def pair_matrices(model, inputs, layer):
    """K_ij [B, n, n, H, d_h, d_h] one pair at a time, and omega_ij, from hidden states that the model returns."""
    core = model.base_model
    with torch.no_grad():
        signal = core.encoder(core.fourier, **inputs)
        hidden = core(**inputs, output_hidden_states=True).hidden_states[layer]  # what enters the layer
        features = core.layers[layer].operator_norm(hidden)
        weights = core.layers[layer].operator.kernel(core.fourier.frequencies)
        heads = features.unflatten(-1, (core.config.num_attention_heads, core.config.head_dim))
        positions = signal.positions.expand(len(heads), *signal.positions.shape[-2:])
        count = heads.shape[1]
        rows = []
        for i in range(count):
            query, x = heads[:, i : i + 1], positions[:, i : i + 1]
            keys = [(heads[:, j : j + 1], positions[:, j : j + 1]) for j in range(count)]
            rows.append(torch.cat([kernel_matrices(query, u_y, x, y, weights) for u_y, y in keys], dim=2))
    omega = signal.measure[:, None, :].repeat(1, count, 1)
    if core.config.is_causal:
        omega = omega * torch.ones(count, count).tril()
    return torch.cat(rows, dim=1), omega / omega.sum(-1, keepdim=True)


@pytest.mark.parametrize("part", ["full", "learned", "variation"])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_norms_are_those_of_the_pair_matrices(case, layer, part, tiny_model, tiny_inputs, monkeypatch):
    name, settings, further = CASES[case]
    model = tiny_model(name, **settings)
    inputs = tiny_inputs(name) | further
    matrices, omega = pair_matrices(model, inputs, layer)
    if part == "learned":
        b2 = model.base_model.layers[layer].operator.kernel.b2.detach()
        matrices = matrices - b2.unflatten(-1, matrices.shape[-2:])
    elif part == "variation":
        matrices = matrices - (omega[..., None, None, None] * matrices).sum(2, keepdim=True)
    expected = matrices.pow(2).sum((-2, -1)).sqrt().permute(0, 3, 1, 2) * (omega > 0).unsqueeze(1)

    monkeypatch.setattr(kernels, "PIECE_ELEMENTS", 4000)  # several pieces of queries, the last one shorter
    norms = kernel_norms(model, inputs, layer, part)
    assert not norms.requires_grad
    torch.testing.assert_close(norms, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(kernel_norms(model, inputs, layer - 2, part), norms, rtol=0, atol=0)


def test_identity_kernel(tiny_config, tiny_inputs):
    """Without W2 every K_ij is b2 = I: norm sqrt(d_h), nothing learned, and keys are not told apart."""
    model = ITNetModel(tiny_config("image", kernel_init_scale=0.0))
    norms = {part: kernel_norms(model, tiny_inputs("image"), 0, part) for part in ("full", "learned", "variation")}
    torch.testing.assert_close(norms["full"], torch.full((3, 2, 5, 5), 8**0.5))
    assert norms["learned"].max() == 0
    assert norms["variation"].max() < 1e-6


def test_model_is_left_as_it_was(tiny_model, tiny_inputs):
    """Dropout is off while the model runs; afterwards mode, hooks and gradients are as before."""
    model = tiny_model("image-classification", hidden_dropout_prob=0.5)
    still = kernel_norms(model, tiny_inputs("image"), 1)
    model.train()
    model.itnet.layers[0].eval()
    hooks = [dict(module._forward_pre_hooks) for module in model.modules()]
    torch.testing.assert_close(kernel_norms(model, tiny_inputs("image"), 1), still, rtol=0, atol=0)
    assert model.training and model.itnet.layers[1].training and not model.itnet.layers[0].training
    assert [dict(module._forward_pre_hooks) for module in model.modules()] == hooks
    assert all(parameter.grad is None for parameter in model.parameters())


def test_clear_errors(tiny_model, tiny_inputs, tmp_path):
    model = tiny_model("image")
    with pytest.raises(ValueError, match=r"`layer` \(2\) is out of range: the model has 2"):
        kernel_norms(model, tiny_inputs("image"), 2)
    with pytest.raises(ValueError, match=r"`part` \('half'\) must be 'full', 'learned' or 'variation'"):
        kernel_norms(model, tiny_inputs("image"), 0, "half")
    with pytest.raises(ValueError, match=r"layer 0 is low-rank"):
        kernel_norms(tiny_model("image", integration_mode="low_rank", rank=2), tiny_inputs("image"), 0)
    with pytest.raises(ValueError, match=r"patch \(2, 0\) is not on the grid of 2 x 2 patches"):
        plot_image_kernel(model, torch.rand(3, 16, 16), tmp_path / "map.png", queries=[(2, 0)])
    with pytest.raises(ValueError, match=r"query 'cls' needs a model with `pooling` 'cls'"):
        plot_image_kernel(
            tiny_model("image", pooling="mean"), torch.rand(3, 16, 16), tmp_path / "map.png", queries=["cls"]
        )
    with pytest.raises(ValueError, match=r"`pixel_values` \[2, 3, 16, 16\] must be one image"):
        plot_image_kernel(model, torch.rand(2, 3, 16, 16), tmp_path / "map.png")
    with pytest.raises(ValueError, match=r"`model` has kernels with directions \(`kernel_directions`\)"):
        explore_kernels(tiny_model("image", kernel_directions=True), tiny_inputs("image"))


def test_missing_matplotlib_names_the_extra(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # makes its import fail
    with pytest.raises(ImportError, match=r"matplotlib: pip install matplotlib"):
        plot_image_kernel(tiny_model("image"), torch.rand(3, 16, 16), tmp_path / "map.png")


# id -> (settings, queries, index of each query and of the first patch among the positions)
PICTURES = {
    "cls": ({}, [(0, 0), (1, 2), "cls"], [1, 6, 0], 1),
    "mean": ({"pooling": "mean"}, [(0, 1)], [1], 0),
    "default-queries": ({}, None, [1, 3, 4, 6], 1),
    "two-scales": ({"patch_size": (4, 8)}, [(3, 5)], [24], 1),
}


@pytest.mark.parametrize("case", PICTURES)
def test_picture_shows_the_norms(case, tiny_model, tmp_path, monkeypatch):
    settings, queries, indices, first = PICTURES[case]
    model = tiny_model("image", **settings)
    image = torch.rand(model.config.num_channels, 16, 24)
    rows, columns = (side // model.config.patch_sizes[0] for side in image.shape[1:])
    norms = kernel_norms(model, {"pixel_values": image[None]}, 0, "variation")[0].mean(0)
    expected = [norms[i, first : first + rows * columns].view(rows, columns) for i in indices]

    drawn = []
    monkeypatch.setattr(Axes, "imshow", record(Axes.imshow, drawn))
    path = tmp_path / "new" / "map.png"
    plot_image_kernel(model, image, path, queries=queries)
    maps = [torch.from_numpy(values) for values in drawn[1::2]]
    torch.testing.assert_close(maps, expected)
    with Image.open(path) as picture:
        assert min(picture.size) > 300
        assert len(np.unique(np.asarray(picture.convert("RGB")).reshape(-1, 3), axis=0)) > 50


def record(method, calls):
    """``method``, and its first argument goes on a list."""

    def recording(self, values, *args, **kwargs):
        calls.append(values)
        return method(self, values, *args, **kwargs)

    return recording


def drawn_text(path):
    """Comments of an SVG file: matplotlib writes there what it draws as outlines."""
    return re.findall(r"<!-- (.*?) -->", path.read_text(encoding="utf-8"))


def test_scales_have_plain_numbers(tiny_config, tiny_inputs, tmp_path):
    """Norms of kernels near the identity differ behind the comma: the scale must not be 0.002 with a "+2.8" apart."""
    model = ITNetModel(tiny_config("text", kernel_init_scale=1e-4))
    inputs = tiny_inputs("text", batch=1)
    plot_text_kernel(model, inputs, ["a"] * 7, tmp_path / "text.svg", part="full")
    assert not [text for text in drawn_text(tmp_path / "text.svg") if text.startswith(("+", "1e"))]


def test_tokens_as_they_read(tiny_model, tiny_inputs, tmp_path):
    tokens = ["[CLS]", "Ġthe", "##ing", "▁mat", "Ċ", "Ġ", "Ġis"]
    plot_text_kernel(tiny_model("text"), tiny_inputs("text", batch=1), tokens, tmp_path / "text.svg")
    text = drawn_text(tmp_path / "text.svg")
    assert {"[CLS]", "the", "ing", "mat", "is", "query i", "key j"} <= set(text)
    assert not [word for word in text if set(word) & set("Ġ▁#Ċ")]


def test_clouds_have_axes(tiny_config, tmp_path):
    model = ITNetModel(tiny_config("point_cloud", local_neighbors=0)).eval()
    plot_cloud_kernel(model, {"points": torch.rand(1, 9, 3)}, tmp_path / "cloud.svg")
    assert {"x", "y", "z", "point 0"} & set(drawn_text(tmp_path / "cloud.svg")) >= {"x", "y", "z"}
