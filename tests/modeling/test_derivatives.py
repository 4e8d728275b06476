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


MODES = {
    "exact": {},
    "low rank": {"integration_mode": "low_rank"},
    "anchors": {"integration_mode": "monte_carlo", "num_samples": 4},
    "causal anchors": {"integration_mode": "monte_carlo", "num_samples": 4, "is_causal": True},
}


@pytest.mark.parametrize("extra", MODES.values(), ids=MODES)
def test_vmap(tiny_config, features, extra):
    """Over every input of a model, in every mode of evaluation."""
    model = ITNetModel(tiny_config("signal", **extra)).double().eval()
    inputs = {"inputs_embeds": features, "positions": mesh(9, 0), "measure": torch.linspace(0.5, 1, 18).view(2, 9)}
    run = torch.no_grad()(lambda **kwargs: model(**kwargs).last_hidden_state)
    for name, value in inputs.items():
        many = torch.stack([value, value * torch.linspace(1, 0.5, value.shape[-1])])
        together = vmap(lambda one, name=name: run(**inputs | {name: one}))(many)
        torch.testing.assert_close(together, torch.stack([run(**inputs | {name: one}) for one in many]))


def test_auto_under_vmap_wants_a_mode(tiny_config, features):
    model = ITNetModel(tiny_config("signal", integration_mode="auto", exact_max_positions=4)).double().eval()

    positions = mesh(9, 0)

    def run(measure):
        return model(inputs_embeds=features, positions=positions, measure=measure).last_hidden_state

    with pytest.raises(ValueError, match=r"vmap cannot look at.*Name a mode"):
        vmap(run)(torch.ones(3, 2, 9))


def test_anchors_outlive_no_transform(tiny_config, features):
    """Anchors of a shared domain are kept for the next call, but not those that a transform has wrapped."""
    model = ITNetModel(tiny_config("signal", **MODES["anchors"])).double().eval()

    def run(positions):
        return model(inputs_embeds=features, positions=positions).last_hidden_state

    positions = mesh(9, 0)
    primal, _ = jvp(run, (positions,), (torch.ones_like(positions),))
    assert model.anchors._kept is None
    torch.testing.assert_close(run(positions), primal)


def test_interpolation_in_pieces(tiny_config, monkeypatch):
    """Long lists of queries are interpolated piece by piece, which forward mode must pass through as well."""
    model = ITNetForSignalRegression(tiny_config("signal", signal_feature_size=1, num_labels=1)).double().eval()
    values = torch.randn(1, 9, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    queries = mesh(5, 1) + 1 / 32

    def run(queries):
        return model(signal_values=values, positions=mesh(9, 0), query_positions=queries).predictions

    expected = jvp(run, (queries,), (torch.ones_like(queries),))
    monkeypatch.setattr("modeling_itnet.heads.interpolation._CHUNK_PAIRS", 18)  # two queries at a time
    actual = jvp(run, (queries,), (torch.ones_like(queries),))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


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
