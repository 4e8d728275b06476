"""The sum over listed keys by Triton: chunks with bounded workspaces, library GEMMs with W2.

A chunk is a range of samples times a range of queries, for all heads. What lives for a chunk only:

    both       the position bias [b, t, w, M], b = 1 if the batch shares positions and lists
    forward    moments A [H, b, t, w, d_h]
    backward   A, dA, dQ [H, b, t, w, d_h], dL/dpre [b, t, H, w, M], gradients of keys per pair [b, t, M, H, d_h]

and is at most ``ITNET_LIST_WORKSPACE_MB`` (256) megabytes, unless one query needs more. Tensors keep the layout
[B, n, H, d_h]: the rows of a key for all heads lie side by side. Equal inputs give equal bits.
"""

import math
import os
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...exact.pair_inputs import POSITIONS, slices
from ...exact.position_bias import bias_gradients
from ...exact.triton.device import device_major, dot_precision, gelu_form, on_device
from ...products import float32_product
from ..list_sum import ListInputs
from ..sampled import take_keys
from .backward import list_bwd_kernel
from .bias import list_bias_kernel
from .configs import list_tile, power_of_two
from .forward import list_fwd_kernel
from .sums import content_sum_kernel, pair_sum_kernel

WORKSPACE_BYTES = int(os.environ.get("ITNET_LIST_WORKSPACE_MB", "256")) * 2**20
_BIAS_KEYS = 64  # keys of a tile of the bias
_SPLITS = 64  # parts at most in which the gradients of W_uy and W_had are added up


class Chunk(NamedTuple):
    """Some samples and some queries."""

    samples: slice
    rows: slice

    @property
    def shape(self) -> tuple[int, int]:
        return self.samples.stop - self.samples.start, self.rows.stop - self.rows.start


class TritonLists:
    """One evaluation of the sum over listed keys, forward or backward."""

    def __init__(self, inputs: ListInputs):
        self.inputs, self.dtype = inputs, inputs.operand_dtype
        self.batch, self.num_rows, self.num_heads, self.head_dim = inputs.queries.shape
        self.num_keys, self.width, self.length = inputs.keys.shape[1], inputs.row.shape[3], inputs.indices.shape[2]
        self.padded = math.ceil(self.length / 16) * 16
        self.queries, self.row = inputs.queries.contiguous(), inputs.row.contiguous()
        self.keys = inputs.keys.to(self.dtype).contiguous()
        self.coefficients = inputs.coefficients.float().contiguous()
        largest = self.coefficients.abs().amax(2)
        self.scale = largest.where(largest > 0, 1)  # [B, R]
        self.indices = inputs.indices.to(torch.int32).contiguous()
        self.per_list = math.ceil(self.num_rows / self.indices.shape[1])
        self.list_stride = 0 if len(self.indices) == 1 else self.indices[0].numel()
        none = self.row.new_zeros(1).expand(self.width, self.head_dim)
        self.w_key, self.w_product = (
            (none if weight is None else weight).float().contiguous() for weight in (inputs.w_key, inputs.w_product)
        )
        self.w2, self.b2 = inputs.w2.to(self.dtype), inputs.b2.float()  # [H, w * d_h, d_h], [H, d_h, d_h]
        self.bias = ListBias(self) if inputs.has_position_bias else None
        self.is_shared = self.bias is None or self.bias.is_shared
        self.major = device_major(self.keys.device)

    def forward(self) -> Tensor:
        """Returns the sums [B, R, H, d_h] in float32."""
        out = self.row.new_empty(self.inputs.queries.shape, dtype=torch.float32)
        shape = self.width, self.head_dim
        group_bytes = math.prod(shape) * self.dtype.itemsize
        with on_device(self.keys.device):
            for chunk, bias in self._chunks(group_bytes):
                moments = self.keys.new_empty(self.num_heads, *chunk.shape, *shape)
                mean = out.new_empty(self.num_heads, *chunk.shape, self.head_dim)
                self._launch(list_fwd_kernel, "forward", chunk, bias, p_moments=moments, p_mean=mean)
                found = torch.baddbmm(self._product(moments), mean.flatten(1, 2), self.b2)
                out[chunk] = found.view(self.num_heads, *chunk.shape, self.head_dim).permute(1, 2, 0, 3)
        return out

    def _product(self, moments: Tensor) -> Tensor:
        return float32_product(moments.view(self.num_heads, -1, self.width * self.head_dim), self.w2)

    def _chunks(self, group_bytes: int) -> Iterator[tuple[Chunk, tuple[Tensor, Tensor] | None]]:
        """Chunks and their bias; ``group_bytes`` are for each head, sample and query."""
        for rows in self.row_chunks(group_bytes):
            count = WORKSPACE_BYTES // ((rows.stop - rows.start) * self._row_bytes(group_bytes))
            bias = None
            for samples in slices(0, self.batch, count):
                chunk = Chunk(samples, rows)
                if self.bias is not None and (bias is None or not self.is_shared):
                    bias = self.bias.tile(chunk)
                yield chunk, bias

    def row_chunks(self, group_bytes: int) -> list[slice]:
        """Returns the ranges of queries of the chunks."""
        return list(slices(0, self.num_rows, WORKSPACE_BYTES // self._row_bytes(group_bytes)))

    def _row_bytes(self, group_bytes: int) -> int:
        """Returns the workspace of one query of one sample."""
        bias_bytes = 0 if self.bias is None else self.width * self.padded * self.dtype.itemsize
        return self.num_heads * group_bytes + bias_bytes

    def _launch(self, kernel, name: str, chunk: Chunk, bias, **arguments) -> None:
        tile = list_tile(name, self.head_dim, self.dtype.itemsize, self.major)
        units = min(tile.units, power_of_two(self.width))
        batch, rows = chunk.shape
        grid = (batch * rows * self.num_heads * math.ceil(self.width / units),)
        kernel[grid](
            p_queries=self.queries,
            p_keys=self.keys,
            p_row=self.row,
            p_coefficients=self.coefficients,
            p_scale=self.scale,
            p_indices=self.indices,
            p_bias=self.keys if bias is None else bias[0],
            p_range=self.scale if bias is None else bias[1],
            p_w_key=self.w_key,
            p_w_product=self.w_product,
            first_row=chunk.rows.start,
            first_sample=chunk.samples.start,
            rows=rows,
            samples=batch,
            heads=self.num_heads,
            all_rows=self.num_rows,
            num_keys=self.num_keys,
            length=self.length,
            padded=self.padded,
            range_tiles=math.ceil(self.length / _BIAS_KEYS),
            per_list=self.per_list,
            list_stride=self.list_stride,
            bias_stride=0 if self.is_shared else rows,
            W=self.width,
            D=self.head_dim,
            D_PADDED=power_of_two(self.head_dim),
            KC=units,
            BK=tile.keys,
            HAS_BIAS=bias is not None,
            GELU=gelu_form(self.dtype, self.keys.device),
            PRECISION=dot_precision(self.keys.device),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            enable_fp_fusion=True,  # the default depends on Triton's version
            **arguments,
        )

    # Backward

    def backward(self, grad_out: Tensor, names: list[str]) -> dict[str, Tensor]:
        """Returns the gradients of the named arguments."""
        inputs, heads, dim = self.inputs, self.num_heads, self.head_dim
        upstream = grad_out.permute(2, 0, 1, 3)  # [H, B, R, d_h]
        new = self.scale.new_zeros
        grads = {name: new(getattr(inputs, name).shape) for name in names if name not in _WRITTEN}
        grads["row"] = new(inputs.row.shape)
        grads["keys"] = new(inputs.keys.shape)
        tile = list_tile("backward", dim, self.dtype.itemsize, self.major)
        tiles = math.ceil(self.width / min(tile.units, power_of_two(self.width)))
        grad_queries = new(tiles, *inputs.queries.shape)
        content = new(2, self.width, dim)
        group_bytes = self.dtype.itemsize * (
            3 * self.width * dim + self.padded * self.width + tiles * self.length * dim
        )
        plan = PairsOfKeys(self, group_bytes, tiles)
        with on_device(self.keys.device):
            for chunk, bias in self._chunks(group_bytes):
                own = upstream[:, chunk.samples, chunk.rows].reshape(heads, -1, dim)  # [H, b t, d_h]
                half = own.to(self.dtype)
                shape = heads, *chunk.shape, self.width, dim
                grad_moments = (half @ self.w2.mT).view(shape)
                moments, grad_virtual = (self.keys.new_empty(shape) for _ in range(2))
                mean = new(heads, *chunk.shape, dim)
                pairs = self.keys.new_empty(*chunk.shape, tiles, self.length, heads, dim)
                needs_c = "coefficients" in names
                grad_c = new(*chunk.shape, tiles, self.length, heads) if needs_c else mean
                has_bias = bias is not None
                grad_pre = self.keys.new_empty((*chunk.shape, heads, self.width, self.padded) if has_bias else (1,))
                self._launch(
                    list_bwd_kernel, "backward", chunk, bias,
                    p_dmoments=grad_moments, p_dmean=own.float() @ self.b2.mT, p_moments=moments, p_mean=mean,
                    p_dvirtual=grad_virtual, p_dbias=grad_pre, p_drow=grads["row"], p_dqueries=grad_queries,
                    p_dkeys=pairs, p_dcoefficients=grad_c, all_samples=self.batch, NEEDS_COEFFICIENTS=needs_c,
                )  # fmt: skip
                plan.add(chunk, pairs, grads["keys"])
                if "w2" in grads:
                    grads["w2"] += float32_product(moments.view(heads, -1, self.width * dim).mT, half)
                if "b2" in grads:
                    grads["b2"] += mean.flatten(1, 2).mT @ own.float()
                if "w_key" in names or "w_product" in names:
                    content += self._content(chunk, grad_virtual)
                if needs_c:
                    grads["coefficients"][chunk] = grad_c.sum((2, 4))
                if has_bias and any(name in names for name in _OF_BIAS):
                    self.bias.add(chunk, grad_pre, grads)
        grads["queries"] = grad_queries.sum(0)
        grads |= {name: part.clone() for name, part in zip(("w_key", "w_product"), content, strict=True)}
        return {name: grads[name] for name in names}

    def _content(self, chunk: Chunk, grad_virtual: Tensor) -> Tensor:
        """Returns the gradients of W_uy and W_had from dQ [H, b, t, w, d_h]: [2, w, d_h]."""
        count, size = math.prod(grad_virtual.shape[:3]), self.width * self.head_dim
        splits = min(_SPLITS, math.ceil(count / 16))
        parts = self.scale.new_empty(2, splits, self.width, self.head_dim)
        batch, rows = chunk.shape
        content_sum_kernel[(math.ceil(size / 256), splits)](
            grad_virtual, self.queries, parts[0], parts[1], chunk.rows.start, chunk.samples.start, rows, batch,
            self.num_heads, self.num_rows, count, W=self.width, D=self.head_dim, BLOCK=256,
        )  # fmt: skip
        return parts.sum(1)


#: What the kernels write whole.
_WRITTEN = ("queries", "keys", "row", "w_key", "w_product")
_OF_BIAS = (*POSITIONS, "w_y", "w_relative", "w_distance")


class PairsOfKeys:
    """The pairs of every key, chunk by chunk of queries: the transposed lists."""

    def __init__(self, lists: TritonLists, group_bytes: int, tiles: int):
        self.lists, self.tiles = lists, tiles
        self.rows = lists.row_chunks(group_bytes)
        indices = lists.indices.long().repeat_interleave(lists.per_list, dim=1)[:, : lists.num_rows]  # [S, R, M]
        size = self.rows[0].stop
        numbers = torch.arange(lists.num_rows, device=indices.device) // size  # of the chunk of a query
        slots = lists.num_keys + 1  # one more than keys, where the next chunk begins
        flat = (indices + numbers[:, None] * slots).flatten(1)
        ordered, order = flat.sort(dim=1, stable=True)
        places = torch.arange(len(self.rows) * slots, device=indices.device).expand(len(flat), -1).contiguous()
        self.starts = torch.searchsorted(ordered, places).to(torch.int32)  # [S, chunks * (n + 1)]
        self.order = order.to(torch.int32)

    def add(self, chunk: Chunk, pairs: Tensor, total: Tensor) -> None:
        """Adds what is stored for the pairs of a chunk, [b, t, tiles, M, H, d_h], to their keys, [B, n, H, d_h]."""
        lists = self.lists
        columns = lists.num_heads * lists.head_dim
        block = min(256, power_of_two(columns))
        batch, rows = chunk.shape
        pair_sum_kernel[(lists.num_keys, batch, math.ceil(columns / block))](
            pairs, self.order, self.starts, total,
            first_sample=chunk.samples.start, chunk=chunk.rows.start // self.rows[0].stop,
            first_pair=chunk.rows.start * lists.length, pairs=rows * lists.length, keys=lists.num_keys,
            length=lists.length, order_stride=0 if len(self.order) == 1 else self.order.shape[1],
            starts_stride=0 if len(self.order) == 1 else self.starts.shape[1],
            COLUMNS=columns, BLOCK=block, TILES=self.tiles,
        )  # fmt: skip


class ListBias:
    """The position term of listed pairs, for chunks of queries."""

    def __init__(self, lists: TritonLists):
        inputs = lists.inputs
        self.lists, self.inputs = lists, inputs
        self.pending: Tensor | None = None  # dL/dP of queries whose samples were not all there yet
        parts = [getattr(inputs, name) for name in POSITIONS]
        self.is_shared = all(len(part) == 1 for part in (*parts, lists.indices))
        self.dtype = torch.float32 if lists.dtype == torch.float32 else torch.float16
        x, y, gamma_x, gamma_y = parts
        centre = (y.amin(1, keepdim=True) + y.amax(1, keepdim=True)) / 2  # [S, 1, s]
        self.x, self.y = ((part - centre).float().contiguous() for part in (x, y))
        self.gamma_x, self.gamma_y = gamma_x.float().contiguous(), gamma_y.to(self.dtype).contiguous()
        if not inputs.has_frequencies and inputs.w_y is not None:  # the keys are relative to their centre
            lists.row = (lists.row + (centre.to(lists.row.dtype) @ inputs.w_y.T).unsqueeze(2)).contiguous()
        none = lists.row.new_zeros(lists.width)
        self.weights = [none if weight is None else weight.float().contiguous() for weight in inputs.position_weights]

    def tile(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Returns half of P over its range, [b or 1, t, w, padded], and the ranges [b or 1, t, w, key tiles]."""
        lists, inputs = self.lists, self.inputs
        batch, rows = (1 if self.is_shared else chunk.shape[0]), chunk.shape[1]
        tiles = math.ceil(lists.length / _BIAS_KEYS)
        bias = lists.keys.new_empty(batch, rows, lists.width, lists.padded, dtype=self.dtype)
        ranges = lists.scale.new_empty(batch, rows, lists.width, tiles)
        units = min(64, power_of_two(lists.width))
        frequencies = self.gamma_x.shape[2] // 2 if inputs.has_frequencies else 0
        list_bias_kernel[(rows * math.ceil(lists.width / units), tiles, batch)](
            self.x, self.y, self.gamma_x, self.gamma_y, *self.weights, lists.indices, bias, ranges,
            first_row=chunk.rows.start, first_sample=0 if self.is_shared else chunk.samples.start, rows=rows,
            length=lists.length, padded=lists.padded, per_list=lists.per_list, list_stride=lists.list_stride,
            x_stride=0 if len(self.x) == 1 else lists.num_rows, y_stride=0 if len(self.y) == 1 else lists.num_keys,
            W=lists.width, DIM=self.x.shape[2], L=frequencies, L_PADDED=power_of_two(max(frequencies, 1)),
            KC=units, BK=_BIAS_KEYS, HAS_Y=inputs.w_y is not None, HAS_RELATIVE=inputs.w_relative is not None,
            HAS_DISTANCE=inputs.w_distance is not None, PRECISION=dot_precision(lists.keys.device),
            num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
        return bias, ranges

    def add(self, chunk: Chunk, grad_pre: Tensor, grads: dict[str, Tensor]) -> None:
        """Does the same as :meth:`backward`, from 2 dL/dpre / scale [b, t, H, w, padded]; once if samples share P."""
        grad = grad_pre[..., : self.lists.length].sum(2, dtype=torch.float32)  # [b, t, w, M]
        scale = 0.5 * self.lists.scale[chunk][..., None, None]
        if not self.is_shared:
            self.backward(chunk, grad.mul_(scale), grads)
            return
        grad = (grad * scale).sum(0, keepdim=True)
        self.pending = grad if self.pending is None else self.pending.add_(grad)
        if chunk.samples.stop == self.lists.batch:  # the last ones of these queries
            self.backward(Chunk(slice(0, 1), chunk.rows), self.pending, grads)
            self.pending = None

    def backward(self, chunk: Chunk, grad: Tensor, grads: dict[str, Tensor]) -> None:
        """Adds a chunk's parts to the gradients in ``grads``, given dL/dP [b, t, w, M]."""
        lists, inputs, samples = self.lists, self.inputs, chunk.samples
        batch, rows = grad.shape[:2]
        lists_of_rows = torch.arange(chunk.rows.start, chunk.rows.stop, device=grad.device) // lists.per_list
        indices = _of(inputs.indices, samples)[:, lists_of_rows].expand(batch, -1, -1).long()  # [b, t, M]
        x, y, gamma_x, gamma_y = (_of(getattr(inputs, name), samples) for name in POSITIONS)
        of_queries = [part[:, chunk.rows].expand(batch, -1, -1).flatten(0, 1).unsqueeze(1) for part in (x, gamma_x)]
        of_keys = [take_keys(part, indices).flatten(0, 1) for part in (y, gamma_y)]  # [b t, M, .]
        where = of_queries[0], of_keys[0], of_queries[1].to(grad.dtype), of_keys[1].to(grad.dtype)
        needs_positions = any(name in grads for name in POSITIONS)
        weights = inputs.position_weights
        found = bias_gradients(
            grad.flatten(0, 1).unsqueeze(1), *where, weights, inputs.has_frequencies, needs_positions
        )
        for name, value in found.items():
            if name not in grads:
                continue
            if name.startswith("query"):
                target = _of(grads[name], samples)[:, chunk.rows]
                value = value.view(batch, rows, -1)
                target += value.sum(0, keepdim=True) if len(target) < batch else value
            elif name.startswith("key"):
                _add_rows(_of(grads[name], samples), indices, value.unflatten(0, (batch, rows)))
            else:
                grads[name] += value


def _add_rows(total: Tensor, indices: Tensor, values: Tensor) -> None:
    """Adds values [b, t, M, f] to total [b or 1, n, f] at their keys [b, t, M], in a fixed order."""
    count = total.shape[1]
    if len(total) == len(indices):
        indices = indices + torch.arange(len(total), device=indices.device)[:, None, None] * count
    order = indices.flatten().argsort(stable=True)
    keys, rows = indices.flatten()[order], values.flatten(0, 2)[order]
    lengths = torch.bincount(keys, minlength=total.flatten(0, 1).shape[0])
    total += torch.segment_reduce(rows.to(total.dtype), "sum", lengths=lengths, axis=0, unsafe=True, initial=0).view(
        total.shape
    )


def _of(tensor: Tensor, samples: slice) -> Tensor:
    """Returns what belongs to some samples, in a tensor [B, ...] or [1, ...] that all samples share."""
    return tensor if len(tensor) == 1 else tensor[samples]
