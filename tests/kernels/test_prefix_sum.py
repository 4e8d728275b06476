"""The deterministic form of cumsum against torch.cumsum in float64."""

import pytest
import torch

from itnet_kernels import prefix_sum
from itnet_kernels.measure import blocked_prefix_sum


@pytest.mark.parametrize("function", [prefix_sum, blocked_prefix_sum])
@pytest.mark.parametrize(("shape", "dim"), [((2, 1, 3), 1), ((3, 128), 1), ((2, 129, 2, 3), 1), ((2, 3, 300), -1),
                                            ((20_000, 2), 0)])  # fmt: skip
def test_value_and_gradient(function, shape, dim):
    generator = torch.Generator().manual_seed(0)
    tensor, upstream = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    leaf, other = tensor.clone().requires_grad_(), tensor.clone().requires_grad_()
    out, expected = function(leaf, dim), other.cumsum(dim)
    (out * upstream).sum().backward()
    (expected * upstream).sum().backward()
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(leaf.grad, other.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("function", [prefix_sum, blocked_prefix_sum])
def test_rounds_once(function, dtype):
    """A long sum is as good as its dtype can hold it, also where autocast would lower a product."""
    tensor = torch.rand(1, 50_000, generator=torch.Generator().manual_seed(0)).to(dtype) / 2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = function(tensor)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), tensor.double().cumsum(1), rtol=torch.finfo(dtype).eps, atol=0)
