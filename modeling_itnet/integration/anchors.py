# SPDX-License-Identifier: Apache-2.0
"""The anchors that Monte Carlo integration uses at evaluation."""

from typing import NamedTuple

import torch
from torch import Tensor

from itnet_kernels import Coordinates, cluster_measure, kmeans_anchors, prefix_sum
from itnet_kernels.measure import over_mass
from itnet_kernels.positions import position_dtype
from itnet_kernels.transforms import is_transformed


class Anchors(NamedTuple):
    """A quadrature rule with few keys: one per cluster of positions."""

    indices: Tensor  # [B, M] the keys, or for a causal operator [B, n, M]: those of every query
    measure: Tensor  # the same shape: what the key stands for, summing to 1
    coordinates: Coordinates | None = None  # of the keys, [B, M, s], or [M, s] where samples share them


def find_anchors(
    coordinates: Coordinates, measure: Tensor, count: int, is_causal: bool, cluster=kmeans_anchors
) -> Anchors:
    """Returns anchors for the ``count`` k-means clusters of positions with a measure [B, n] (§mc_impl of the paper).

    Causal operators have anchors of their own for every query: :func:`causal_anchors`.
    """
    if is_causal:
        return causal_anchors(measure, count)
    positions, batch = coordinates.positions, measure.shape[0]
    indices, clusters = cluster(positions, measure, count)  # [B or 1, M], [B or 1, n]
    if positions.dim() == 2 and len(indices) == 1:  # the same for all samples, so that they share a position term
        places = positions[indices[0]]
    else:
        places = take(positions.expand(batch, *positions.shape[-2:]), indices)
    weight = cluster_measure(measure, clusters.expand(batch, -1), count)
    return Anchors(indices.expand(batch, -1), weight, Coordinates(places, coordinates.frequencies))


class ITNetAnchors:
    """Calls :func:`find_anchors`, and keeps the clusters of a domain that a batch shares until another comes."""

    def __init__(self):
        # Positions, measure of one sample, count; and their clusters. One attribute: threads see all of it or nothing.
        self._kept: tuple[tuple, tuple[Tensor, Tensor]] | None = None

    def __call__(self, coordinates: Coordinates, measure: Tensor, count: int, is_causal: bool) -> Anchors:
        return find_anchors(coordinates, measure, count, is_causal, self._cluster)

    def _cluster(self, positions: Tensor, measure: Tensor, count: int) -> tuple[Tensor, Tensor]:
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
    is_alike = (x.device, count) == (other_x.device, other_count)
    return is_alike and torch.equal(x, other_x) and torch.equal(measure, other_measure)


def take(tensor: Tensor, indices: Tensor) -> Tensor:
    """Takes a tensor [B, n, ...] at indices [B, t]: [B, t, ...]."""
    return tensor[torch.arange(tensor.shape[0], device=tensor.device)[:, None], indices]


@torch.no_grad()
def causal_anchors(measure: Tensor, count: int) -> Anchors:
    r"""Returns the anchors of every query of a causal operator, from what it sees alone: measure [B, n] -> [B, n, M].

    A query that sees c real keys cuts them, in their order, into blocks of h keys, h the largest power of two that
    leaves M blocks or more; then the oldest are joined in pairs until there are M, the last of which may be short. The
    middle of each block is the anchor, with the measure of the block. Up to M keys are all anchors, which is exact.
    Nothing depends on how many keys follow, so a prefix of a text is integrated as it would be alone. It takes O(n M).
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
    return Anchors(indices, over_mass(mass[1] - mass[0], mass[2]).to(measure.dtype))
