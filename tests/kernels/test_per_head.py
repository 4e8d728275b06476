"""Kernels whose heads have hidden layers of their own: every operator is that of each head by itself."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from itnet_kernels import (
    Coordinates,
    ball_blocks,
    integrand_norms,
    kernel_matrices,
    monte_carlo_transform,
    sampled_transform,
    window_blocks,
)

OWN = ("w1", "b1", "w_mid", "b_mid")
CASES = {
    "full": {},
    "causal": {"is_causal": True},
    "three layers": {"layers": 3},
    "shared output": {"shared_output": True},
    "query domain": {"num_queries": 4, "per_sample": True},
    "raw coordinates": {"frequencies": 0, "regular": True},
}


def with_own_layers(problem, heads=3, **sizes):
    """A problem whose w1, b1, w_mid and b_mid have a leading dimension of heads."""
    given = problem(heads=heads, **sizes)
    others = [problem(heads=heads, seed=seed, **sizes).weights for seed in range(heads)]
    layers = [name for name in OWN if getattr(given.weights, name) is not None]
    own = {name: torch.stack([getattr(weights, name) for weights in others]) for name in layers}
    return replace(given, weights=given.weights._replace(**own))


def one_head(problem, head: int):
    """The problem of a head alone, by plain indexing."""
    weights, own = problem.weights, slice(head, head + 1)
    layers = {name: getattr(weights, name)[head] for name in OWN if getattr(weights, name) is not None}
    if len(weights.w2) > 1:
        layers |= {"w2": weights.w2[own], "b2": weights.b2[own]}
    queries = None if problem.queries is None else problem.queries[:, :, own]
    return replace(problem, u=problem.u[:, :, own], queries=queries, weights=weights._replace(**layers))


def head_by_head(problem, function=lambda p: p.run("reference")):
    heads = range(problem.u.shape[2])
    return torch.cat([function(one_head(problem, head)) for head in heads], dim=2)


@pytest.mark.parametrize("backend", ["reference", "tiled"])
@pytest.mark.parametrize("case", CASES)
def test_integral_transform(problem, same, case, backend):
    problem_ = with_own_layers(problem, **CASES[case])
    same(problem_.run_backward(backend), problem_.gradients(head_by_head), 1e-10)


@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_over_blocks(problem, same, backend):
    line, points = (with_own_layers(problem, n=11, dim=dim, per_sample=dim > 1) for dim in (1, 2))
    for given, blocks in (
        (line, window_blocks((11,), 2)),
        (points, ball_blocks(points.positions, points.positions, 0.5)),
    ):
        problem_ = replace(given, blocks=blocks)
        same(problem_.run_backward(backend), problem_.gradients(head_by_head), 1e-10)


@pytest.mark.parametrize("case", ["full", "three layers", "shared output"])
def test_kernel_matrices(problem, case):
    problem_ = with_own_layers(problem, **CASES[case])

    def matrices(p):
        return kernel_matrices(p.u, p.u, p.positions, p.positions, p.weights)

    heads = [matrices(one_head(problem_, head)) for head in range(3)]
    torch.testing.assert_close(matrices(problem_), torch.cat(heads, dim=3), rtol=1e-12, atol=1e-12)


INDICES = torch.tensor([[0, 3], [6, 6], [1, 2], [5, 0]])


def sampled(p, **settings):
    coefficients = torch.linspace(-1, 1, 16, dtype=torch.float64).view(2, 4, 2)
    given = {"indices": INDICES.expand(2, -1, -1), "coefficients": coefficients}
    settings |= {"queries": p.queries, "query_positions": p.query_positions}
    return sampled_transform(p.u, p.positions, p.weights, **given, **settings)


def monte_carlo(p, **settings):
    probabilities = torch.linspace(0.1, 0.9, 16, dtype=torch.float64).view(2, 4, 2)
    given = {"indices": INDICES.expand(2, -1, -1), "probabilities": probabilities, "measure": p.measure}
    settings |= {"queries": p.queries, "query_positions": p.query_positions}
    return monte_carlo_transform(p.u, p.positions, p.weights, **given, **settings)


@pytest.mark.parametrize("function", [sampled, monte_carlo], ids=lambda function: function.__name__)
@pytest.mark.parametrize("layers", [2, 3])
def test_chosen_keys(problem, same, function, layers):
    problem_ = with_own_layers(problem, num_queries=4, layers=layers)
    same(problem_.gradients(function), problem_.gradients(partial(head_by_head, function=function)), 1e-10)
    with pytest.raises(ValueError, match=r"`backend` \('no such'\) must be one of"):
        function(problem_, backend="no such")


def test_integrand_norms(problem):
    """|K u| over all heads together."""
    problem_ = with_own_layers(problem, n=7)
    matrices = kernel_matrices(problem_.u, problem_.u, problem_.positions, problem_.positions, problem_.weights)
    values = torch.einsum("bijhac,bjhc->bijha", matrices, problem_.u)
    indices = torch.arange(7).expand(2, 7, 7)
    actual = integrand_norms(problem_.u, problem_.positions, problem_.weights, indices=indices)
    torch.testing.assert_close(actual, values.flatten(3).norm(dim=-1), rtol=1e-10, atol=1e-12)


def test_equal_layers_are_shared_ones(problem):
    shared = problem(heads=3)
    own = {name: getattr(shared.weights, name).expand(3, *getattr(shared.weights, name).shape) for name in OWN[:2]}
    problem_ = replace(shared, weights=shared.weights._replace(**own))
    torch.testing.assert_close(problem_.run("tiled"), shared.run("tiled"), rtol=1e-12, atol=1e-13)
    prepared = replace(problem_, positions=Coordinates(shared.positions, shared.weights.fourier))
    assert torch.equal(prepared.run("tiled"), problem_.run("tiled"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: {"w1": w.w1[:2]}, r"`weights.w1` \[2, 6, 31\] must be \[3, 6, 31\] for 3 heads of size 4"),
        (lambda w: {"b1": w.b1[0]}, r"`weights.b1` \[6\] must be \[3, 6\]"),
        (lambda w: {"w1": w.w1[..., :-1]}, r"`weights.w1` \[3, 6, 30\] must be \[3, 6, 31\]"),
        (lambda w: {"w2": w.w2[:2]}, r"`weights.w2` \[2, 16, 6\] must be \[3, 16, 6\]"),
        (lambda w: {"w_mid": w.w1[0, :, :6], "b_mid": w.b1}, r"`weights.w_mid` \[6, 6\] must be \[3, 6, 6\]"),
    ],
    ids=["heads", "bias", "columns", "output", "middle"],
)
def test_errors(problem, change, message):
    problem_ = with_own_layers(problem, frequencies=3)
    weights = problem_.weights._replace(**change(problem_.weights))
    for backend in ("reference", "tiled"):
        with pytest.raises(ValueError, match=message):
            replace(problem_, weights=weights).run(backend)
