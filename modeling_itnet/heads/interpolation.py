# SPDX-License-Identifier: Apache-2.0
"""Interpolation of scattered data: a signal's values between its positions."""

import torch
from torch import Tensor

from itnet_kernels.transforms import recomputed

# Pairs of a query and a position whose weights are in memory at a time: 16 MB in float32.
_CHUNK_PAIRS = 2**22


def shepard_interpolation(
    features: Tensor, positions: Tensor, measure: Tensor, query_positions: Tensor, is_causal: bool = False
) -> Tensor:
    r"""S[u](q) = sum_j w_j(q) u_j / sum_j w_j(q),   w_j(q) = omega_j |q - y_j|^-(s+2)   (Shepard, 1968).

    Continuous in q, and u_j at q = y_j: where a query sits on positions, only these count. The unit of the coordinates
    does not matter. A point that is split into two with half the measure each changes nothing; padding, omega = 0,
    does not count. Weights are made piece by piece, and again in the backward pass: O(n + m) memory.

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
