# SPDX-License-Identifier: Apache-2.0
"""Interpolation of scattered data: a signal's values between its positions."""

import torch
from torch import Tensor

from itnet_kernels.first_layer import length
from itnet_kernels.measure import over_mass
from itnet_kernels.near.balls import nearest_keys
from itnet_kernels.transforms import recomputed

# Positions that a local interpolant looks at.
_NEAREST = 16
# Pairs of a query and a position whose weights are in memory at a time: 16 MB in float32.
_CHUNK_PAIRS = 2**22


def shepard_interpolation(
    features: Tensor, positions: Tensor, measure: Tensor, query_positions: Tensor, is_causal: bool = False
) -> Tensor:
    r"""Computes S[u](q) = sum_j w_j(q) u_j / sum_j w_j(q), w_j(q) = omega_j |q - y_j|^-(s+2)   (Shepard, 1968).

    It is continuous in q, and u_j at q = y_j: where a query sits on positions, only these count. The unit of the
    coordinates does not matter. A point that is split into two with half the measure each changes nothing; padding,
    omega = 0, does not count. Weights are made piece by piece, and again in the backward pass: O(n + m) memory.

    Args:
        features: u ``[B, n, d]``.
        positions: y ``[n, s]`` or ``[B, n, s]``, in float32.
        measure: omega ``[B, n]``.
        query_positions: q ``[m, s]`` or ``[B, m, s]``, in float32.
        is_causal: query i sees the positions j <= i alone. 0 where it sees none but padding.

    Returns:
        ``[B, m, d]`` in the dtype of ``features``.
    """
    size = max(1, _CHUNK_PAIRS // measure.numel())
    pieces = query_positions.split(size, dim=-2)
    rows = [None] * len(pieces)
    if is_causal:
        rows = torch.arange(query_positions.shape[-2], device=features.device).split(size)
    if len(pieces) == 1:
        return _interpolate(features, positions, measure, pieces[0], rows[0])
    return torch.cat(
        [recomputed(_interpolate, features, positions, measure, *piece) for piece in zip(pieces, rows, strict=True)],
        dim=1,
    )


def _interpolate(features: Tensor, positions: Tensor, measure: Tensor, queries: Tensor, rows: Tensor | None) -> Tensor:
    """Interpolates at some queries. With ``rows``, the numbers of these queries, they see nothing that comes later."""
    differences = queries.unsqueeze(-2) - positions.unsqueeze(-3)  # [(B,) m, n, s]
    counts = measure.unsqueeze(-2) > 0  # [B, 1, n]
    if rows is not None:
        counts = counts & (torch.arange(positions.shape[-2], device=rows.device) <= rows.unsqueeze(-1))  # [B, m, n]
    longest = differences.detach().abs().amax(-1)  # squares of the differences themselves could underflow
    meets = (longest == 0) & counts
    counts = meets | (counts & ~meets.any(-1, keepdim=True))  # [B, m, n]
    longest = longest.where(longest > 0, 1)
    squares = (differences / longest.unsqueeze(-1)).square().sum(-1)
    log_square = 2 * longest.log() + squares.where(squares > 0, 1).log()
    omega = measure.unsqueeze(-2)
    scores = omega.clamp_min(torch.finfo(omega.dtype).tiny).log() - (positions.shape[-1] / 2 + 1) * log_square
    weights = scores.masked_fill(~counts, torch.finfo(scores.dtype).min).softmax(-1) * counts
    return weights.to(features.dtype) @ features


def local_interpolation(features: Tensor, positions: Tensor, measure: Tensor, query_positions: Tensor) -> Tensor:
    r"""Computes Shepard's interpolant of the 16 nearest positions, with weights that reach 0 at the farthest of them.

        w_j(q) = omega_j (1 / |q - y_j| - 1 / R(q))^(s+2),   R(q) the distance of the farthest   (Renka, 1988)

    Continuous in q, and u_j at q = y_j, like :func:`shepard_interpolation`, whose arguments it takes and which it is
    for samples of 16 real positions or fewer, where R is infinite. 0 where there is nothing but padding. Linear in the
    number of queries.
    """
    if positions.shape[-2] <= _NEAREST:
        return shepard_interpolation(features, positions, measure, query_positions)
    batch, power = features.shape[0], positions.shape[-1] + 2
    places, queries = (t.expand(batch, *t.shape[-2:]) for t in (positions, query_positions))
    indices = nearest_keys(queries, places, measure > 0, _NEAREST)  # [B, m, 16], the nearest first
    samples = torch.arange(batch, device=indices.device)[:, None, None]
    omega = measure[samples, indices]
    distances = length(queries.unsqueeze(2) - places[samples, indices])
    farthest = distances.masked_fill(omega == 0, 0).amax(-1, keepdim=True)
    meets = (distances == 0) & (omega > 0)
    has_others = (measure > 0).sum(1)[:, None, None] > _NEAREST  # however many are padding
    edge = torch.where(has_others, 1 / farthest.where(farthest > 0, 1), 0)
    nearness = 1 / distances.where(distances > 0, 1) - edge
    largest = nearness.masked_fill(omega == 0, 0).amax(-1, keepdim=True)  # powers of large numbers overflow
    nearness = (nearness / largest.where(largest > 0, 1)).clamp(0, 1)
    weights = omega * torch.where(meets.any(-1, keepdim=True), meets.to(omega.dtype), nearness**power)
    total = weights.sum(-1, keepdim=True)  # 0 where all of them are equally far: their mean
    weights = torch.where(total > 0, weights, omega)
    weights = over_mass(weights, weights.sum(-1, keepdim=True))
    return torch.einsum("bmk,bmkd->bmd", weights.to(features.dtype), features[samples, indices])
