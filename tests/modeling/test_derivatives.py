"""Derivatives of whole models in forward mode and of second order, as physics-informed losses take them."""

import pytest
import torch
from torch.func import functional_call, grad, hessian, jacfwd, jvp, vmap

from modeling_itnet import ITNetForSignalRegression, ITNetModel

STEP = 2.0**-7
# Central differences of sixth order: f'(x) h = sum_k c_k (f(x + k h) - f(x - k h)) + O(h^7)
STENCIL = {1: 3 / 4, 2: -3 / 20, 3: 1 / 60}
# The models hold positions in float32: on this dyadic mesh neither they nor the steps are rounded, their waves are.
NOISE = torch.finfo(torch.float32).eps / STEP


def mesh(count: int, seed: int) -> torch.Tensor:
    """Distinct points of a dyadic grid in the unit square: [count, 2]."""
    order = torch.randperm(256, generator=torch.Generator().manual_seed(seed))[:count]
    return torch.stack([order // 16, order % 16], 1).double() / 16


def difference_quotient(function, x: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        terms = (
            c * (function(x + k * STEP * direction) - function(x - k * STEP * direction)) for k, c in STENCIL.items()
        )
        return sum(terms) / STEP


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert (actual - expected).norm() <= tolerance * expected.norm()


@pytest.fixture
def features():
    return torch.randn(2, 9, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def test_jvp_of_a_model_is_that_of_the_definition(tiny_config, features):
    """In the positions, the features and every parameter at once."""
    positions = mesh(9, 0)
    model = ITNetModel(tiny_config("signal")).double().eval()
    generator = torch.Generator().manual_seed(1)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    tangents = {
        name: torch.randn(value.shape, generator=generator, dtype=value.dtype) for name, value in parameters.items()
    }
    direction = torch.randn(9, 2, generator=generator, dtype=torch.float64)

    def run(parameters, positions, features):
        inputs = {"inputs_embeds": features, "positions": positions}
        return functional_call(model, parameters, (), inputs).last_hidden_state

    results = []
    for backend in ("tiled", "reference"):
        for layer in model.layers:
            layer.operator.backend = backend
        results.append(jvp(run, (parameters, positions, features), (tangents, direction, features)))
    for actual, expected in zip(*results, strict=True):
        close(actual, expected, 1e-10)


@pytest.mark.parametrize("extra", [{}, {"integration_mode": "low_rank"}], ids=["exact", "low rank"])
def test_forward_mode_is_the_difference_quotient(tiny_config, features, extra):
    model = ITNetModel(tiny_config("signal", **extra)).double().eval()
    positions = mesh(9, 0)

    def run(positions):
        return model(inputs_embeds=features, positions=positions).last_hidden_state

    direction = torch.ones_like(positions)
    direction[::2, 1] = -1
    expected = difference_quotient(run, positions, direction)
    close(jvp(run, (positions,), (direction,))[1], expected, 100 * NOISE)
    close((jacfwd(run)(positions) * direction).sum((-2, -1)), expected, 100 * NOISE)


def test_a_differential_equation(tiny_config):
    """Residual u_x + Laplacian(u) away from the sensors, where interpolation between them is smooth: forward mode,
    forward over reverse, finite differences, and a training step on it."""
    model = ITNetForSignalRegression(tiny_config("signal", signal_feature_size=1, num_labels=1)).double().eval()
    sensors = mesh(9, 0)
    queries = torch.tensor([[1.25, 0.5], [1.5, 0.25], [1.375, 1.0]], dtype=torch.float64)
    values = torch.randn(1, 9, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def solution(query):
        out = model(signal_values=values, positions=sensors, query_positions=query.unsqueeze(0))
        return out.predictions.squeeze()

    def residual(query):
        return grad(solution)(query)[0] + hessian(solution)(query).diagonal().sum()

    direction = torch.tensor([1.0, 0.0], dtype=torch.float64)
    for query in queries:
        first = jvp(solution, (query,), (direction,))[1]
        close(first, difference_quotient(solution, query, direction), 100 * NOISE)
        close(jacfwd(solution)(query)[0], first, NOISE)
        second = jvp(lambda q: grad(solution)(q)[0], (query,), (direction,))[1]
        expected = difference_quotient(lambda q: jvp(solution, (q,), (direction,))[1], query, direction)
        close(second, expected, 1000 * NOISE)
        close(hessian(solution)(query)[0, 0], second, NOISE)
    together = vmap(residual)(queries)
    close(together, torch.stack([residual(query) for query in queries]), NOISE)
    together.square().mean().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.itnet.layers.parameters())
