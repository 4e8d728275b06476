"""Evaluation of the sum over pairs, forward and backward, one tile of (head, cell, query, key) at a time."""

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu

from .cells import Cells, Place
from .pair_inputs import HEAD_MAJOR, PairInputs, slices
from .position_bias import HIDDEN, PositionBias

# Elements of one tile of pre-activations, [groups, keys, queries * w]: 3 MB in float32, so that it stays in the cache
# between its two matrix products.
_TILE_ELEMENTS = 13 * 2**16
_TILE_KEYS = 512
# Elements of the moments A, [groups, queries * w, d_h], that meet W2 in one product.
_MOMENT_ELEMENTS = 2**20
# Elements of the position bias of one query tile over all keys.
_BIAS_ELEMENTS = 2**23

_gelu = torch.ops.aten.gelu.out
_gelu_ = torch.ops.aten.gelu_.default
_gelu_backward = torch.ops.aten.gelu_backward.grad_input


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
        """[B, n_q, H, d_h]."""
        out = torch.zeros_like(self.queries)
        for cells, place in self._places():
            bias = None if self.bias is None else self.bias.tile(cells, place)  # [cells, m, t * w]
            for heads, part in self._groups(place):
                omega, shape = self._omega(cells, part), self._shape(heads, part)
                moments = self._buffer("moments", *shape, self.head_dim)  # A_i[k, c]: [h, c, t * w, d_h]
                for tile in self._tiles(cells, heads, part, self._of(bias, place, part)):
                    hidden = self._with_constant(_gelu_(tile.pre), tile, cells, part)
                    _weigh(hidden, omega, tile)
                    _accumulate(moments[tile.chunk], hidden.mT, tile.keys, tile.columns)
                contracted = self._by_head(moments) @ self.inputs.w2[heads]  # sum_{k,c} W2[(a, c), k] A_i[k, c]
                contracted = contracted.unflatten(1, (part.num_cells, -1))  # [h, c, t, d_h]
                cells.add(out, "queries", heads, part, contracted)
        return out.mul_(self.scale).permute(1, 2, 0, 3)

    # Iteration: places -> groups of heads and cells -> chunks of a group and key tiles

    def _places(self) -> Iterator[tuple[Cells, Place]]:
        """The parts that share a position bias: all samples, unless each has its own."""
        for cells in Cells.all(self.inputs):
            per_query = self.width * min(cells.num_keys, _TILE_KEYS)
            size = min(_TILE_ELEMENTS // per_query, _BIAS_ELEMENTS // (self.width * cells.num_keys))
            if cells.num_queries <= 1.5 * size:  # no second tile with a few queries
                size = cells.num_queries
            per_cell = min(max(size, 1), cells.num_queries) * self.width * cells.num_keys
            in_blocks = _even(cells.num_blocks, _TILE_ELEMENTS // (2 * per_cell))
            in_batch = self.batch
            if self.bias is not None and not cells.is_shared:
                in_batch = _even(self.batch, _BIAS_ELEMENTS // (per_cell * in_blocks))
            counts = ((self.batch, in_batch), (cells.num_blocks, in_blocks), (cells.num_queries, size))
            for place in itertools.product(*(slices(0, count, most) for count, most in counts)):
                yield cells, Place(*place)

    def _groups(self, place: Place) -> Iterator[tuple[slice, Place]]:
        """Heads and samples whose moments meet W2 together."""
        limit = max(1, _MOMENT_ELEMENTS // (place.num_blocks * place.num_queries * self.width * self.head_dim))
        in_batch = _even(place.samples.stop - place.samples.start, limit)
        in_heads = _even(self.num_heads, limit // in_batch)
        samples = slices(place.samples.start, place.samples.stop, in_batch)
        for heads, part in itertools.product(slices(0, self.num_heads, in_heads), list(samples)):
            yield heads, place._replace(samples=part)

    def _end(self, cells: Cells, part: Place) -> int:
        """One past the last key that a query of the part sees."""
        return cells.num_keys if self.offset is None else part.rows.stop + self.offset

    def _of(self, bias: Tensor | None, place: Place, part: Place) -> Tensor | None:
        """What belongs to the samples of a part in the bias of a place."""
        if bias is None or len(bias) == place.num_blocks:  # shared by all samples
            return bias
        first = (part.samples.start - place.samples.start) * place.num_blocks
        return bias[first : first + part.num_cells]

    def _shape(self, heads: slice, part: Place) -> tuple[int, int, int]:
        """h, c and t * w of a group."""
        return heads.stop - heads.start, part.num_cells, part.num_queries * self.width

    def _buffer(self, name: str, *shape: int) -> Tensor:
        """Uninitialised memory that every tile uses again: fresh pages for each would cost as much as the GELU."""
        size = math.prod(shape)
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = self.keys.new_empty(size)
        return self._buffers[name][:size].view(shape)

    # The pieces of a tile

    def _omega(self, cells: Cells, part: Place) -> Tensor | None:
        """omega_j [c, n_k, 1], unless it is the same for all keys."""
        return None if self.measure is None else cells.take(self.measure, "keys", slice(None), part)[0]

    def _tiles(self, cells: Cells, heads: slice, part: Place, bias: Tensor | None) -> Iterator[Tile]:
        """The tiles of a group, whose cells have this bias. The pre-activations of each are one batched product."""
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
                own = _of_cells(bias, num_cells, chunk[1])[:, columns]
                per_bias = (-1, len(own))  # these cells have a bias of their own, the next ones have the same again
                torch.add(own, row[chunk].unflatten(1, per_bias), out=pre.unflatten(1, per_bias))
            if virtual is not None:
                own_virtual = virtual[chunk]
                _store(pre, tile_keys, own_virtual.mT, beta=1)
            if inputs.w_mid is not None:  # W_mid h + b_mid
                early, mixed = pre, gelu(pre).unflatten(3, (-1, self.width)) @ inputs.w_mid.T  # [h, c, m, t, w]
                pre = mixed.add_(inputs.b_mid).flatten(3, 4)
            tile = Tile(chunk, columns, tile_keys, own_virtual, pre, early)
            self._hide(tile, cells, part)
            yield tile

    def _chunks(self, cells: Cells, heads: slice, part: Place, shared: int) -> Iterator[tuple]:
        """Heads and cells of a group, and keys, for one tile each; a bias belongs to ``shared`` cells."""
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
        """Which pairs of a tile count, in blocks: [b, m, t] of its b cells, or of those that the others repeat."""
        return _of_cells(self.bias.pairs(cells, part), part.num_cells, tile.chunk[1])[:, tile.columns]

    def _by_head(self, moments: Tensor) -> Tensor:
        """[h, c, t * w, d_h] -> [h, c * t, w * d_h], the layout that meets W2."""
        return moments.reshape(len(moments), -1, self.width * self.head_dim)

    # Backward

    def backward(self, grad_out: Tensor, names: list[str]) -> dict[str, Tensor]:
        """Gradients of the named arguments, and perhaps of others, in their layout."""
        if "measure" in names:
            self.measure, self.scale = self.inputs.omega[None, :, :, None], 1.0
        upstream = (grad_out.permute(2, 0, 1, 3) * self.scale).contiguous()  # [H, B, n_q, d_h]
        grads = self.inputs.zeros(name for name in names if name not in HEAD_MAJOR)
        grads |= {name: self.keys.new_zeros(getattr(self, name).shape) for name in HEAD_MAJOR}
        for cells, place in self._places():
            bias = grad_bias = None
            if self.bias is not None:
                bias = self.bias.tile(cells, place)
                grad_bias = torch.zeros_like(bias)
            for heads, part in self._groups(place):
                own = (self._of(tensor, place, part) for tensor in (bias, grad_bias))
                self._group_backward(cells, heads, part, cells.take(upstream, "queries", heads, part), *own, grads)
            if self.inputs.has_position_bias:
                self.bias.backward(cells, place, grad_bias, grads)
        return grads | {name: grads[name].permute(1, 2, 0, 3) for name in HEAD_MAJOR}

    def _group_backward(self, cells, heads: slice, part: Place, upstream: Tensor, bias, grad_bias, grads) -> None:
        omega, shape = self._omega(cells, part), self._shape(heads, part)
        by_head = upstream.flatten(1, 2)  # [h, c * t, d_h]
        grad_moments = self._buffer("grad_moments", *by_head.shape[:2], self.inputs.w2.shape[1])
        torch.bmm(by_head, self.inputs.w2[heads].mT, out=grad_moments)
        grad_moments = grad_moments.view(*shape, self.head_dim)  # dA [h, c, t * w, d_h]
        moments = self._buffer("moments", *grad_moments.shape)  # A, again, for the gradient of W2
        grad_row = self._buffer("grad_row", *shape[:2], 1, shape[2])  # dq
        grad_virtual = self._buffer("grad_virtual", *grad_moments.shape)  # dQ, where there is content
        grad_keys = self._buffer("grad_keys", *shape[:2], cells.num_keys, self.head_dim)  # as keys and as values
        grad_keys[:, :, self._end(cells, part) :] = 0
        is_by_keys = self._is_by_keys(cells, part)
        grad_measure = torch.zeros_like(omega) if "measure" in grads else None  # [c, n_k, 1]
        for tile in self._tiles(cells, heads, part, bias):
            chunk, columns, value, virtual, pre, early = tile
            outer = grad_moments[chunk]
            grad = self._buffer("grad", *pre.shape)  # dL/dh / omega, then dL/dpre in place: [h, c, m, t * w]
            _store(grad, value, outer.mT)
            hidden = _gelu(pre, out=self._buffer("hidden", *pre.shape))
            hidden = self._with_constant(hidden, tile, cells, part)
            if grad_measure is not None:
                grad_measure[chunk[1], columns, 0] += (hidden * grad).sum((0, 3))
            _weigh(hidden, omega, tile)
            total = grad_keys[chunk][:, :, columns]
            if is_by_keys:
                own_heads = slice(heads.start + chunk[0].start, heads.start + chunk[0].stop)
                self._value_backward(hidden, upstream[chunk], value, own_heads, total, grads["w2"])
            else:
                _accumulate(moments[chunk], hidden.mT, value, columns)
                _store(total, hidden, outer)
            _gelu_backward(grad, pre, approximate="none", grad_input=grad)
            _weigh(grad, omega, tile)
            if early is not None:
                grad = self._mix_backward(grad, early, grads)
            sums = grad.sum(2, keepdim=True)
            grad_row[chunk] = sums if columns.start == 0 else grad_row[chunk] + sums
            if virtual is not None:
                _accumulate(grad_virtual[chunk], grad.mT, value, columns)
                _store(total, grad, virtual, beta=1)
            if grad_bias is not None:
                own = _of_cells(grad_bias, part.num_cells, chunk[1])[:, columns]
                for one in grad.unflatten(1, (-1, len(own))).flatten(0, 1):  # one head of one sample after the other
                    own += one
        if not is_by_keys:
            grads["w2"][heads].baddbmm_(self._by_head(moments).mT, by_head)
        cells.add(grads["row"], "queries", heads, part, grad_row.view(*upstream.shape[:3], -1))
        cells.add(grads["keys"], "keys", heads, part, grad_keys)
        if grad_measure is not None:
            cells.add(grads["measure"][None, :, :, None], "keys", slice(None), part, grad_measure[None])
        if self.has_content:
            self._virtual_backward(cells, heads, part, grad_virtual.unflatten(2, (-1, self.width)), grads)

    def _is_by_keys(self, cells: Cells, part: Place) -> bool:
        """Whether :meth:`_value_backward` is faster: it saves a product over the pairs, t m w d_h multiply-adds, and
        has 2 m w d_h^2 for keys in place of t w d_h^2 for queries; it needs half as much again to be worth it."""
        saved = part.num_queries * (cells.num_keys + self.head_dim)
        return cells.pairs is None and saved > 3 * cells.num_keys * self.head_dim

    def _value_backward(self, hidden: Tensor, upstream: Tensor, value: Tensor, heads: slice, total, grad_w2) -> None:
        """The gradients of W2 and of the keys as values, through V_j[k, a] = omega_j sum_i h_ij[k] g_i[a].

        Both are sums over the keys alone then, so that neither A nor h dA is a sum over the pairs. ``total`` [h, c, m,
        d_h] is overwritten, and ``grad_w2`` of all heads added to.
        """
        hidden = hidden.unflatten(3, (-1, self.width)).mT  # [h, c, m, w, t]
        received = self._buffer("received", *hidden.shape[:4], self.head_dim)  # V
        for cell in itertools.product(*map(range, hidden.shape[:2])):
            torch.bmm(hidden[cell], upstream[cell].expand(hidden.shape[2], -1, -1), out=received[cell])
        w2 = self.inputs.w2[heads].unflatten(1, (self.width, -1)).mT.flatten(1, 2)  # [h, w * d_h, d_h], rows (k, a)
        _store(total, received.flatten(3), w2.unsqueeze(1).expand(-1, hidden.shape[1], -1, -1))
        for own, values, sums in zip(grad_w2[heads], value, received, strict=True):
            by_unit = sums.flatten(0, 1).transpose(0, 1)  # [w, c * m, d_h]
            own.unflatten(0, (self.width, -1)).baddbmm_(values.flatten(0, 1).T.expand(self.width, -1, -1), by_unit)

    def _virtual_backward(self, cells, heads, part, grad_virtual: Tensor, grads: dict[str, Tensor]) -> None:
        """dL/dQ_i[k] [h, c, t, w, d_h], which is overwritten, to the query features, W_uy and W_had."""
        inputs = self.inputs
        if inputs.w_key is not None:
            grads["w_key"] += grad_virtual.sum((0, 1, 2))
        if inputs.w_product is not None:
            # Not einsum: it would make a batch of d_h matrix-vector products of these.
            queries = cells.take(self.queries, "queries", heads, part).unsqueeze(-2)
            product = self._buffer("moments", *grad_virtual.shape)  # A is not needed any more
            grad_queries = torch.mul(grad_virtual, inputs.w_product, out=product).sum(-2)
            cells.add(grads["queries"], "queries", heads, part, grad_queries)
            grads["w_product"] += grad_virtual.mul_(queries).sum((0, 1, 2))

    def _mix_backward(self, grad: Tensor, early: Tensor, grads: dict[str, Tensor]) -> Tensor:
        """Through W_mid GELU(early) + b_mid: dL/d(second pre-activation) -> dL/d(first)."""
        hidden, grad = (tensor.view(-1, self.width) for tensor in (gelu(early), grad))  # [pairs, w]
        grads["b_mid"] += grad.sum(0)
        grads["w_mid"] += grad.T @ hidden
        grad = (grad @ self.inputs.w_mid).view(early.shape)
        return _gelu_backward(grad, early, approximate="none", grad_input=grad)


def _accumulate(total: Tensor, left: Tensor, right: Tensor, columns: slice) -> None:
    """total += left @ right, [h, c, ., .] each; the first of several key tiles overwrites what ``total`` held."""
    _store(total, left, right, beta=1 if columns.start > 0 else 0)


def _store(total: Tensor, left: Tensor, right: Tensor, beta: int = 0) -> None:
    """total = left @ right + beta total, [h, c, ., .] each."""
    total.view(-1, *total.shape[2:]).baddbmm_(left.flatten(0, 1), right.flatten(0, 1), beta=beta)


def _weigh(hidden: Tensor, omega: Tensor | None, tile: Tile) -> None:
    """Multiplies [h, c, m, t * w] by the measure of the keys, in place."""
    if omega is not None:
        hidden.mul_(omega[tile.chunk[1], tile.columns])


def _even(count: int, most: int) -> int:
    """The size of pieces of ``count`` that are at most ``most``, or 1, and hardly differ."""
    return -(-count // -(-count // max(1, min(most, count))))


def _of_cells(bias: Tensor, num_cells: int, cells: slice) -> Tensor:
    """The bias of some of the cells, or that of all blocks where it holds for every sample."""
    return bias[cells] if len(bias) == num_cells else bias
