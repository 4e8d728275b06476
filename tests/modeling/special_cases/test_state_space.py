"""Theorem 3 (a), (d): linear state spaces in continuous time and discretised, with gradients."""

import copy

import pytest
import torch

from modeling_itnet.special_cases import ExponentialKernel, IntegralOperator, LinearStateSpace, from_module
from modeling_itnet.special_cases.state_space import transitions
from modeling_itnet.special_cases.verify import continuous_error, gauss_legendre


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("discretization", ["euler", "zoh"])
@pytest.mark.parametrize("seed", range(4))
def test_discretised(seed, discretization, delayed, draw, compare):
    sizes = [draw.randint(1, 5) for _ in range(3)]
    module = LinearStateSpace(*sizes, draw.choice([0.01, 0.1]), discretization, delayed)
    compare(module, lambda m, u: m(u), [torch.randn(2, draw.choice([1, 2, 30, 300]), sizes[1])])


@pytest.mark.parametrize("discretization", ["euler", "zoh"])
@pytest.mark.parametrize("decay", [1.0, 1e-2])
def test_long_times_in_float32(discretization, decay):
    """Powers of Abar up to the 1,000th, some of which have hardly decayed: no worse than the recurrence in float32."""
    torch.manual_seed(0)
    module = LinearStateSpace(12, 3, 3, discretization=discretization)
    module.a.data *= decay
    u = torch.randn(1, 1000, 3)
    with torch.no_grad():
        expected = module(u)
        single = copy.deepcopy(module).float()
        own, error = ((m(u.float()).double() - expected).norm() for m in (single, from_module(single)))
    assert error < 10 * own


def test_zero_order_hold_needs_no_inverse():
    """The printed (exp(A dt) - I) A^-1 B, which commutes with A, where A can be inverted; a limit where it cannot."""
    module = LinearStateSpace(4, 3, 2, step=0.3)
    a, b = module.discrete()
    identity = torch.eye(4)
    torch.testing.assert_close(a, torch.linalg.matrix_exp(0.3 * module.a))
    torch.testing.assert_close(b, (a - identity) @ torch.linalg.solve(module.a, module.b))
    with torch.no_grad():
        module.a.zero_()
    torch.testing.assert_close(module.discrete()[1], 0.3 * module.b)


def test_continuous_system_is_solved_exactly():
    assert continuous_error() < 1e-10


@pytest.mark.parametrize("discretization", ["euler", "zoh"])
def test_discretisations_converge_to_the_integral(discretization):
    """First order in the step: a tenth of the step, a tenth of the error."""
    torch.manual_seed(1)
    module = LinearStateSpace(4, 1, 1, discretization=discretization)
    nodes, weights = gauss_legendre(30)
    kernel = ExponentialKernel(*(p.detach() for p in (module.a, module.b, module.c)))
    signal = torch.sin(5 * nodes).view(1, -1, 1)
    exact = IntegralOperator(kernel, is_causal=True)(
        signal, nodes.unsqueeze(1), measure=weights, query_positions=torch.ones(1, 1)
    )
    errors = []
    for count in (20, 200):
        module.step = 1 / count
        samples = torch.sin(5 * torch.arange(1, count + 1) / count).view(1, -1, 1)
        out = module(samples) - samples @ module.d.T
        errors.append(float((out[0, -1] - exact[0, 0]).abs().detach()))
    assert errors[1] < 0.15 * errors[0] < 0.15


@pytest.mark.parametrize(("rows", "columns"), [((3, 6), (0, 3)), ((2, 5), (1, 7)), ((0, 2), (4, 6)), ((6, 8), (6, 8))])
def test_transitions_are_products(rows, columns):
    a = torch.randn(2, 8, 3, 3)
    actual = transitions(a, slice(*rows), slice(*columns))
    for t in range(*rows):
        for s in range(*columns):
            product = torch.eye(3).expand(2, 3, 3) if s <= t else torch.zeros(2, 3, 3)
            for tau in range(s + 1, t + 1):
                product = a[:, tau] @ product
            torch.testing.assert_close(actual[:, t - rows[0], s - columns[0]], product)


def test_errors():
    with pytest.raises(ValueError, match=r"`discretization` \('tustin'\)"):
        LinearStateSpace(2, 1, 1, discretization="tustin")


def test_conversion_shares_parameters():
    module = LinearStateSpace(2, 1, 1)
    assert {id(p) for p in from_module(module).parameters()} == {id(p) for p in module.parameters()}
