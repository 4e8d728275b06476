"""Pairs of queries and keys in blocks, so that a sum over few pairs is a batch of small dense ones.

Queries that lie together share most of their neighbours. A block holds a few of them, and all keys that any of them
wants; which pairs count is a table of the block. A sum over neighbourhoods is then a batch of the tiles that the sum
over all pairs consists of (exact/tiled.py), and keys are read once for several queries.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..validation import is_one_of


class Blocks(NamedTuple):
    """N blocks of t queries and m keys, [B, ...], or [1, ...] for all samples. A pair may stand in one block only."""

    queries: Tensor  # indices of the queries [B or 1, N, t]
    keys: Tensor  # indices of the keys [B or 1, N, m]
    pairs: Tensor  # whether a pair counts [B or 1, N, t, m]; bool

    def dense(self, num_queries: int, num_keys: int) -> Tensor:
        """Which pairs count, as a table of all: [B or 1, n_q, n_k]."""
        sets = max(map(len, self))
        queries, keys, pairs = (part.expand(sets, *part.shape[1:]) for part in self)
        numbers = queries.unsqueeze(-1) * num_keys + keys.unsqueeze(-2)  # [sets, N, t, m]
        table = torch.zeros(sets, num_queries * num_keys, dtype=torch.int32, device=pairs.device)
        table = table.scatter_add(1, numbers.flatten(1), pairs.int().flatten(1))
        return table.unflatten(1, (num_queries, num_keys)) > 0

    def mass(self, measure: Tensor, num_queries: int) -> Tensor:
        """sum_j omega_j over the keys of every query: measure [B, n_k] -> [B, n_q]."""
        batch = measure.shape[0]  # not its len: that would be a constant of a traced graph
        queries, keys, pairs = (part.expand(batch, *part.shape[1:]) for part in self)
        weights = measure.gather(1, keys.flatten(1)).view(keys.shape)  # [B, N, m]
        masses = (pairs.to(measure.dtype) @ weights.unsqueeze(-1)).flatten(1)  # [B, N t]
        return measure.new_zeros(batch, num_queries).scatter_add(1, queries.flatten(1), masses)


def check_blocks(blocks: Blocks, batch: int) -> None:
    shapes = [list(part.shape) for part in blocks]
    (count, size), num_keys = shapes[0][1:], shapes[1][-1]
    expected = [count, size], [count, num_keys], [count, size, num_keys]
    fits = all(is_one_of(shape[1:], wanted) for shape, wanted in zip(shapes, expected, strict=True))
    if not fits or any(shape[0] not in (1, batch) for shape in shapes) or blocks.pairs.dtype != torch.bool:
        raise ValueError(
            f"`blocks` {shapes} must be [B or 1, N, t], [B or 1, N, m] and booleans [B or 1, N, t, m] with B = {batch}"
        )


def all_pairs(listed: Tensor) -> Blocks:
    """One block for the pairs of a table [B or 1, n_q, n_k]."""
    queries, keys = (torch.arange(count, device=listed.device)[None, None] for count in listed.shape[1:])
    return Blocks(queries, keys, listed.unsqueeze(1))


def listed_blocks(indices: Tensor) -> Blocks:
    """A block for every query, from the indices of its keys [B, n_q, m], -1 for none."""
    queries = torch.arange(indices.shape[1], device=indices.device)[None, :, None]
    return Blocks(queries, indices.clamp(min=0), (indices >= 0).unsqueeze(2))


def window_blocks(
    shape: Sequence[int], reach: int, *, first: int = 0, is_causal: bool = False, beside: Tensor | None = None
) -> Blocks:
    """The windows of a grid of positions, which are numbered row by row from ``first`` on.

    A window reaches ``reach`` positions to both sides along each axis, or to the past only; every position is in its
    own. All windows hold the positions ``beside`` [k] too. No values are looked at: this can be traced.
    """
    device = None if beside is None else beside.device
    axes = [_axis_blocks(count, reach, is_causal, len(shape) > 1) for count in shape]
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    queries, keys, pairs = torch.tensor([[first]]), torch.tensor([[first]]), torch.ones(1, 1, 1, dtype=torch.bool)
    for (own_queries, own_keys, own_pairs), stride in zip(axes, strides, strict=True):
        queries, keys = (
            (old[:, None, :, None] + stride * new[None, :, None, :]).flatten(2, 3).flatten(0, 1)
            for old, new in ((queries, own_queries), (keys, own_keys))
        )
        pairs = pairs[:, None, :, None, :, None] & own_pairs[None, :, None, :, None, :]
        pairs = pairs.flatten(4, 5).flatten(2, 3).flatten(0, 1)
    queries, keys, pairs = (part.to(device).unsqueeze(0) for part in (queries, keys, pairs))
    if beside is not None and len(beside):
        keys = torch.cat([keys, beside.expand(1, keys.shape[1], -1)], dim=2)
        pairs = torch.cat([pairs, pairs.any(3, keepdim=True).expand(-1, -1, -1, len(beside))], dim=3)
    return Blocks(queries, keys, pairs)


def _axis_blocks(count: int, reach: int, is_causal: bool, is_plane: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [N, t], keys [N, m] and pairs [N, t, m] along one axis; steps beyond its ends are clamped and hidden."""
    ahead = 0 if is_causal else reach
    # Larger blocks read keys less often, and smaller ones have fewer pairs that do not count.
    size = 2 if is_plane else min(32, max(4, 2 ** math.ceil(math.log2((reach + ahead + 1) / 4))))
    if size + reach + ahead >= count:
        size, starts, offsets = count, torch.zeros(1, 1, dtype=torch.long), torch.arange(count)
    else:
        starts, offsets = torch.arange(0, count, size)[:, None], torch.arange(-reach, size + ahead)
    queries, keys = starts + torch.arange(size), starts + offsets
    apart = queries.unsqueeze(2) - keys.unsqueeze(1)  # [N, t, m]
    pairs = (apart <= reach) & (apart >= -ahead)
    pairs = pairs & (queries < count).unsqueeze(2) & ((keys >= 0) & (keys < count)).unsqueeze(1)
    return queries.clamp(max=count - 1), keys.clamp(0, count - 1), pairs
