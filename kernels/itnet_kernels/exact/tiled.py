"""Evaluation of the sum over pairs, one tile of (head, cell, query, key) at a time.

The pairs are cut up step by step. :class:`Cells` says which queries meet which keys. A :class:`Place` is a part of the
cells that shares a position bias, a group the heads and samples of a place whose moments meet W2 together, and a
:class:`Tile` some keys of a group. tiled_backward.py goes through the same tiles.
"""

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu

from .pair_inputs import POSITIONS, PairInputs, slices
from .position_bias import HIDDEN, PositionBias

# Elements of one tile of pre-activations, [groups, keys, queries * w]: 3 MB in float32, so that it stays in the cache
# between its two matrix products.
_TILE_ELEMENTS = 11 * 2**16
_TILE_KEYS = 512
# Elements of the moments A, [groups, queries * w, d_h], that meet W2 in one product.
_MOMENT_ELEMENTS = 2**20
# Elements of the position bias of one query tile over all keys.
_BIAS_ELEMENTS = 2**23
# Queries of a tile of a causal sum that are not worth a division.
_CAUSAL_QUERIES = 16

_gelu_ = torch.ops.aten.gelu_.default


class Place(NamedTuple):
    """A part of the cells: some blocks of some samples, and some of the queries in each."""

    samples: slice
    blocks: slice
    rows: slice

    @property
    def num_blocks(self) -> int:
        return self.blocks.stop - self.blocks.start

    @property
    def num_cells(self) -> int:
        return (self.samples.stop - self.samples.start) * self.num_blocks

    @property
    def num_queries(self) -> int:
        """Says how many queries each of the cells has."""
        return self.rows.stop - self.rows.start


class Cells:
    """Pairs as a grid of cells, [samples, blocks]: in a cell, every query meets every key.

    The sum over all pairs has one block per sample, which is the sample itself; otherwise the blocks list their
    queries and keys by index. What is taken for the cells of a place is [..., cells, t, f] for queries and
    [..., cells, m, f] for keys; ``side`` says which of the two.
    """

    def __init__(self, inputs: PairInputs, number: int | None = None):
        """Holds the cells of the blocks ``inputs.block_...[number]``, or of all pairs."""
        self.batch, self.num_queries = inputs.queries.shape[:2]
        self.num_keys, self.num_blocks = inputs.keys.shape[1], 1
        self.lists = self.pairs = None
        parts = [getattr(inputs, name) for name in POSITIONS]
        if number is not None:
            counts = {"queries": self.num_queries, "keys": self.num_keys}
            lists = {"queries": inputs.block_queries[number], "keys": inputs.block_keys[number]}
            self.pairs = inputs.block_pairs[number]  # [B or 1, blocks, t, m]
            parts += [*lists.values(), self.pairs]
            self.lists = {side: part.expand(self.batch, -1, -1) for side, part in lists.items()}  # [B, blocks, t or m]
            samples = torch.arange(self.batch, device=inputs.queries.device)[:, None, None]
            self.flat = {side: self.lists[side] + samples * count for side, count in counts.items()}
            self.num_blocks, self.num_queries, self.num_keys = self.pairs.shape[1:]
        # Whether all samples have the same positions, and the same pairs of them.
        self.is_shared = all(len(part) == 1 for part in parts)

    @classmethod
    def all(cls, inputs: PairInputs) -> list["Cells"]:
        """Returns what a sum goes over."""
        return [cls(inputs, number) for number in range(len(inputs.block_pairs))] or [cls(inputs)]

    def take(self, tensor: Tensor, side: str, heads: slice, place: Place) -> Tensor:
        """Returns the rows of a tensor [H, B, n, f] that belong to a place: [h, cells, t or m, f]."""
        rows = place.rows if side == "queries" else slice(None)
        if self.lists is None:
            return tensor[heads, place.samples, rows]
        indices = self.flat[side][place.samples, place.blocks, rows]
        taken = tensor[heads].flatten(1, 2).index_select(1, indices.flatten())
        return taken.view(len(taken), -1, indices.shape[2], tensor.shape[3])

    def add(self, total: Tensor, side: str, heads: slice, place: Place, values: Tensor) -> None:
        """Adds values [h, cells, t or m, f] to the rows of ``total`` that :meth:`take` takes."""
        rows = place.rows if side == "queries" else slice(None)
        if self.lists is None:
            total[heads, place.samples, rows] += values
        else:
            indices = self.flat[side][place.samples, place.blocks, rows]
            total[heads].flatten(1, 2).index_add_(1, indices.flatten(), values.flatten(1, 2))

    def take_positions(self, tensor: Tensor, side: str, place: Place) -> Tensor:
        """Does the same for a tensor [B or 1, n, f] without heads: [cells, t or m, f], those of one sample if all
        samples have the same."""
        indices = self._position_indices(tensor, side, place)
        if indices is None:
            return tensor[_of_samples(tensor, place), place.rows if side == "queries" else slice(None)]
        taken = tensor.flatten(0, 1).index_select(0, indices.flatten())
        return taken.view(-1, indices.shape[2], tensor.shape[2])

    def add_positions(self, total: Tensor, side: str, place: Place, values: Tensor) -> None:
        """Adds values [cells, t or m, f] to the rows of ``total`` that :meth:`take_positions` takes."""
        indices = self._position_indices(total, side, place)
        if indices is None:
            values = values if len(total) == self.batch else values.sum(0, keepdim=True)
            total[_of_samples(total, place), place.rows if side == "queries" else slice(None)] += values
        else:
            total.flatten(0, 1).index_add_(0, indices.flatten(), values.flatten(0, 1))

    def _position_indices(self, tensor: Tensor, side: str, place: Place) -> Tensor | None:
        if self.lists is None:
            return None
        rows = place.rows if side == "queries" else slice(None)
        lists = self.lists[side] if len(tensor) == 1 else self.flat[side]
        return lists[slice(0, 1) if self.is_shared else place.samples, place.blocks, rows]


def _of_samples(tensor: Tensor, place: Place) -> slice:
    return slice(0, 1) if len(tensor) == 1 else place.samples


class Tile(NamedTuple):
    """The pairs of t queries and m keys, for h heads and c cells of a group."""

    chunk: tuple[slice, slice]  # which heads and which cells of the group
    columns: slice  # which keys
    keys: Tensor  # u_j [h, c, m, d_h]
    virtual: Tensor | None  # Q_i[k] [h, c, t * w, d_h], if the kernel looks at content
    pre: Tensor  # pre-activations of the last hidden layer [h, c, m, t * w]
    early: Tensor | None  # those of the first one, if there are two


class PairTiles:
    """One evaluation of the pair sum. Head-major layout [H, B, n, .]: W2 differs by head, positions by sample.

    What belongs to the pairs of a :class:`Tile` is [h, c, m, t * w]: a row is as long as there are hidden units of all
    queries, which matrix products fill better than rows as long as there are keys (36 of a window, 197 of an image).
    """

    def __init__(self, inputs: PairInputs):
        self.inputs = inputs
        self.queries = inputs.queries.permute(2, 0, 1, 3).contiguous()  # [H, B, n_q, d_h]
        self.keys = inputs.keys.permute(2, 0, 1, 3).contiguous()  # [H, B, n_k, d_h]
        self.row = inputs.row.permute(2, 0, 1, 3).contiguous()  # [H, B, n_q, w]
        self.measure, self.scale = inputs.omega[None, :, :, None], 1.0  # omega_j [1, B, n_k, 1]; a factor of the sum
        if bool((inputs.omega == inputs.omega[0, 0]).all()):  # no hidden unit has to be weighted by itself
            self.measure, self.scale = None, float(inputs.omega[0, 0])
        self.num_heads, self.batch, _, self.head_dim = self.queries.shape
        self.width = self.row.shape[3]
        # Query i of a causal sum sees the keys j <= i + offset.
        self.offset = self.keys.shape[2] - self.queries.shape[2] if inputs.is_causal else None
        self.has_content = inputs.w_key is not None or inputs.w_product is not None
        has_bias = inputs.has_position_bias or len(inputs.block_pairs) > 0
        self.bias = PositionBias(inputs) if has_bias else None
        self._buffers: dict[str, Tensor] = {}

    def forward(self) -> Tensor:
        """Returns the sums [B, n_q, H, d_h]."""
        out = torch.zeros_like(self.queries)
        for cells, place in self._places():
            bias = None if self.bias is None else self.bias.tile(cells, place)  # [cells, m, t * w]
            for heads, part in self._groups(place):
                omega, shape = self._omega(cells, part), self._shape(heads, part)
                moments = self._buffer("moments", *shape, self.head_dim)  # A_i[k, c]: [h, c, t * w, d_h]
                for tile in self._tiles(cells, heads, part, self._of(bias, place, part)):
                    hidden = self._with_constant(_gelu_(tile.pre), tile, cells, part)
                    weigh(hidden, omega, tile)
                    accumulate(moments[tile.chunk], hidden.mT, tile.keys, tile.columns)
                contracted = self._by_head(moments) @ self.inputs.w2[heads]  # sum_{k,c} W2[(a, c), k] A_i[k, c]
                contracted = contracted.unflatten(1, (part.num_cells, -1))  # [h, c, t, d_h]
                cells.add(out, "queries", heads, part, contracted)
        return out.mul_(self.scale).permute(1, 2, 0, 3)

    # Iteration: places -> groups of heads and cells -> chunks of a group and key tiles

    def _places(self) -> Iterator[tuple[Cells, Place]]:
        """Yields the parts that share a position bias: all samples, unless each has its own."""
        for cells in Cells.all(self.inputs):
            per_query = self.width * min(cells.num_keys, _TILE_KEYS)
            size = min(_TILE_ELEMENTS // per_query, _BIAS_ELEMENTS // (self.width * cells.num_keys))
            if cells.num_queries <= 1.5 * size:  # no second tile with a few queries
                size = cells.num_queries
            if self.offset is not None:  # a tile goes over all keys that its last query sees: short ones waste little
                size = min(size, max(_CAUSAL_QUERIES, -(-cells.num_queries // 4)))
            per_cell = min(max(size, 1), cells.num_queries) * self.width * cells.num_keys
            in_blocks = _even(cells.num_blocks, _TILE_ELEMENTS // (2 * per_cell))
            in_batch = self.batch
            if self.bias is not None and not cells.is_shared:
                in_batch = _even(self.batch, _BIAS_ELEMENTS // (per_cell * in_blocks))
            counts = ((self.batch, in_batch), (cells.num_blocks, in_blocks), (cells.num_queries, size))
            for place in itertools.product(*(slices(0, count, most) for count, most in counts)):
                yield cells, Place(*place)

    def _groups(self, place: Place) -> Iterator[tuple[slice, Place]]:
        """Yields heads and samples whose moments meet W2 together."""
        limit = max(1, _MOMENT_ELEMENTS // (place.num_blocks * place.num_queries * self.width * self.head_dim))
        in_batch = _even(place.samples.stop - place.samples.start, limit)
        in_heads = _even(self.num_heads, limit // in_batch)
        samples = slices(place.samples.start, place.samples.stop, in_batch)
        for heads, part in itertools.product(slices(0, self.num_heads, in_heads), list(samples)):
            yield heads, place._replace(samples=part)

    def _end(self, cells: Cells, part: Place) -> int:
        """Returns the number after that of the last key that a query of the part sees."""
        return cells.num_keys if self.offset is None else part.rows.stop + self.offset

    def _of(self, bias: Tensor | None, place: Place, part: Place) -> Tensor | None:
        """Returns what belongs to the samples of a part in the bias of a place."""
        if bias is None or len(bias) == place.num_blocks:  # shared by all samples
            return bias
        first = (part.samples.start - place.samples.start) * place.num_blocks
        return bias[first : first + part.num_cells]

    def _shape(self, heads: slice, part: Place) -> tuple[int, int, int]:
        """Returns h, c and t * w of a group."""
        return heads.stop - heads.start, part.num_cells, part.num_queries * self.width

    def _buffer(self, name: str, *shape: int) -> Tensor:
        """Returns uninitialised memory that every tile uses again: fresh pages would cost as much as the GELU."""
        size = math.prod(shape)
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = self.keys.new_empty(size)
        return self._buffers[name][:size].view(shape)

    # The pieces of a tile

    def _omega(self, cells: Cells, part: Place) -> Tensor | None:
        """Returns omega_j [c, n_k, 1], unless it is the same for all keys."""
        return None if self.measure is None else cells.take(self.measure, "keys", slice(None), part)[0]

    def _tiles(self, cells: Cells, heads: slice, part: Place, bias: Tensor | None) -> Iterator[Tile]:
        """Yields the tiles of a group, whose cells have this bias. Pre-activations come from one batched product."""
        inputs, (_, num_cells, size) = self.inputs, self._shape(heads, part)
        keys = cells.take(self.keys, "keys", heads, part)  # [h, c, n_k, d_h]
        row = cells.take(self.row, "queries", heads, part)  # q_i[k] [h, c, t, w]
        virtual = None
        if self.has_content:
            virtual = self._buffer("virtual", *row.shape, self.head_dim)
            if inputs.w_product is None:
                virtual.copy_(inputs.w_key.expand_as(virtual))
            else:
                queries = cells.take(self.queries, "queries", heads, part).unsqueeze(3)
                constant = inputs.w_product.new_zeros(()) if inputs.w_key is None else inputs.w_key
                torch.addcmul(constant, inputs.w_product, queries, out=virtual)
            virtual = virtual.flatten(2, 3)
        row = row.flatten(2, 3).unsqueeze(2)  # [h, c, 1, t * w]
        for chunk, columns in self._chunks(cells, heads, part, num_cells if bias is None else len(bias)):
            tile_keys, own_virtual, early = keys[chunk][:, :, columns], None, None
            pre = self._buffer("pre", *tile_keys.shape[:3], size)
            if bias is None:
                pre.copy_(row[chunk].expand_as(pre))
            else:
                own = of_cells(bias, num_cells, chunk[1])[:, columns]
                per_bias = (-1, len(own))  # these cells have a bias of their own, the next ones have the same again
                torch.add(own, row[chunk].unflatten(1, per_bias), out=pre.unflatten(1, per_bias))
            if virtual is not None:
                own_virtual = virtual[chunk]
                store(pre, tile_keys, own_virtual.mT, beta=1)
            if inputs.w_mid is not None:  # W_mid h + b_mid
                early, mixed = pre, gelu(pre).unflatten(3, (-1, self.width)) @ inputs.w_mid.T  # [h, c, m, t, w]
                pre = mixed.add_(inputs.b_mid).flatten(3, 4)
            tile = Tile(chunk, columns, tile_keys, own_virtual, pre, early)
            self._hide(tile, cells, part)
            yield tile

    def _chunks(self, cells: Cells, heads: slice, part: Place, shared: int) -> Iterator[tuple]:
        """Yields heads and cells of a group, and keys, for one tile each. A bias belongs to ``shared`` cells."""
        (num_heads, num_cells, size), num_keys = self._shape(heads, part), cells.num_keys
        limit = max(1, _TILE_ELEMENTS // (size * min(num_keys, _TILE_KEYS)))
        in_cells = (
            shared * _even(num_cells // shared, limit // shared) if shared < num_cells else _even(num_cells, limit)
        )
        in_heads = 1 if in_cells < num_cells else _even(num_heads, limit // num_cells)
        chunks = itertools.product(slices(0, num_heads, in_heads), slices(0, num_cells, in_cells))
        return itertools.product(chunks, slices(0, self._end(cells, part), _TILE_KEYS))

    def _hide(self, tile: Tile, cells: Cells, part: Place) -> None:
        """Takes out pairs that do not count, where the bias has not done it."""
        by_query = tile.pre.unflatten(3, (-1, self.width))  # [h, c, m, t, w]
        if self.offset is not None and tile.columns.stop - 1 > part.rows.start + self.offset:
            query, key = (torch.arange(s.start, s.stop, device=by_query.device) for s in (part.rows, tile.columns))
            by_query.masked_fill_((key[:, None] > query + self.offset).unsqueeze(-1), HIDDEN)
        if cells.pairs is not None and self.inputs.w_mid is not None:
            pairs = self._pairs(tile, cells, part)
            by_query.unflatten(1, (-1, len(pairs))).masked_fill_(~pairs.unsqueeze(-1), HIDDEN)

    def _with_constant(self, hidden: Tensor, tile: Tile, cells: Cells, part: Place) -> Tensor:
        """Puts 1 into the last hidden unit of blocks where a pair counts, 0 elsewhere."""
        if cells.pairs is not None:
            pairs = self._pairs(tile, cells, part)
            hidden.unflatten(3, (-1, self.width)).unflatten(1, (-1, len(pairs)))[..., -1] = pairs
        return hidden

    def _pairs(self, tile: Tile, cells: Cells, part: Place) -> Tensor:
        """Returns which pairs of a tile count, in blocks: [b, m, t] of its b cells, or of those that others repeat."""
        return of_cells(self.bias.pairs(cells, part), part.num_cells, tile.chunk[1])[:, tile.columns]

    def _by_head(self, moments: Tensor) -> Tensor:
        """Turns [h, c, t * w, d_h] into [h, c * t, w * d_h], the layout that meets W2."""
        return moments.reshape(len(moments), -1, self.width * self.head_dim)


def accumulate(total: Tensor, left: Tensor, right: Tensor, columns: slice) -> None:
    """Adds left @ right to ``total``, [h, c, ., .] each; the first of several key tiles overwrites ``total``."""
    store(total, left, right, beta=1 if columns.start > 0 else 0)


def store(total: Tensor, left: Tensor, right: Tensor, beta: int = 0) -> None:
    """Sets total = left @ right + beta total, [h, c, ., .] each. One matrix as such is faster than one of a batch."""
    if total.shape[:2] == (1, 1):
        total[0, 0].addmm_(left[0, 0], right[0, 0], beta=beta)
    else:
        total.view(-1, *total.shape[2:]).baddbmm_(left.flatten(0, 1), right.flatten(0, 1), beta=beta)


def weigh(hidden: Tensor, omega: Tensor | None, tile: Tile) -> None:
    """Multiplies [h, c, m, t * w] by the measure of the keys, in place."""
    if omega is not None:
        hidden.mul_(omega[tile.chunk[1], tile.columns])


def _even(count: int, most: int) -> int:
    """Returns the size of pieces of ``count`` that are at most ``most``, or 1, and hardly differ."""
    return -(-count // -(-count // max(1, min(most, count))))


def of_cells(bias: Tensor, num_cells: int, cells: slice) -> Tensor:
    """Returns the bias of some of the cells, or that of all blocks where it holds for every sample."""
    return bias[cells] if len(bias) == num_cells else bias
