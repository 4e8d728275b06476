"""The oracle itself, against the definition written out pair by pair with torch.nn modules."""

import math

import pytest
import torch
from torch import nn


def literal(problem) -> torch.Tensor:
    """sum_j omega_ij K_ij u_j, one pair and one head at a time (Eq. kernel_input, Eq. app_mlp_output, Algorithm 1)."""
    weights = problem.weights
    queries = problem.u if problem.queries is None else problem.queries
    query_positions = problem.positions if problem.queries is None else problem.query_positions
    batch, num_queries, heads, head_dim = queries.shape
    num_keys = problem.u.shape[1]

    def gamma(x):
        angles = 2 * math.pi * weights.fourier @ x
        return torch.cat([angles.sin(), angles.cos()]) if len(angles) else x

    out = torch.zeros_like(queries)
    for b in range(batch):
        for i in range(num_queries):
            seen = range(i + num_keys - num_queries + 1) if problem.is_causal else range(num_keys)
            mass = sum(problem.measure[b, j] for j in seen) if problem.is_causal else 1
            for j in seen:
                x = (query_positions if query_positions.dim() == 2 else query_positions[b])[i]
                y = (problem.positions if problem.positions.dim() == 2 else problem.positions[b])[j]
                for h in range(heads):
                    u_x, u_y = queries[b, i, h], problem.u[b, j, h]
                    groups = {
                        "x": gamma(x),
                        "y": gamma(y),
                        "x-y": gamma(x - y),
                        "distance": (x - y).norm().view(1),
                        "u_x": u_x,
                        "u_y": u_y,
                        "u_x*u_y": u_x * u_y,
                    }
                    hidden = torch.cat([groups[name] for name in weights.inputs])
                    hidden = nn.GELU()(nn.functional.linear(hidden, weights.w1, weights.b1))
                    if weights.w_mid is not None:
                        hidden = nn.GELU()(nn.functional.linear(hidden, weights.w_mid, weights.b_mid))
                    k = min(h, len(weights.w2) - 1)
                    matrix = (weights.w2[k] @ hidden + weights.b2[k]).view(head_dim, head_dim)
                    out[b, i, h] += problem.measure[b, j] / mass * (matrix @ u_y)
    return out


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"n": 1},
        {"dim": 1, "is_causal": True},
        {"dim": 3, "per_sample": True, "layers": 3},
        {"num_queries": 3, "is_causal": True, "per_sample": True},
        {"num_queries": 9, "shared_output": True},
        {"frequencies": 0, "dim": 8},
        {"inputs": ("x-y", "u_x*u_y")},
    ],
    ids=str,
)
def test_reference_is_the_definition(problem, case):
    problem = problem(**{"n": 5} | case)
    torch.testing.assert_close(problem.run("reference"), literal(problem), rtol=1e-12, atol=1e-13)


def test_causal_query_without_visible_mass_is_zero(problem):
    problem = problem(n=4, is_causal=True)
    problem.measure[:, :2] = 0
    for backend in ("reference", "tiled"):
        out = problem.run(backend)
        assert not out[:, :2].any() and out[:, 2:].all()


@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_autocast_lowers_nothing(problem, backend):
    problem = problem(n=5).to(torch.float32)
    expected = problem.run(backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(problem.run(backend), expected)
