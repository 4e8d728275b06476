"""Theorem 1 against torch's convolutions: outputs and gradients on random shapes and settings."""

import warnings

import pytest
import torch
from torch import nn

from modeling_itnet.special_cases import from_module

PADDING_MODES = ["zeros", "reflect", "replicate", "circular"]


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("mode", PADDING_MODES)
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_convolutions(axes, mode, seed, draw, compare):
    groups = draw.choice([1, 2, 3])
    channels, out_channels = groups * draw.randint(1, 2), groups * draw.randint(1, 3)
    kernel, dilation, stride = (tuple(draw.randint(1, top) for _ in range(axes)) for top in (3, 2, 3))
    padding = draw.choice(["valid", "same", tuple(draw.randint(0, 3) for _ in range(axes))])
    stride = (1,) * axes if padding == "same" else stride
    bias = draw.random() < 0.5
    module = getattr(nn, f"Conv{axes}d")(
        channels, out_channels, kernel, stride, padding, dilation, groups, bias, padding_mode=mode
    )
    batch = [draw.randint(1, 3)] if draw.random() < 0.8 else []
    signal = torch.randn(*batch, channels, *(draw.randint(5, 7) for _ in range(axes)))
    compare(module, lambda m, u: m(u), [signal])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_transposed_convolutions(axes, seed, draw, compare):
    groups = draw.choice([1, 2])
    channels, out_channels = groups * draw.randint(1, 2), groups * draw.randint(1, 3)
    kernel, dilation, stride = (tuple(draw.randint(1, top) for _ in range(axes)) for top in (3, 2, 3))
    padding = tuple(draw.randint(0, 1) for _ in range(axes))
    extra = tuple(draw.randint(0, max(a, b) - 1) for a, b in zip(stride, dilation, strict=True))
    module = getattr(nn, f"ConvTranspose{axes}d")(
        channels, out_channels, kernel, stride, padding, extra, groups, draw.random() < 0.5, dilation
    )
    signal = torch.randn(2, channels, *(draw.randint(3, 5) for _ in range(axes)))
    compare(module, lambda m, u: m(u), [signal])


def test_output_size_of_a_transposed_convolution(compare):
    module = nn.ConvTranspose1d(2, 3, 3, stride=3)
    for size in (12, 13, 14):
        compare(module, lambda m, u, size=size: m(u, output_size=[size]), [torch.randn(1, 2, 4)])
    with pytest.raises(ValueError, match=r"output size of \[15\], but valid sizes range from \[12\] to \[14\]"):
        from_module(module)(torch.randn(1, 2, 4), output_size=[15])


def test_depthwise_separable(compare):
    depthwise = nn.Conv2d(6, 6, 3, padding=1, groups=6)
    compare(depthwise, lambda m, u: m(u), [torch.randn(2, 6, 5, 6)])


def test_larger_than_a_tile(compare):
    module = nn.Conv1d(8, 16, 5, stride=2, padding=2)
    compare(module, lambda m, u: m(u), [torch.randn(2, 8, 700)])


def test_weights_are_the_modules_own():
    module = nn.Conv1d(2, 3, 3)
    operator, signal = from_module(module), torch.randn(1, 2, 9)
    with torch.no_grad():
        module.weight += 1
    torch.testing.assert_close(operator(signal), module(signal))
    assert {id(p) for p in operator.parameters()} == {id(p) for p in module.parameters()}


def test_shifting_the_signal_shifts_the_integral():
    """Prop. conv_equivariant, on a circle."""
    operator = from_module(nn.Conv1d(2, 3, 5, padding="same", padding_mode="circular"))
    signal = torch.randn(1, 2, 12)
    torch.testing.assert_close(operator(signal.roll(4, -1)), operator(signal).roll(4, -1))


def test_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lazy = nn.LazyConv1d(3, 2)
    with pytest.raises(ValueError, match="parameters without a shape"):
        from_module(lazy)
    with pytest.raises(ValueError, match=r"`input` \[1, 5, 9\] must be \[B, 2, \*\]"):
        from_module(nn.Conv1d(2, 3, 3))(torch.randn(1, 5, 9))
    with pytest.raises(ValueError, match="fewer than the 7 that the filter spans"):
        from_module(nn.Conv1d(2, 3, 7))(torch.randn(1, 2, 5))
    with pytest.raises(RuntimeError, match="Padding size should be less than the corresponding input dimension"):
        from_module(nn.Conv1d(2, 3, 3, padding=4, padding_mode="reflect"))(torch.randn(1, 2, 4))
