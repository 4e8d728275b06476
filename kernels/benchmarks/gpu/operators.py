"""The operator of each mode at the paper's shapes, with a measure given as models give it, beside SDPA."""

import torch
from operator_speed import Shape, make_inputs
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from itnet_kernels import (
    Factor,
    integral_transform,
    low_rank_matrix_transform,
    low_rank_transform,
    monte_carlo_transform,
    window_blocks,
)

from .clock import Runs, Workload
from .scope import Scope

MODES = ("exact", "near field", "low rank, vector", "low rank, matrix", "Monte Carlo")
ATTENTION = "SDPA"


def shape_of(scope: Scope, heads: int, n: int) -> Shape:
    return Shape(max(1, scope.tokens // n), n, heads, scope.head_dim, scope.width, scope.frequencies)


def list_length(scope: Scope, mode: str, n: int) -> int:
    """Counts the keys of a query."""
    return {"near field": min(scope.near_size, n), "Monte Carlo": scope.num_samples}.get(mode, n)


def flops(scope: Scope, mode: str, shape: Shape, rank: int) -> int:
    """Counts the matrix products of a forward that the mathematics needs; a backward counts three times as much,
    SDPA's 2.5."""
    positions = shape.batch * shape.heads * shape.n
    if mode == ATTENTION:
        return 4 * positions * shape.n * shape.head_dim
    if mode == "low rank, vector":
        return 4 * positions * scope.factor_hidden * shape.head_dim
    if mode == "low rank, matrix":
        return 4 * positions * rank * shape.head_dim
    keys = list_length(scope, mode, shape.n)
    return positions * shape.width * shape.head_dim * (4 * keys + 2 * shape.head_dim)


def workload(scope: Scope, mode: str, heads: int, n: int, rank: int | None = None) -> Workload:
    rank = rank or scope.rank
    shape = shape_of(scope, heads, n)
    return Workload(("operator", mode, shape, rank), lambda: _build(scope, mode, shape, rank))


def _build(scope: Scope, mode: str, shape: Shape, rank: int) -> Runs:
    device, dtype = scope.device, scope.timed_dtype
    u, positions, weights = make_inputs(shape)
    u, positions = u.to(device, dtype).requires_grad_(), positions.to(device)
    moved = {name: getattr(weights, name).to(device, dtype).requires_grad_() for name in ("w1", "b1", "w2", "b2")}
    weights = weights._replace(fourier=weights.fourier.to(device), **moved)
    given = {"measure": torch.full((shape.batch, shape.n), 1 / shape.n, device=device), "backend": "triton"}
    leaves = [u, *moved.values()]

    def normal(*sizes: int) -> Tensor:
        leaves.append(torch.randn(*sizes, device=device, dtype=dtype).requires_grad_())
        return leaves[-1]

    if mode == "exact":
        run = lambda: integral_transform(u, positions, weights, **given)  # noqa: E731
    elif mode == "near field":
        blocks = near_blocks(shape.n, scope.near_size, device)
        run = lambda: integral_transform(u, positions, weights, **given, blocks=blocks)  # noqa: E731
    elif mode == "Monte Carlo":
        indices = torch.randint(shape.n, (shape.batch, shape.n, scope.num_samples), device=device)
        drawn = {"indices": indices, "probabilities": torch.full(indices.shape, 1 / shape.n, device=device)}
        run = lambda: monte_carlo_transform(u, positions, weights, **given, **drawn)  # noqa: E731
    else:
        leaves = [u]
        given["bias"] = normal(shape.heads, shape.head_dim, shape.head_dim)
        along = shape.batch, shape.n, shape.heads
        if mode == "low rank, vector":
            hidden, dim = scope.factor_hidden, shape.head_dim
            phi, psi = (
                Factor(normal(*along, hidden), normal(shape.heads, rank, dim, hidden), normal(shape.heads, rank, dim))
                for _ in range(2)
            )
            run = lambda: low_rank_transform(u, phi, psi, **given)  # noqa: E731
        elif mode == "low rank, matrix":
            f, g = normal(*along, rank), normal(*along, rank)
            matrices = normal(shape.heads, rank, shape.head_dim, shape.head_dim)
            run = lambda: low_rank_matrix_transform(u, f, g, matrices, **given)  # noqa: E731
        else:
            leaves = []
            query, key, value = (normal(shape.batch, shape.heads, shape.n, shape.head_dim) for _ in range(3))
            run = lambda: scaled_dot_product_attention(query, key, value)  # noqa: E731

    def step() -> None:
        out = run()
        torch.autograd.grad(out, leaves, torch.ones_like(out), allow_unused=True)

    def forward() -> None:
        with torch.no_grad():
            run()

    return Runs(forward, step)


def near_blocks(n: int, near_size: int, device: str):
    """Returns square windows where the positions are a square, as those of an image, and windows of a line
    elsewhere."""
    side = round(n**0.5)
    if side * side == n:
        return window_blocks((side, side), round(near_size**0.5) // 2, device=device)
    return window_blocks((n,), near_size // 2, device=device)
