"""Looking at near kernels: the tools of analysis/ on models with ``integration_mode="near_far"``."""

import pytest
import torch

from modeling_itnet import diagnose_kernels, kernel_spectrum
from modeling_itnet.analysis.kernels import kernel_norms, layer_kernels
from modeling_itnet.analysis.plots import plot_text_kernel
from modeling_itnet.integration.capture import operator_inputs
from modeling_itnet.integration.choice import integrating
from modeling_itnet.operator import find_operators

NEAR = {"integration_mode": "near_far", "rank": 2}
CASES = {
    "image": NEAR | {"near_size": 9, "image_size": 32},
    "text": NEAR | {"near_size": 3},
    "causal": NEAR | {"near_size": 3, "is_causal": True},
    "signal": NEAR | {"near_radius": 0.4},
}


@pytest.fixture(params=CASES)
def case(request, tiny_model, tiny_inputs):
    """A near and far model, inputs with padding where they can have it, and which pairs are near."""
    name, settings = "text" if request.param == "causal" else request.param, CASES[request.param]
    model, inputs = tiny_model(name, **settings), tiny_inputs(name)
    if name == "image":
        grid = torch.arange(16)
        apart = [(part[:, None] - part).abs() for part in (grid // 4, grid % 4)]
        near = torch.ones(17, 17, dtype=torch.bool)  # [CLS] is near to all
        near[1:, 1:] = (apart[0] <= 1) & (apart[1] <= 1)
        return model, {"pixel_values": torch.randn(3, 3, 32, 32)}, near.expand(3, -1, -1)
    mask = torch.ones(3, 7, dtype=torch.long)
    mask[1, 5:] = 0
    inputs["attention_mask"] = mask
    if name == "signal":
        near = torch.cdist(*[inputs["positions"].double()] * 2) <= 0.4
    else:
        apart = torch.arange(7)[:, None] - torch.arange(7)
        near = ((apart >= 0) & (apart <= 2) if request.param == "causal" else apart.abs() <= 1).expand(3, -1, -1)
    return model, inputs, near & (mask > 0).unsqueeze(1)


def test_norms_are_those_of_near_pairs(case):
    """In the first layer, whose input does not depend on the mode, beside the norms of all pairs."""
    model, inputs, near = case
    for part in ("full", "learned"):
        actual = kernel_norms(model, inputs, 0, part)
        with integrating("exact"):
            everywhere = kernel_norms(model, inputs, 0, part)
        real = actual.new_ones(actual.shape)
        if "attention_mask" in inputs:
            real = inputs["attention_mask"][:, None, :, None] * real
        torch.testing.assert_close(actual * real, everywhere * near.unsqueeze(1) * real)
        assert (actual > 0).sum() < 0.9 * actual.numel()


@torch.no_grad()
def test_kernels_and_weights_make_the_near_field(case):
    """sum_j omega_ij K_ij u_j is what the operator adds to its far field."""
    model, inputs, _ = case
    operator, call = find_operators(model)[1], operator_inputs(model, inputs)[1]
    far = operator.factors(call.features.unflatten(-1, (2, 8)), call.domain)[0]
    near = operator.integral(call.features, call.domain).view_as(far) - far
    kernels = layer_kernels(model, inputs, layer=1)[0]
    matrices = torch.cat([piece for _, piece in kernels.pieces()], 1)
    expected = torch.einsum("bij,bijhac,bjhc->biha", kernels.pair_measure.float(), matrices, kernels.heads)
    real = (call.measure > 0)[..., None, None]
    torch.testing.assert_close(near * real, expected * real, rtol=1e-4, atol=1e-5)


def test_variation_is_around_the_mean_of_the_neighbourhood(case):
    """A kernel without inputs tells no keys apart, whatever the mass of the neighbourhood."""
    model, inputs, _ = case
    for operator in find_operators(model):
        operator.kernel.w2.data.zero_()
    norms, full = kernel_norms(model, inputs, 0, "variation"), kernel_norms(model, inputs, 0)
    assert norms.max() < 1e-4 * full.max()


def test_diagnosis_spectrum_and_picture(case, tmp_path):
    model, inputs, near = case
    (kernels,) = layer_kernels(model, inputs, layer=0)
    distance = torch.cdist(kernels.positions, kernels.positions)
    counts = near & (kernels.measure > 0).unsqueeze(2)
    result = diagnose_kernels(model, inputs, radius=0.21)
    expected = (counts & (distance <= 0.21)).sum() / counts.sum()
    assert result.uniform_locality == pytest.approx(float(expected))
    squares = kernel_norms(model, inputs, 0).square() * counts.unsqueeze(1)  # [B, H, n, n]
    for head in result.heads[:2]:
        one = squares[:, head.head]
        assert head.locality == pytest.approx(float((one * (distance <= 0.21)).sum() / one.sum()), rel=1e-4)

    omega, pairs = kernels.measure.float(), kernels.pair_measure.float()
    weights = pairs * (omega.unsqueeze(2) / omega.where(omega > 0, 1).unsqueeze(1)).sqrt()
    energy = kernel_spectrum(model, inputs).singular_values[0].square().sum(-1)  # |K|_F^2 [B, H]
    torch.testing.assert_close(
        energy.float(), (squares * weights.square().unsqueeze(1)).sum((2, 3)), rtol=1e-4, atol=0
    )
    if "input_ids" in inputs:
        plot_text_kernel(model, {"input_ids": inputs["input_ids"][:1]}, list("abcdefg"), tmp_path / "k.png")
        assert (tmp_path / "k.png").stat().st_size > 0
