"""Figures of kernels whose nature is known, and against sums over pairs in Python."""

import math
import re

import pytest
import torch
from PIL import Image

from modeling_itnet.analysis import kernels
from modeling_itnet.analysis.diagnosis import diagnose_kernels
from modeling_itnet.analysis.kernels import kernel_norms

IMAGES = {"pixel_values": torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(5))}  # 4 x 4 patches


@pytest.fixture
def diagnosed(tiny_model):
    def make(*kernel_inputs, part="centred", inputs=IMAGES, name="image", **settings):
        # Without a [CLS], whose place is off the grid.
        settings = {"pooling": "mean", "kernel_inputs": list(kernel_inputs)} | settings
        model = tiny_model(name, scale=0.6, **settings)
        return model, diagnose_kernels(model, inputs, part=part)

    return make


def figures(result, name):
    return torch.tensor([getattr(head, name) for head in result.heads])


def test_a_function_of_the_displacement_is_a_convolution(diagnosed):
    _, result = diagnosed("x-y", "distance")
    torch.testing.assert_close(figures(result, "convolution"), torch.ones(4), atol=1e-5, rtol=0)
    torch.testing.assert_close(figures(result, "invariance"), torch.ones(4), atol=1e-5, rtol=0)
    torch.testing.assert_close(figures(result, "content"), torch.zeros(4), atol=1e-5, rtol=0)


def test_a_function_of_the_features_is_content_only(diagnosed):
    _, result = diagnosed("u_x", "u_y", "u_x*u_y")
    torch.testing.assert_close(figures(result, "invariance"), torch.ones(4), atol=1e-5, rtol=0)
    assert (figures(result, "content") > 0.75).all()
    assert (figures(result, "convolution") < 0.3).all()


def test_a_function_of_absolute_positions_is_neither(diagnosed):
    _, result = diagnosed("x", "y")
    assert (figures(result, "invariance") < 0.95).all()
    assert (figures(result, "convolution") < 0.95).all()
    torch.testing.assert_close(figures(result, "content"), torch.zeros(4), atol=1e-5, rtol=0)


def test_a_constant_kernel_is_global(diagnosed):
    _, result = diagnosed(part="full")  # no input at all
    torch.testing.assert_close(figures(result, "entropy"), torch.ones(4), atol=1e-6, rtol=0)
    torch.testing.assert_close(figures(result, "locality"), torch.full((4,), result.uniform_locality))
    torch.testing.assert_close(figures(result, "causality"), torch.zeros(4), atol=1e-6, rtol=0)
    profiles = torch.tensor([head.profile for head in result.heads])
    torch.testing.assert_close(profiles.nan_to_num(1.0), torch.ones(4, 8))  # nan: no pair is that far apart


def test_causal_models_only_have_a_past(tiny_model, tiny_inputs):
    result = diagnose_kernels(tiny_model("text", is_causal=True), tiny_inputs("text"))
    torch.testing.assert_close(figures(result, "causality"), torch.ones(4))


def test_figures_are_those_of_the_norms(diagnosed, monkeypatch):
    """Locality, entropy and profile from kernel_norms; small pieces change nothing."""
    monkeypatch.setattr(kernels, "PIECE_ELEMENTS", 6 * 16 * 2 * 64 * 3)
    model, result = diagnosed("x", "y", "x-y", "u_x", "u_y", "u_x*u_y", part="full")
    grid = (torch.arange(4) + 0.5) / 4
    points = torch.cartesian_prod(grid, grid)
    distance = torch.cdist(points, points)
    for head in result.heads:
        norms = kernel_norms(model, IMAGES, head.layer)[:, head.head].double()  # [B, n, n]
        squares = norms.square()
        near = distance <= distance.max() / 4 + 1e-6
        assert head.locality == pytest.approx(float(squares[:, near].sum() / squares.sum()), rel=1e-5)
        weights = norms / norms.sum(2, keepdim=True)
        entropy = -(weights * weights.log()).sum(2).mean() / math.log(16)
        assert head.entropy == pytest.approx(float(entropy), rel=1e-5)
        last = distance >= distance.max() * 7 / 8
        expected = (squares[:, last].mean() / squares.mean()).sqrt()
        assert head.profile[-1] == pytest.approx(float(expected), rel=1e-5)


def test_convolution_share_against_pairs(diagnosed):
    """The mean of inner products over different pairs of one displacement, by a loop over pairs of pairs."""
    from itnet_kernels import kernel_matrices
    from modeling_itnet.integration.capture import operator_inputs
    from modeling_itnet.operator import find_operators

    model, result = diagnosed("x", "x-y", "u_y", part="full", inputs={"pixel_values": IMAGES["pixel_values"][:2]})
    call, operator = operator_inputs(model, {"pixel_values": IMAGES["pixel_values"][:2]})[0], find_operators(model)[0]
    heads = call.features.unflatten(-1, (2, -1))
    positions = call.domain.positions
    with torch.no_grad():
        kernel = operator.kernel(call.domain.frequencies)
        matrices = kernel_matrices(heads, heads, positions[None], positions[None], kernel)[..., 0, :, :]
    groups = {}
    for i in range(16):
        for j in range(16):
            step = tuple((positions[i] - positions[j]).mul(1000).round().tolist())
            groups.setdefault(step, []).extend(matrices[:, i, j].double())
    top = bottom = 0.0
    for members in groups.values():
        if len(members) <= 2:  # one pair of points, in two samples
            continue
        stacked = torch.stack(members).flatten(1)
        gram = stacked @ stacked.T
        top += float((gram.sum() - gram.trace()) / (len(members) - 1))
        bottom += float(gram.trace())
    assert result.heads[0].convolution == pytest.approx(top / bottom, rel=1e-4)


def test_table_and_picture(diagnosed, tmp_path):
    _, result = diagnosed("x-y", "u_y")
    lines = result.table().splitlines()
    assert len(lines) == 2 + 4 + 2
    assert lines[2].startswith("| 1 | 1 |")
    result.plot(tmp_path / "new" / "kernels.png")
    assert Image.open(tmp_path / "new" / "kernels.png").size[0] > 500


def test_one_sample_has_no_content_share(diagnosed):
    _, result = diagnosed("x-y", "u_y", inputs={"pixel_values": IMAGES["pixel_values"][:1]})
    assert all(math.isnan(head.content) for head in result.heads)


def test_irregular_domains_have_no_convolution_share(tiny_model, tiny_inputs):
    result = diagnose_kernels(tiny_model("signal"), tiny_inputs("signal", batch=1))
    # Only the displacement 0, which every point has to itself, occurs twice.
    assert all(0 <= head.convolution <= 1 for head in result.heads)
    assert all(math.isnan(head.content) for head in result.heads)


@pytest.mark.parametrize("part", ["full", "centred"])
def test_padding_does_not_matter(tiny_model, tiny_inputs, part):
    model, inputs = tiny_model("signal"), tiny_inputs("signal", batch=2)
    padded = {name: torch.cat([value, 5 + torch.ones_like(value[:, :3])], 1) for name, value in inputs.items()}
    padded["attention_mask"] = torch.tensor([[1] * 7 + [0] * 3] * 2)
    expected, actual = (diagnose_kernels(model, given, part=part) for given in (inputs, padded))
    assert actual.radius == pytest.approx(expected.radius)
    for name in ("locality", "convolution", "invariance", "content", "causality", "entropy"):
        torch.testing.assert_close(
            figures(actual, name), figures(expected, name), equal_nan=True, rtol=1e-4, atol=1e-5
        )


def test_prints_as_a_table(diagnosed):
    _, result = diagnosed("x-y", "u_y")
    assert str(result) == result.table()
    assert repr(result).startswith("KernelDiagnosis(2 layers of 2 heads")


def test_a_map_that_is_not_defined_says_so(diagnosed, tmp_path):
    _, result = diagnosed("x-y", "u_y", inputs={"pixel_values": IMAGES["pixel_values"][:1]})  # content is nan
    result.plot(tmp_path / "kernels.svg")
    assert "not defined" in drawn_text(tmp_path / "kernels.svg")


def drawn_text(path):
    """Comments of an SVG file: matplotlib writes there what it draws as outlines."""
    return "\n".join(re.findall(r"<!-- (.*?) -->", path.read_text(encoding="utf-8")))


def test_errors(tiny_model):
    with pytest.raises(ValueError, match=r"`inputs` \(Tensor\) must hold keyword arguments.*'pixel_values'"):
        diagnose_kernels(tiny_model("image"), IMAGES["pixel_values"])
    with pytest.raises(ValueError, match=r"`part` \('some'\)"):
        diagnose_kernels(tiny_model("image"), IMAGES, part="some")
    with pytest.raises(ValueError, match="no exact kernels"):
        diagnose_kernels(tiny_model("image", integration_mode="low_rank", rank=2), IMAGES)
