"""Evaluation of the sum over pairs, forward and backward, one tile of (head, sample, query, key) at a time."""

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import gelu

from ..positions import find_displacements
from .pair_inputs import HEAD_MAJOR, POSITIONS, PairInputs, slices
from .position_bias import PositionBias, gradients_of_set

# Elements of one tile of pre-activations, [groups, queries * w, keys]: 3 MB in float32, so that it stays in the cache
# between its two matrix products.
_TILE_ELEMENTS = 13 * 2**16
_TILE_KEYS = 512
# Elements of the moments A, [groups, queries * w, d_h], that meet W2 in one product.
_MOMENT_ELEMENTS = 2**21
# Elements of the position bias of one query tile over all keys.
_BIAS_ELEMENTS = 2**23

_gelu = torch.ops.aten.gelu.out
_gelu_ = torch.ops.aten.gelu_.default
_gelu_backward = torch.ops.aten.gelu_backward.grad_input


class PairTiles:
    """One evaluation of the pair sum. Head-major layout [H, B, n, .]: W2 differs by head, positions by sample.

    In the comments, a tile has t queries (``rows``) and m keys (``columns``) of g groups: heads times samples.
    """

    def __init__(self, inputs: PairInputs):
        self.inputs = inputs
        self.queries = inputs.queries.permute(2, 0, 1, 3).contiguous()  # [H, B, n_q, d_h]
        self.keys = inputs.keys.permute(2, 0, 1, 3).contiguous()  # [H, B, n_k, d_h]
        self.row = inputs.row.permute(2, 0, 1, 3)  # [H, B, n_q, w]
        self.measure = inputs.omega[:, :, None]  # [B, n_k, 1]
        self.values = self.keys * self.measure  # omega_j u_j
        self.w_key, self.w_product, self.w2 = inputs.w_key, inputs.w_product, inputs.w2
        self.w_mid, self.b_mid = inputs.w_mid, inputs.b_mid
        self.num_heads, self.batch, self.num_queries, self.head_dim = self.queries.shape
        self.num_keys, self.width = self.keys.shape[2], self.row.shape[3]
        # Query i of a causal sum sees the keys j <= i + offset.
        self.offset = self.num_keys - self.num_queries if inputs.is_causal else None
        # The content columns of the first GEMM, and one column for q_i[k] against a row of ones.
        self.has_content = self.w_key is not None or self.w_product is not None
        ones = self.keys.new_ones(*self.keys.shape[:3], 1)
        self.augmented_keys = torch.cat([self.keys, ones], dim=-1) if self.has_content else ones  # [H, B, n_k, d_h+1]
        self._buffers: dict[str, Tensor] = {}

    def forward(self) -> Tensor:
        """[B, n_q, H, d_h]."""
        out = torch.empty_like(self.queries)
        for bias, samples in self._position_sets():
            for rows in self._query_tiles():
                tile_bias = bias.tile(rows).flatten(0, 1) if bias is not None else None  # [t * w, n_k]
                for heads, batch in self._groups(samples, rows):
                    virtual, keys, values = self._operands(heads, batch, rows)
                    moments = self._buffer("moments", *virtual.shape[:2], self.head_dim)  # A_i[k, c]: [g, t * w, d_h]
                    for chunk, columns, pre, _ in self._pre_activations(virtual, keys, tile_bias, rows):
                        _accumulate(moments[chunk], _gelu_(pre), values[chunk, columns], columns)
                    contracted = self._by_head(moments, heads) @ self.w2[heads]  # sum_{k,c} W2[(a, c), k] A_i[k, c]
                    out[heads, batch, rows] = contracted.unflatten(1, (-1, rows.stop - rows.start))
        return out.permute(1, 2, 0, 3)

    # Iteration: positions -> query tiles -> groups of (head, sample) -> chunks of a group and key tiles

    def _position_sets(self, per_sample: bool = False) -> Iterator[tuple[PositionBias | None, slice]]:
        """(bias, samples it holds for): one set if the batch shares its positions, otherwise one per sample.

        Positions given per sample but equal are shared, unless each sample wants its own gradient (``per_sample``).
        """
        inputs = self.inputs
        if not inputs.has_position_bias:
            yield None, slice(0, self.batch)
            return
        positions = inputs.query_positions, inputs.key_positions
        shared = all(len(t) == 1 or (not per_sample and bool((t == t[:1]).all())) for t in positions)
        for index in range(1 if shared else self.batch):
            x, y, *features = inputs.position_set(index)
            displacements = None
            if inputs.displacement_index is not None:
                displacements = inputs.known_displacements(index)
            elif inputs.w_relative is not None or inputs.w_distance is not None:
                displacements = find_displacements(x, y, inputs.frequencies, self.keys.dtype)
            bias = PositionBias(x, y, *features, inputs.position_weights, inputs.has_frequencies, displacements)
            yield bias, slice(0, self.batch) if shared else slice(index, index + 1)

    def _query_tiles(self) -> Iterator[slice]:
        per_query = self.width * min(self.num_keys, _TILE_KEYS)
        size = min(_TILE_ELEMENTS // per_query, _BIAS_ELEMENTS // (self.width * self.num_keys))
        return slices(0, self.num_queries, size)

    def _groups(self, samples: slice, rows: slice) -> Iterator[tuple[slice, slice]]:
        """Slices of heads and of samples whose moments meet W2 together."""
        limit = max(1, _MOMENT_ELEMENTS // ((rows.stop - rows.start) * self.width * self.head_dim))
        in_batch = min(limit, samples.stop - samples.start)
        in_heads = min(limit // in_batch, self.num_heads)
        return itertools.product(slices(0, self.num_heads, in_heads), slices(samples.start, samples.stop, in_batch))

    def _buffer(self, name: str, *shape: int) -> Tensor:
        """Uninitialised memory that every tile uses again: fresh pages for each would cost as much as the GELU."""
        size = math.prod(shape)
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = self.keys.new_empty(size)
        return self._buffers[name][:size].view(shape)

    # The pieces of a tile

    def _operands(self, heads: slice, batch: slice, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        """[Q_i[k]; q_i[k]] [g, t * w, d_h + 1], [u_j; 1] [g, n_k, d_h + 1] and omega_j u_j [g, n_k, d_h].

        Without content groups, the first two are q_i[k] and 1 only.
        """
        keys, values = self.augmented_keys[heads, batch].flatten(0, 1), self.values[heads, batch].flatten(0, 1)
        row = self.row[heads, batch, rows].unsqueeze(-1)  # [., ., t, w, 1]
        if not self.has_content:
            return row.reshape(len(keys), -1, 1), keys, values
        virtual = self._buffer("virtual", *row.shape[:-1], self.head_dim + 1)
        content, last = virtual.split([self.head_dim, 1], dim=-1)
        if self.w_product is None:
            content.copy_(self.w_key.expand_as(content))
        else:
            queries = self.queries[heads, batch, rows].unsqueeze(-2)
            constant = self.w_product.new_zeros(()) if self.w_key is None else self.w_key
            torch.addcmul(constant, self.w_product, queries, out=content)
        last.copy_(row)
        return virtual.view(len(keys), -1, self.head_dim + 1), keys, values

    def _pre_activations(
        self, virtual: Tensor, keys: Tensor, tile_bias: Tensor | None, rows: slice
    ) -> Iterator[tuple]:
        """(chunk of the group, key tile, pre-activations of the last hidden layer, of the first one if there are two).

        Each tile of pre-activations, [g, t * w, m], is one batched product.
        """
        size = _TILE_ELEMENTS // (virtual.shape[1] * min(self.num_keys, _TILE_KEYS))
        end = self.num_keys if self.offset is None else rows.stop + self.offset
        for chunk, columns in itertools.product(slices(0, len(virtual), size), slices(0, end, _TILE_KEYS)):
            left, right, early = virtual[chunk], keys[chunk, columns].mT, None
            pre = self._buffer("pre", *left.shape[:2], right.shape[2])
            if tile_bias is None:
                torch.bmm(left, right, out=pre)
            else:
                torch.baddbmm(tile_bias[:, columns], left, right, out=pre)
            if self.w_mid is not None:  # W_mid h + b_mid
                early, mixed = pre, self.w_mid @ gelu(pre).unflatten(1, (-1, self.width))  # [g, t, w, m]
                pre = mixed.add_(self.b_mid[:, None]).flatten(1, 2)
            if self.offset is not None and columns.stop - 1 > rows.start + self.offset:
                query, key = (torch.arange(s.start, s.stop, device=pre.device) for s in (rows, columns))
                hidden = key > query[:, None] + self.offset  # [t, m]
                # GELU and its derivative are exactly 0 far below zero.
                pre.unflatten(1, (-1, self.width)).masked_fill_(hidden[:, None], -1e4)
            yield chunk, columns, pre, early

    def _by_head(self, moments: Tensor, heads: slice) -> Tensor:
        """[g, t * w, d_h] -> [heads, samples * t, w * d_h], the layout that meets W2."""
        return moments.reshape(heads.stop - heads.start, -1, self.width * self.head_dim)

    # Backward

    def backward(self, grad_out: Tensor, names: list[str]) -> dict[str, Tensor]:
        """Gradients of the named arguments, and perhaps of others, in their layout."""
        upstream = grad_out.permute(2, 0, 1, 3).contiguous()  # [H, B, n_q, d_h]
        grads = self.inputs.zeros(name for name in names if name not in HEAD_MAJOR)
        for name in (*HEAD_MAJOR, "values"):
            grads[name] = self.keys.new_zeros(getattr(self, name).shape)
        for index, (bias, samples) in enumerate(self._position_sets(per_sample=POSITIONS[0] in names)):
            of_this_set = gradients_of_set(grads, index)
            for rows in self._query_tiles():
                tile_bias = grad_bias = None
                if bias is not None:
                    tile_bias = bias.tile(rows).flatten(0, 1)
                    grad_bias = torch.zeros_like(tile_bias)
                for heads, batch in self._groups(samples, rows):
                    where = (heads, batch, rows)
                    self._tile_backward(where, upstream[where], tile_bias, grad_bias, grads)
                if bias is not None:
                    bias.backward(rows, grad_bias.unflatten(0, (-1, self.width)), of_this_set, self.keys.dtype)
        grad_values = grads.pop("values")
        grads["measure"] = (grad_values * self.keys).sum((0, 3))
        grads["keys"] += grad_values * self.measure
        return grads | {name: grads[name].permute(1, 2, 0, 3) for name in HEAD_MAJOR}

    def _tile_backward(self, where, upstream: Tensor, tile_bias, grad_bias, grads: dict[str, Tensor]) -> None:
        heads, batch, rows = where
        virtual, keys, values = self._operands(*where)
        upstream = upstream.flatten(1, 2)  # [heads, samples * t, d_h]
        grad_moments = self._buffer("grad_moments", *upstream.shape[:2], self.w2.shape[1])
        torch.bmm(upstream, self.w2[heads].mT, out=grad_moments)
        grad_moments = grad_moments.view(len(keys), -1, self.head_dim)  # dA [g, t * w, d_h]
        moments = self._buffer("moments", *grad_moments.shape)  # A, again, for the gradient of W2
        grad_row = self._buffer("grad_row", *virtual.shape[:2])  # dq [g, t * w]
        grad_virtual = self._buffer("grad_virtual", *grad_moments.shape)  # dQ, where there is content
        grad_keys, grad_values = (grads[name][heads, batch].flatten(0, 1) for name in ("keys", "values"))
        for chunk, columns, pre, early in self._pre_activations(virtual, keys, tile_bias, rows):
            value = values[chunk, columns]
            # dL/dh, then dL/dpre in place: [g, t * w, m]
            grad = torch.bmm(grad_moments[chunk], value.mT, out=self._buffer("grad", *pre.shape))
            hidden = _gelu(pre, out=self._buffer("hidden", *pre.shape))
            _accumulate(moments[chunk], hidden, value, columns)
            grad_values[chunk, columns] += hidden.mT @ grad_moments[chunk]
            _gelu_backward(grad, pre, approximate="none", grad_input=grad)
            if early is not None:
                grad = self._mix_backward(grad, early, grads)
            grad_row[chunk] = grad.sum(-1) if columns.start == 0 else grad_row[chunk] + grad.sum(-1)
            if self.has_content:
                _accumulate(grad_virtual[chunk], grad, keys[chunk, columns, :-1], columns)
                grad_keys[chunk, columns] += grad.mT @ virtual[chunk, :, :-1]
            if grad_bias is not None:
                grad_bias[:, columns] += grad.sum(0) if len(grad) > 1 else grad[0]
        grads["w2"][heads].baddbmm_(self._by_head(moments, heads).mT, upstream)
        grads["row"][where] = grad_row.view_as(grads["row"][where])
        self._virtual_backward(where, grad_virtual, grads)

    def _mix_backward(self, grad: Tensor, early: Tensor, grads: dict[str, Tensor]) -> Tensor:
        """Through W_mid GELU(early) + b_mid: dL/d(second pre-activation) -> dL/d(first)."""
        grad = grad.unflatten(1, (-1, self.width))  # [g, t, w, m]
        grads["b_mid"] += grad.sum((0, 1, 3))
        grads["w_mid"] += torch.einsum("gtkj,gtlj->kl", grad, gelu(early).unflatten(1, (-1, self.width)))
        grad = (self.w_mid.T @ grad).flatten(1, 2)
        return _gelu_backward(grad, early, approximate="none", grad_input=grad)

    def _virtual_backward(self, where, grad_virtual: Tensor, grads: dict[str, Tensor]) -> None:
        """dL/dQ_i[k] to the query features, W_uy and W_had."""
        queries = self.queries[where]  # [heads, samples, t, d_h]
        grad_virtual = grad_virtual.view(*queries.shape[:3], self.width, -1)  # [heads, samples, t, w, d_h]
        if self.w_key is not None:
            grads["w_key"] += grad_virtual.sum((0, 1, 2))
        if self.w_product is not None:
            # Not einsum: it would make a batch of d_h matrix-vector products of these.
            product = self._buffer("product", *grad_virtual.shape)
            grads["queries"][where] = torch.mul(grad_virtual, self.w_product, out=product).sum(-2)
            grads["w_product"] += torch.mul(grad_virtual, queries.unsqueeze(-2), out=product).sum((0, 1, 2))


def _accumulate(total: Tensor, left: Tensor, right: Tensor, columns: slice) -> None:
    """total += left @ right, where the first key tile overwrites what ``total`` held."""
    total.baddbmm_(left, right, beta=1 if columns.start > 0 else 0)
