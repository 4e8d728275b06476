"""The backward where the fused kernel does not fit: chunks whose pairs go through memory, library GEMMs with W2.

What lives for a chunk (a range of samples times a range of queries, for all heads) only:

    the position bias [b, t, w, n_k], b = 1 if the batch shares its positions, and dL/dP
    A, dA, dL/dpre [H, b, t, w, n_k], partial sums of the key gradients [H, b, tiles, n_k, d_h] in float32

Each line is at most eight times ``ITNET_WORKSPACE_MB``, unless 16 positions of one sample need more: smaller chunks
would be thousands of launches. A of further chunks is kept for a quarter of that, until one product adds it to dW2.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ...products import float32_product
from ..pair_inputs import HEAD_MAJOR, slices
from .backward import itnet_bwd_kernel
from .bias import of_samples
from .configs import BACKWARD_POSITIONS, backward_units
from .device import device_major, on_device
from .pairs import WORKSPACE_BYTES, TritonPairs
from .sizes import resize

_MOST_QUERIES = 2048  # of a chunk: the second dimension of a CUDA grid ends at 65535 tiles
CHUNK_BYTES = 8 * WORKSPACE_BYTES


class ChunkedBackward(TritonPairs):
    """One evaluation of the gradients. Head-major layout [H, B, n, .]."""

    def __init__(self, inputs):
        super().__init__(inputs)
        self.float_queries = self.queries.to(self.row.dtype)
        keys = self.inputs.keys.permute(2, 0, 1, 3)
        self.values = self._padded(keys * self.measure[:, : self.num_keys, None])
        self.backward_units = backward_units(self.head_dim, self.dtype.itemsize, device_major(self.keys.device))

    def _bias_chunks(self, group_bytes: int, with_gradient: bool) -> Iterator[tuple[slice, slice]]:
        """Yields (samples, queries) of each tile of the bias; ``group_bytes`` are for each head, sample and query."""
        bias_bytes = 1 if self.bias is None else self._bias_bytes(with_gradient)
        size = CHUNK_BYTES // max(self.num_heads * group_bytes, bias_bytes)
        size = min(max(size // BACKWARD_POSITIONS, 1) * BACKWARD_POSITIONS, _MOST_QUERIES)
        for rows in slices(0, self.num_queries, size):
            is_shared = self.bias is None or self.bias.is_shared
            count = self.batch if is_shared else CHUNK_BYTES // ((rows.stop - rows.start) * bias_bytes)
            yield from ((samples, rows) for samples in slices(0, self.batch, count))

    def _bias_bytes(self, with_gradient: bool) -> int:
        """Returns the memory of each query of a bias: itself, its gradient, the factors of gamma(y) in float32."""
        num_features = self.bias.gamma_x.shape[-1]
        per_unit = self.bias.dtype.itemsize * self.padded_keys + 8 * num_features
        return self.width * (per_unit + (6 * self.padded_keys + 4 * num_features if with_gradient else 0))

    def _chunks(self, samples: slice, rows: slice, group_bytes: int) -> Iterator[tuple[tuple[slice, ...], slice]]:
        """Says where a chunk is in tensors [H, B, n_q, .], and its samples counted from the first of its bias."""
        count = CHUNK_BYTES // (self.num_heads * (rows.stop - rows.start) * group_bytes)
        for chunk in slices(samples.start, samples.stop, count):
            yield (slice(None), chunk, rows), slice(chunk.start - samples.start, chunk.stop - samples.start)

    def _chunk_arguments(self, where: tuple[slice, ...], tile: Tensor | None) -> dict:
        """Returns what both kernels take, for a chunk and its bias [b or 1, t, w, padded_keys]."""
        _, samples, rows = where
        return self._problem(samples, rows, tile) | {
            "bias_rows": 0 if tile is None or len(tile) == 1 else (rows.stop - rows.start) * self.width,
            "p_queries": self.float_queries[where],
            "p_values": self.values[:, samples],
        }

    def backward(self, grad_out: Tensor, names: list[str]) -> dict[str, Tensor]:
        """Returns the gradients of the named arguments, in their layout. They accumulate in float32."""
        grad_out = resize("queries", grad_out, self.given, self.sizes)
        upstream = grad_out.permute(2, 0, 1, 3).to(self.dtype).contiguous()  # [H, B, n_q, d_h]
        grads = self.inputs.zeros(name for name in names if name not in HEAD_MAJOR)
        # Every chunk has queries of its own, and writes theirs.
        grads |= {"queries": torch.empty_like(self.float_queries), "row": torch.empty_like(self.row)}
        grads["keys"] = self.row.new_zeros(self.num_heads, self.batch, self.num_keys, self.head_dim)
        grads["content"] = self.row.new_zeros(2, self.width, self.head_dim)  # of W_uy and W_had
        pending = []  # (A, dL/dout) of chunks that dW2 does not hold yet
        group_bytes, half_scale = self._backward_bytes(), 0.5 * self.scale
        with on_device(self.keys.device):
            for samples, rows in self._bias_chunks(group_bytes, with_gradient=True):
                tile = self.bias and self.bias.rows(samples, rows)
                if self.inputs.has_position_bias:
                    grad_bias = self.row.new_zeros(*tile.shape[:3], self.num_keys)
                for where, in_tile in self._chunks(samples, rows, group_bytes):
                    part = tile if tile is None else of_samples(tile, in_tile)
                    grad_pre = self._backward_chunk(where, part, upstream[where], grads, pending)
                    if self.inputs.has_position_bias:
                        self._add_to_bias(of_samples(grad_bias, in_tile), grad_pre, half_scale[where[1]])
                if self.inputs.has_position_bias:
                    self.bias.backward(samples, rows, grad_bias, grads)
        self._add_to_w2(grads, pending, least_bytes=0)
        grads["w_key"], grads["w_product"] = (grad.clone() for grad in grads.pop("content"))
        grads |= {name: grads[name].permute(1, 2, 0, 3) for name in HEAD_MAJOR}
        return {name: resize(name, grads[name], self.sizes, self.given) for name in names}

    @staticmethod
    def _add_to_w2(grads: dict[str, Tensor], pending: list[tuple[Tensor, Tensor]], least_bytes: int) -> None:
        """Adds A^T dL/dout to dW2, in few products: each of them reads and writes all of dW2, which may be 25 MB."""
        if pending and sum(moments.nbytes for moments, _ in pending) >= least_bytes:
            moments, upstream = (torch.cat(parts, dim=1) for parts in zip(*pending, strict=True))
            grads["w2"] += float32_product(moments.mT, upstream)
            pending.clear()

    def _add_to_bias(self, grad_bias: Tensor, grad_pre: Tensor, scale: Tensor) -> None:
        """Adds the chunk's part to dL/dP [b or 1, t, w, n_k], from dL/dpre / scale [H, b, t, w, padded_keys]."""
        per_sample = grad_pre[..., : self.num_keys].sum(0, dtype=torch.float32)  # [b, t, w, n_k]
        if self.bias.is_shared:
            grad_bias += torch.tensordot(scale, per_sample, dims=1)
        else:
            torch.mul(per_sample, scale[:, None, None, None], out=grad_bias)

    def _backward_bytes(self) -> int:
        """Returns the workspace of one (head, sample, query)."""
        tile_rows = BACKWARD_POSITIONS * self.backward_units
        pairs = self.width * self.padded_keys  # dL/dpre, and the key partials of width / tile_rows tiles
        moments = 2 * self.width * self.head_dim
        return (pairs + moments) * self.keys.element_size() + 4 * pairs * self.head_dim // tile_rows

    def _backward_chunk(self, where, tile, upstream: Tensor, grads: dict[str, Tensor], pending: list) -> Tensor:
        """Adds the chunk's gradients to ``grads``; returns 2 dL/dpre / scale [H, b, t, w, padded_keys]."""
        heads, batch, count, dim = upstream.shape
        width, units, samples = self.width, self.backward_units, where[1]
        position_tiles = math.ceil(count / BACKWARD_POSITIONS)
        tiles = position_tiles * (width // units)
        upstream = upstream.reshape(heads, batch * count, dim)
        grad_moments = upstream @ self.w2.mT  # dA [H, b * t, w * d_h]
        moments = torch.empty_like(grad_moments)
        # A causal program writes the keys it sees only.
        new = self.row.new_zeros if self.inputs.is_causal else self.row.new_empty
        pairs = (heads, batch, count, width, self.padded_keys) if tile is not None else (1,)
        grad_pre = new(pairs, dtype=self.dtype)
        grad_keys = new(heads, batch, tiles, self.padded_keys, dim)
        grad_measure = new(heads, batch, tiles, self.padded_keys) if "measure" in grads else self.measure
        grad_queries = self.row.new_empty(width // units, heads, batch, count, dim)
        grad_content = self.row.new_empty(2, heads * batch * position_tiles, width, dim)
        itnet_bwd_kernel[(heads * batch, tiles)](
            **self._chunk_arguments(where, tile),
            p_measure=self.measure[samples],
            p_dmoments=grad_moments,
            p_moments=moments,
            p_dbias=grad_pre,
            p_drow=grads["row"][where],
            p_dqueries=grad_queries,
            p_dw_key=grad_content[0],
            p_dw_product=grad_content[1],
            p_dkeys=grad_keys,
            p_dmeasure=grad_measure,
            BP=BACKWARD_POSITIONS,
            KC=units,
            NEEDS_MEASURE="measure" in grads,
        )
        pending.append((moments, upstream))
        self._add_to_w2(grads, pending, CHUNK_BYTES // 4)
        grads["content"] += grad_content.sum(1)
        # Not `grads[...] +=`, which would copy the sum once more.
        torch.sum(grad_queries, 0, out=grads["queries"][where])
        grads["keys"][:, samples].add_(grad_keys[..., : self.num_keys, :].sum(2))
        if "measure" in grads:
            grads["measure"][samples].add_(grad_measure[..., : self.num_keys].sum((0, 2)))
        return grad_pre
