"""Kernels that are affine in the displacement: every operator against the matrices by their definition."""

from dataclasses import replace

import pytest
import torch

from itnet_kernels import (
    ball_blocks,
    integral_transform,
    integrand_norms,
    kernel_matrices,
    monte_carlo_transform,
    sampled_transform,
    window_blocks,
)

CASES = {
    "full": {},
    "per sample": {"per_sample": True},
    "causal": {"is_causal": True, "dim": 1, "regular": True},
    "three layers": {"layers": 3, "dim": 3},
    "shared output": {"shared_output": True},
    "distance": {"inputs": ("distance", "u_x", "u_y", "u_x*u_y"), "layers": 3},
    "no inputs": {"inputs": ()},
    "query domain": {"num_queries": 4, "per_sample": True},
    "raw coordinates": {"frequencies": 0},
    "a line": {"dim": 1, "n": 13, "regular": True},
    "a grid": {"n": 24, "regular": True},
}


def literal(problem):
    """Terms one by one: omega_j (K_ij^0 + sum_k (x_ik - y_jk) K_ij^k) u_j, each K of a kernel without directions."""
    weights, position = problem.weights, problem.positions
    x = position if problem.query_positions is None else problem.query_positions
    x, y = (points if points.dim() == 3 else points.unsqueeze(0) for points in (x, position))
    queries = problem.u if problem.queries is None else problem.queries
    plain = weights._replace(w2_directions=None, b2_directions=None)
    total = kernel_matrices(queries, problem.u, x, y, plain)
    for k in range(x.shape[-1]):
        own = plain._replace(w2=weights.w2_directions[:, k], b2=weights.b2_directions[:, k])
        displacement = x[:, :, None, k] - y[:, None, :, k]
        total = total + displacement[..., None, None, None] * kernel_matrices(queries, problem.u, x, y, own)
    return total


def applied(problem, omega=None):
    """The sum over all keys of :func:`literal`."""
    matrices = literal(problem)
    omega = problem.measure.unsqueeze(1).expand(matrices.shape[:3]) if omega is None else omega
    if problem.is_causal:
        omega = omega.tril(omega.shape[2] - omega.shape[1])
        omega = omega / omega.sum(-1, keepdim=True)
    return torch.einsum("bij,bijhac,bjhc->biha", omega, matrices, problem.u)


@pytest.mark.parametrize("backend", ["reference", "tiled"])
@pytest.mark.parametrize("case", CASES)
def test_output_and_every_gradient(problem, same, case, backend):
    problem_ = problem(directions=True, **CASES[case])
    same(problem_.run_backward(backend), problem_.gradients(applied), 1e-10)


@pytest.mark.parametrize("case", ["full", "three layers", "query domain"])
def test_matrices(problem, case):
    given = problem(directions=True, **CASES[case])
    x, queries = given.positions, given.u
    if given.queries is not None:
        x, queries = given.query_positions, given.queries
    actual = kernel_matrices(queries, given.u, x, given.positions, given.weights)
    torch.testing.assert_close(actual, literal(given), rtol=1e-12, atol=1e-12)


def test_heads_with_hidden_layers_of_their_own(problem, same):
    given = problem(directions=True, layers=3)
    layers = {name: getattr(given.weights, name) for name in ("w1", "b1", "w_mid", "b_mid")}
    own = {name: torch.stack([layer, layer.flip(0) / 2]) for name, layer in layers.items()}
    given = replace(given, weights=given.weights._replace(**own))
    same(given.run_backward("tiled"), given.run_backward("reference"), 1e-10)


@pytest.mark.parametrize("kind", ["windows", "balls"])
def test_over_blocks(problem, same, kind):
    given = problem(n=11, dim=1 if kind == "windows" else 2, directions=True, regular=kind == "windows")
    points = given.positions
    blocks = window_blocks((11,), 2) if kind == "windows" else ball_blocks(points[None], points[None], 0.5)
    near = sum(part.dense(11, 11).double() for part in blocks)
    given, free = replace(given, blocks=blocks), given

    def wanted(problem_):
        return applied(replace(problem_, blocks=None), problem_.measure.unsqueeze(1) * near)

    same(given.run_backward("tiled"), free.gradients(wanted), 1e-10)


def test_windows_of_a_causal_line(problem):
    """The fast way of evenly spaced lines takes these heads as well."""
    given = problem(n=12, dim=1, directions=True, regular=True)
    blocks = window_blocks((12,), 2, is_causal=True)
    settings = {"measure": given.measure, "blocks": blocks, "backend": "tiled"}
    fast = integral_transform(given.u, given.positions, given.weights, window=3, **settings)
    slow = integral_transform(given.u, given.positions, given.weights, **settings)
    torch.testing.assert_close(fast, slow, rtol=1e-12, atol=1e-12)


def test_chosen_keys(problem, same):
    given = problem(directions=True, per_sample=True)
    indices = torch.arange(7).expand(2, 7, 7)
    probabilities = torch.linspace(0.1, 0.9, 7, dtype=torch.float64).expand(2, 7, 7)

    def sampled(p):
        coefficients = p.measure.unsqueeze(1).expand(2, 7, 7)
        return sampled_transform(p.u, p.positions, p.weights, indices=indices, coefficients=coefficients)

    def monte_carlo(p):
        return 7 * monte_carlo_transform(
            p.u, p.positions, p.weights, indices=indices, probabilities=probabilities, measure=p.measure
        )

    same(given.gradients(sampled), given.gradients(applied), 1e-10)
    weighted = given.gradients(lambda p: applied(p, p.measure.unsqueeze(1) / probabilities))
    same(given.gradients(monte_carlo), weighted, 1e-10)
    norms = integrand_norms(given.u, given.positions, given.weights, indices=indices)
    values = torch.einsum("bijhac,bjhc->bijha", literal(given), given.u)
    torch.testing.assert_close(norms, values.flatten(3).norm(dim=-1), rtol=1e-12, atol=1e-12)


def test_far_from_the_origin(problem):
    """Points around 1000: float32 keeps what it has of displacements, since they are counted from the first key."""
    given = problem(directions=True, inputs=("x-y", "distance", "u_y"))
    moved = replace(given, positions=(given.positions + 1000).float().double())
    near = replace(moved, positions=moved.positions - 1000)
    expected, actual = applied(near), moved.to(torch.float32).run("tiled").double()
    assert (actual - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(problem, dtype):
    """Sums are taken in float32, with and without autocast: what is left are the roundings of input and output."""
    given = problem(directions=True).to(dtype).to(torch.float64)
    expected = applied(given)
    half = given.to(dtype).run("tiled")
    assert half.dtype == dtype
    assert (half.double() - expected).norm() <= torch.finfo(dtype).eps * expected.norm()
    with torch.autocast("cpu", dtype=dtype):
        single = given.to(torch.float32).run("tiled")
    assert single.dtype == torch.float32
    assert (single.double() - expected).norm() <= 1e-5 * expected.norm()


def test_forward_derivatives(problem):
    given = problem(directions=True)

    def tangent(function):
        return torch.func.jvp(lambda u: function(replace(given, u=u)), (given.u,), (given.u.flip(1),))[1]

    torch.testing.assert_close(tangent(lambda p: p.run("tiled")), tangent(applied), rtol=1e-10, atol=1e-10)


def test_wrong_shapes(problem):
    given = problem(directions=True)
    for change, message in (
        ({"b2_directions": None}, "`weights.w2_directions` and `weights.b2_directions` go together"),
        ({"w2_directions": given.weights.w2_directions[:, :1]}, r"`weights.w2_directions` \[2, 1, 16, 6\] must be"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(given, weights=given.weights._replace(**change)).run("tiled")
