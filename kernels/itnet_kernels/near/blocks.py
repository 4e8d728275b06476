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
        """Returns which pairs count, as a table of all: [B or 1, n_q, n_k]."""
        sets = max(part.shape[0] for part in self)
        queries, keys, pairs = (part.expand(sets, *part.shape[1:]) for part in self)
        numbers = queries.unsqueeze(-1) * num_keys + keys.unsqueeze(-2)  # [sets, N, t, m]
        table = torch.zeros(sets, num_queries * num_keys, dtype=torch.int32, device=pairs.device)
        table = table.scatter_add(1, numbers.flatten(1), pairs.int().flatten(1))
        return table.unflatten(1, (num_queries, num_keys)) > 0

    def mass(self, measure: Tensor, num_queries: int) -> Tensor:
        """Returns sum_j omega_j over the keys of every query: measure [B, n_k] -> [B, n_q]."""
        batch = measure.shape[0]  # not its len: that would be a constant of a traced graph
        queries, keys, pairs = (part.expand(batch, *part.shape[1:]) for part in self)
        weights = measure.gather(1, keys.flatten(1)).view(keys.shape)  # [B, N, m]
        with torch.autocast(measure.device.type, enabled=False):  # which would lower the product
            masses = (pairs.to(measure.dtype) @ weights.unsqueeze(-1)).flatten(1)  # [B, N t]
        return measure.new_zeros(batch, num_queries).scatter_add(1, queries.flatten(1), masses)


def check_blocks(blocks: Blocks | Sequence[Blocks], batch: int) -> list[Blocks]:
    """Returns one or several blocks as a list, and says what is wrong with one that does not fit."""
    blocks = [blocks] if isinstance(blocks, Blocks) else list(blocks)
    for part in blocks:
        shapes = [list(tensor.shape) for tensor in part]
        count, size, num_keys = part.pairs.shape[1:] if part.pairs.dim() == 4 else (0, 0, 0)
        expected = [count, size], [count, num_keys], [count, size, num_keys]
        fits = all(is_one_of(shape[1:], wanted) for shape, wanted in zip(shapes, expected, strict=True))
        if not fits or any(tensor.shape[0] not in (1, batch) for tensor in part) or part.pairs.dtype != torch.bool:
            raise ValueError(
                f"`blocks` {shapes} must be [B or 1, N, t], [B or 1, N, m] and booleans [B or 1, N, t, m] "
                f"with B = {batch}"
            )
    if not blocks:
        raise ValueError("`blocks` is empty: a sum over no pairs at all")
    return blocks


def all_pairs(listed: Tensor) -> Blocks:
    """Returns one block for the pairs of a table [B or 1, n_q, n_k]."""
    queries, keys = (torch.arange(count, device=listed.device)[None, None] for count in listed.shape[1:])
    return Blocks(queries, keys, listed.unsqueeze(1))


def listed_blocks(indices: Tensor) -> Blocks:
    """Returns a block for every query, from the indices of its keys [B, n_q, m], -1 for none."""
    queries = torch.arange(indices.shape[1], device=indices.device)[None, :, None]
    return Blocks(queries, indices.clamp(min=0), (indices >= 0).unsqueeze(2))


def window_blocks(
    shape: Sequence[int],
    reach: int,
    *,
    first: int = 0,
    is_causal: bool = False,
    middle: Tensor | None = None,
    device=None,
) -> list[Blocks]:
    """Returns the windows of a grid of positions, which are numbered row by row from ``first`` on.

    A window reaches ``reach`` positions to both sides along each axis, or to the past only; every position is in its
    own. The positions ``middle`` [k], by their numbers, lie in the middle of the grid: they are in every window that
    extends to there. No values are looked at: this can be traced.
    """
    queries, keys = (torch.tensor([[first]], device=device) for _ in range(2))
    pairs = torch.ones(1, 1, 1, dtype=torch.bool, device=device)
    for axis, count in enumerate(shape):
        stride = math.prod(shape[axis + 1 :])
        own_queries, own_keys, own_pairs = _axis_blocks(count, reach, is_causal, len(shape) > 1, device)
        queries, keys = (
            (old[:, None, :, None] + stride * new[None, :, None, :]).flatten(2, 3).flatten(0, 1)
            for old, new in ((queries, own_queries), (keys, own_keys))
        )
        pairs = pairs[:, None, :, None, :, None] & own_pairs[None, :, None, :, None, :]
        pairs = pairs.flatten(4, 5).flatten(2, 3).flatten(0, 1)
    blocks = Blocks(*(part.unsqueeze(0) for part in (queries, keys, pairs)))
    return [blocks] if middle is None or not len(middle) else _with_middle(blocks, shape, reach, first, middle)


def _axis_blocks(count: int, reach: int, is_causal: bool, is_plane: bool, device) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries [N, t], keys [N, m], pairs [N, t, m] along an axis; steps beyond its ends are hidden."""
    ahead = 0 if is_causal else reach
    size = _block_size(count, reach + ahead, is_plane)
    starts, offsets = (
        torch.arange(0, count, size, device=device)[:, None],
        torch.arange(-reach, size + ahead, device=device),
    )
    if size == count:
        offsets = torch.arange(count, device=device)
    queries, keys = starts + torch.arange(size, device=device), starts + offsets
    apart = queries.unsqueeze(2) - keys.unsqueeze(1)  # [N, t, m]
    pairs = (apart <= reach) & (apart >= -ahead)
    pairs = pairs & (queries < count).unsqueeze(2) & ((keys >= 0) & (keys < count)).unsqueeze(1)
    return queries.clamp(max=count - 1), keys.clamp(0, count - 1), pairs


def _block_size(count: int, extent: int, is_plane: bool) -> int:
    """Returns how many queries a block has along an axis. Larger blocks read keys less often; smaller ones have fewer
    pairs that do not count. A window that is about as long as the axis takes all of it."""
    size = 2 if is_plane else min(32, max(4, 2 ** math.ceil(math.log2((extent + 1) / 4))))
    return count if size + extent >= count else size


def _with_middle(blocks: Blocks, shape: Sequence[int], reach: int, first: int, middle: Tensor) -> list[Blocks]:
    """Returns the windows with positions in the middle of the grid, which only some blocks have as keys."""
    spans = [(math.ceil(count / 2 - 1 - reach), math.floor(count / 2 + reach)) for count in shape]
    meets, near, total = blocks.pairs.any(3), [0], 1
    for axis, (count, (low, high)) in enumerate(zip(shape, spans, strict=True)):
        step = (blocks.queries - first) // math.prod(shape[axis + 1 :]) % count
        meets = meets & (step >= low) & (step <= high)  # [1, N, t]
        size = _block_size(count, 2 * reach, len(shape) > 1)
        number, own = -(-count // size), range(max(low, 0) // size, min(high, count - 1) // size + 1)
        near, total = [before * number + block for before in near for block in own], total * number
    groups = []
    for numbers in (near, sorted(set(range(total)) - set(near))):
        if numbers:
            chosen = torch.tensor(numbers, device=middle.device)
            groups.append(Blocks(*(part.index_select(1, chosen) for part in blocks)))
    queries, keys, pairs = groups[0]
    reached = meets.index_select(1, torch.tensor(near, device=middle.device)).unsqueeze(-1)  # [1, N, t, 1]
    keys = torch.cat([keys, middle.expand(1, keys.shape[1], -1)], dim=2)
    groups[0] = Blocks(queries, keys, torch.cat([pairs, reached.expand(-1, -1, -1, len(middle))], dim=3))
    return groups
