# Copyright 2026 The ITNet Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Interpolation of scattered data: a signal's values between its positions."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Pairs of a query and a position whose weights are in memory at a time: 16 MB in float32.
_CHUNK_PAIRS = 2**22
_COINCIDENT = 1e-12  # squared distance below which a query sits on a position


def shepard_interpolation(features: Tensor, positions: Tensor, measure: Tensor, query_positions: Tensor) -> Tensor:
    r"""S[u](q) = sum_j w_j(q) u_j / sum_j w_j(q),   w_j(q) = omega_j |q - y_j|^-(s+2)   (Shepard, 1968).

    Continuous in q, and u_j at q = y_j. A point that is split into two with half the measure each changes nothing;
    padding, omega = 0, does not count. Weights are made piece by piece, and again in the backward pass: O(n + m)
    memory.

    Args:
        features: u ``[B, n, d]``.
        positions: y ``[n, s]`` or ``[B, n, s]``, in float32.
        measure: omega ``[B, n]``.
        query_positions: q ``[m, s]`` or ``[B, m, s]``, in float32.

    Returns:
        ``[B, m, d]`` in the dtype of ``features``.
    """
    size = max(1, _CHUNK_PAIRS // measure.numel())
    pieces = query_positions.split(size, dim=-2)
    if len(pieces) == 1:
        return _interpolate(features, positions, measure, query_positions)
    return torch.cat(
        [checkpoint(_interpolate, features, positions, measure, piece, use_reentrant=False) for piece in pieces], dim=1
    )


def _interpolate(features: Tensor, positions: Tensor, measure: Tensor, query_positions: Tensor) -> Tensor:
    differences = query_positions.unsqueeze(-2) - positions.unsqueeze(-3)  # [(B,) m, n, s]
    power = positions.shape[-1] / 2 + 1
    scores = -power * (differences.square().sum(-1) + _COINCIDENT).log()
    omega = measure.unsqueeze(-2)
    scores = (scores + omega.clamp_min(torch.finfo(omega.dtype).tiny).log()).masked_fill(omega == 0, -torch.inf)
    return scores.softmax(-1).to(features.dtype) @ features
