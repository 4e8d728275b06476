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
"""Choosing how to integrate, and the anchors that Monte Carlo integration uses at evaluation."""

from typing import NamedTuple

import torch
from torch import Tensor
from transformers.utils import logging

from configuration_itnet import ITNetConfig
from itnet_kernels import cluster_measure, kmeans_anchors

logger = logging.get_logger(__name__)


def integration_mode(config: ITNetConfig, count: int) -> str:
    """ "exact", "monte_carlo" or "low_rank" for signals of ``count`` positions. A turn of "auto" is logged once."""
    if config.integration_mode != "auto":
        return config.integration_mode
    if count <= config.exact_max_positions:
        return "exact"
    mode = config.integration_modes[1]
    if not torch.compiler.is_compiling():
        logger.warning_once(
            f'`integration_mode` ("auto") uses "{mode}" above `exact_max_positions` ({config.exact_max_positions}); '
            'set `integration_mode="exact"` for exact integration at every length'
        )
    return mode


class Anchors(NamedTuple):
    """A quadrature rule with one key per cluster of positions."""

    indices: Tensor  # [B, M] the keys
    measure: Tensor  # [B, M], or for a causal operator [B, n, M]: what each query sees of every cluster, normalised


class ITNetAnchors:
    """k-means anchors of a signal's domain, weighted by the measure of their clusters (§mc_impl of the paper).

    An anchor of a causal operator is the first position of its cluster, so that a query sees the anchor of whatever
    it sees of a cluster, and weighs it by that. The clusters of a domain that the whole batch shares are kept until
    another domain comes.
    """

    def __init__(self):
        self._domain: tuple | None = None  # positions, measure of one sample, count, is_causal
        self._clusters: tuple[Tensor, Tensor] | None = None

    def __call__(self, positions: Tensor, measure: Tensor, count: int, is_causal: bool) -> Anchors:
        """positions [n, s] or [B, n, s], measure [B, n], ``count`` anchors."""
        indices, clusters = self._find(positions, measure, count, is_causal)
        indices, clusters = (t.expand(measure.shape[0], -1) for t in (indices, clusters))
        if not is_causal:
            return Anchors(indices, cluster_measure(measure, clusters, count))
        members = torch.nn.functional.one_hot(clusters, count) * measure.unsqueeze(-1)  # [B, n, M]
        seen = members.cumsum(1)
        mass = measure.cumsum(1).unsqueeze(-1)
        return Anchors(indices, torch.where(mass > 0, seen / mass.where(mass > 0, 1), 0))

    def _find(self, positions, measure, count, is_causal) -> tuple[Tensor, Tensor]:
        shared = not torch.compiler.is_compiling() and positions.dim() == 2 and bool((measure == measure[:1]).all())
        if not shared:
            return kmeans_anchors(positions, measure, count, earliest=is_causal)
        domain = (positions, measure[:1], count, is_causal)
        if self._domain is None or not _same(domain, self._domain):
            self._clusters = kmeans_anchors(positions, measure[:1], count, earliest=is_causal)
            self._domain = domain
        return self._clusters


def _same(domain: tuple, other: tuple) -> bool:
    (x, measure, *rest), (other_x, other_measure, *other_rest) = domain, other
    return (
        x.device == other_x.device
        and rest == other_rest
        and torch.equal(x, other_x)
        and torch.equal(measure, other_measure)
    )


def needs_anchors(config: ITNetConfig, count: int, training: bool) -> bool:
    """Whether signals of ``count`` positions are integrated over anchors. As many anchors as positions are exact."""
    return not training and integration_mode(config, count) == "monte_carlo" and config.num_samples < count
