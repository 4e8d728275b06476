"""Float64 throughout, and the one comparison that every converter has to pass."""

import random

import pytest
import torch

from modeling_itnet.special_cases import from_module


@pytest.fixture(autouse=True)
def float64():
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(default)


@pytest.fixture
def draw(request):
    """A source of random shapes, the same in every run: seeded with the test's name and parameters."""
    torch.manual_seed(0)
    return random.Random(request.node.name)


@pytest.fixture(scope="session")
def compare():
    """compare(module, call, inputs, **options): outputs, and all gradients, of module and operator agree to 1e-10.

    The operator is called while the module's own forward is made to fail.
    """

    def same(module, call, inputs, tolerance=1e-10, **options):
        module.eval()
        inputs = [tensor.clone().requires_grad_() for tensor in inputs]
        expected = call(module, *inputs)
        expected = expected[0] if isinstance(expected, tuple) else expected
        operator = from_module(module, **options)

        def forbidden(*args, **kwargs):
            raise AssertionError("the operator called the module that it replaces")

        module.forward = forbidden
        try:
            actual = call(operator, *inputs)
        finally:
            del module.forward
        torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)
        upstream = torch.randn_like(expected)
        leaves = [*inputs, *module.parameters()]
        wanted = torch.autograd.grad(expected, leaves, upstream, allow_unused=True)
        gradients = torch.autograd.grad(actual, leaves, upstream, allow_unused=True)
        for leaf, gradient, want in zip(leaves, gradients, wanted, strict=True):
            gradient, want = (torch.zeros_like(leaf) if g is None else g for g in (gradient, want))
            torch.testing.assert_close(gradient, want, rtol=1e-10, atol=tolerance)
        return operator

    return same
