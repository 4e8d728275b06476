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

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.utils import logging

from configuration_itnet import ITNetConfig
from itnet_kernels import cluster_measure, kmeans_anchors, prefix_sum
from itnet_kernels.positions import position_dtype
from itnet_kernels.transforms import is_batched, is_transformed

logger = logging.get_logger(__name__)

# A mode that holds instead of the configuration's, in the current thread or task.
_MODE: ContextVar[str | None] = ContextVar("integration_mode", default=None)


@contextmanager
def integrating(mode: str) -> Iterator[None]:
    """Within this context all models integrate in the given mode, whatever their configurations say."""
    token = _MODE.set(mode)
    try:
        yield
    finally:
        _MODE.reset(token)


def integration_mode(config: ITNetConfig, count: int) -> str:
    """ "exact", "monte_carlo" or "low_rank" for a signal of ``count`` real positions.

    What a position of a causal model sees must not change with what comes later, and neither must the way it is
    integrated: there "auto" goes by ``max_position_embeddings``, whatever the length. A turn of "auto" is logged once.
    """
    is_compiling = torch.compiler.is_compiling()
    mode = config.integration_mode if is_compiling else _MODE.get() or config.integration_mode
    if mode != "auto":
        return mode
    count = config.max_position_embeddings if config.is_causal else count
    if count <= config.exact_max_positions:
        return "exact"
    mode = config.integration_modes[1]
    if not is_compiling:
        logger.warning_once(
            f'`integration_mode` ("auto") uses "{mode}" above `exact_max_positions` ({config.exact_max_positions}); '
            'set `integration_mode="exact"` for exact integration at every length'
        )
    return mode


class Anchors(NamedTuple):
    """A quadrature rule with few keys: one per cluster of positions."""

    indices: Tensor  # [B, M] the keys, or for a causal operator [B, n, M]: those of every query
    measure: Tensor  # the same shape: what the key stands for, summing to 1


class Group(NamedTuple):
    """Samples of a batch that are integrated in the same mode."""

    mode: str
    samples: Tensor | None = None  # their numbers [b]; None for all of them
    anchors: Anchors | None = None  # of these samples

    def select(self, tensor: Tensor) -> Tensor:
        """The group's part of a tensor [B, ...]."""
        return tensor if self.samples is None else tensor.index_select(0, self.samples)

    def domain(self, positions: Tensor, measure: Tensor) -> tuple[Tensor, Tensor]:
        """The group's part of positions [n, s] or [B, n, s] and of measure [B, n]."""
        return positions if positions.dim() == 2 else self.select(positions), self.select(measure)


Plan = Sequence[Group]  # every sample of a batch is in one of the groups


def integration_plan(config: ITNetConfig, measure: Tensor, is_padded: bool = True) -> Plan:
    """How each sample is integrated: by its own number of real positions, those of positive measure [B, n].

    So neither padding nor the other samples of a batch change a result. Where values cannot be looked at, as in a
    compiled graph, "auto" needs a batch that leaves no choice: ``n`` up to ``exact_max_positions``, or no padding.
    """
    length = measure.shape[1]
    longest = integration_mode(config, length)
    if not is_padded or longest == integration_mode(config, 0):
        return [Group(longest)]
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or is_batched(measure):
        raise ValueError(
            f"`integration_mode` ('auto') chooses for every sample by its number of real positions, which a compiled "
            f"or exported graph and vmap cannot look at: {length} positions with padding are above "
            f"`exact_max_positions` ({config.exact_max_positions}). Name a mode: "
            f"`config.integration_mode = 'exact'` or {longest!r}"
        )
    is_long = (measure > 0).sum(1) > config.exact_max_positions
    samples = [chosen.nonzero().flatten() for chosen in (~is_long, is_long)]
    if any(len(numbers) == len(measure) for numbers in samples):
        return [Group(longest if len(samples[1]) else "exact")]
    return [Group("exact", samples[0]), Group(longest, samples[1])]


def merge(plan: Plan, parts: Sequence[Tensor]) -> Tensor:
    """The groups' tensors [b, ...] as one of the whole batch [B, ...], in its order."""
    if len(parts) == 1:
        return parts[0]
    order = torch.cat([group.samples for group in plan])
    return torch.cat(list(parts)).index_select(0, order.argsort())


class ITNetAnchors:
    """Anchors of a signal's domain, each weighted by the measure that it stands for (§mc_impl of the paper).

    They stand for the k-means clusters of the positions. Those of a domain that the whole batch shares are kept until
    another domain comes. Causal operators have anchors of their own for every query: :func:`causal_anchors`.
    """

    def __init__(self):
        # Positions, measure of one sample, count; and their clusters. One attribute: threads see all of it or nothing.
        self._kept: tuple[tuple, tuple[Tensor, Tensor]] | None = None

    def __call__(self, positions: Tensor, measure: Tensor, count: int, is_causal: bool) -> Anchors:
        """positions [n, s] or [B, n, s], measure [B, n], ``count`` anchors."""
        if is_causal:
            return causal_anchors(measure, count)
        indices, clusters = (t.expand(measure.shape[0], -1) for t in self._find(positions, measure, count))
        return Anchors(indices, cluster_measure(measure, clusters, count))

    def _find(self, positions: Tensor, measure: Tensor, count: int) -> tuple[Tensor, Tensor]:
        # What a transform of torch.func wraps has no values to look at, or must not be kept beyond it.
        may_keep = positions.dim() == 2 and not torch.compiler.is_compiling() and not is_transformed()
        if not (may_keep and bool((measure == measure[:1]).all())):
            return kmeans_anchors(positions, measure, count)
        domain, kept = (positions, measure[:1], count), self._kept
        if kept is not None and _same(domain, kept[0]):
            return kept[1]
        clusters = kmeans_anchors(*domain)
        self._kept = domain, clusters
        return clusters


def _same(domain: tuple, other: tuple) -> bool:
    (x, measure, count), (other_x, other_measure, other_count) = domain, other
    return (
        x.device == other_x.device
        and count == other_count
        and torch.equal(x, other_x)
        and torch.equal(measure, other_measure)
    )


@torch.no_grad()
def causal_anchors(measure: Tensor, count: int) -> Anchors:
    r"""Anchors of every query of a causal operator, from what it sees alone: measure [B, n] -> [B, n, M].

    A query that sees c real keys cuts them, in their order, into blocks of h keys, h the largest power of two that
    leaves M blocks or more; then the oldest are joined in pairs until there are M, the last of which may be short. The
    middle of each block is the anchor, with the measure of the block. Up to M keys are all anchors: exact. Nothing
    depends on how many keys follow, so a prefix of a text is integrated as it would be alone. O(n M) in all.
    """
    real = measure > 0
    seen = real.cumsum(1).unsqueeze(-1)  # c [B, n, 1]
    doublings = (count - 1) * 2 ** torch.arange(1, 32, device=measure.device) < seen
    size = 2 ** doublings.sum(-1, keepdim=True)  # h
    joined = (-(-seen // size) - count).clamp(min=0)
    block = torch.arange(count, device=measure.device)
    is_joined = block < joined
    start = torch.where(is_joined, 2 * size * block, size * (block + joined)).minimum(seen)
    stop = (start + torch.where(is_joined, 2 * size, size)).minimum(seen)  # [B, n, M]

    order = real.int().argsort(dim=1, descending=True, stable=True)  # the real keys, then padding
    middle = (start + (stop - start - 1).clamp(min=0) // 2).clamp(max=measure.shape[1] - 1)
    indices = order.gather(1, middle.flatten(1)).view(middle.shape)
    cumulated = prefix_sum(measure.gather(1, order).to(position_dtype(measure.device)))
    cumulated = torch.nn.functional.pad(cumulated, (1, 0))  # of the first 0, 1, ... real keys
    mass = [cumulated.gather(1, bound.flatten(1)).view(bound.shape) for bound in (start, stop, seen)]
    total = mass[2].where(mass[2] > 0, 1)
    return Anchors(indices, ((mass[1] - mass[0]) / total).to(measure.dtype))


def needs_anchors(config: ITNetConfig, mode: str, length: int, training: bool) -> bool:
    """Whether signals of ``length`` positions, padding included, are integrated over anchors. As many are exact."""
    return mode == "monte_carlo" and not training and config.num_samples < length
