"""The pair sum by Triton: operands in the kernels' layout, chunks with bounded workspaces, library GEMMs with W2.

A chunk is a range of samples times a range of queries, for all heads. What lives for a chunk only:

    forward    moments A [H, b, t, w, d_h]
    backward   A, dA, dL/dpre [H, b, t, w, n_k], partial sums of the key gradients [H, b, tiles, n_k, d_h] in float32
    both       the position bias [t, w, n_k]

Each of the three lines is at most ``ITNET_WORKSPACE_MB`` (256) megabytes, unless a single query tile (16 positions of
one sample) needs more. A of further chunks is kept for a quarter of that, until one product adds it all to dW2.

Everything that a sample's result depends on belongs to that sample or is shared by the batch: the same sample gives
the same moments, bit by bit, whatever it is batched with.
"""

import contextlib
import math
import os
from collections.abc import Iterator

import torch
from torch import Tensor

from ..pair_inputs import HEAD_MAJOR, PairInputs, slices
from ..position_bias import PositionBias, gradients_of_set
from .backward import itnet_bwd_kernel
from .bias import HIDDEN, TritonBias
from .configs import BACKWARD_POSITIONS, KEY_MULTIPLE, backward_units, is_interpreted, size_class
from .forward import itnet_fwd_kernel
from .sizes import KernelSizes, resize

_MOST_QUERIES = 2048  # of a chunk: the second dimension of a CUDA grid ends at 65535 tiles
WORKSPACE_BYTES = int(os.environ.get("ITNET_WORKSPACE_MB", "256")) * 2**20


class TritonPairs:
    """One evaluation of the pair sum, forward or backward. Head-major layout [H, B, n, .], as in PairTiles."""

    def __init__(self, inputs: PairInputs):
        self.given = KernelSizes(inputs.queries.shape[-1], inputs.row.shape[-1])
        self.sizes = self.given.supported()
        filled = {name: resize(name, value, self.given, self.sizes) for name, value in inputs._asdict().items()}
        self.inputs = inputs = PairInputs(**filled)
        self.dtype = operand_dtype = inputs.operand_dtype
        # The bias is float16 for bfloat16 operands too: eight times the precision at the same width.
        self.bias_dtype = torch.float32 if operand_dtype == torch.float32 else torch.float16
        self.batch, self.num_queries, self.num_heads, self.head_dim = inputs.queries.shape
        self.num_keys, self.width = inputs.keys.shape[1], inputs.row.shape[-1]
        self.backward_units = backward_units(self.head_dim, operand_dtype.itemsize, device_major(inputs.keys.device))
        self.padded_keys = math.ceil(self.num_keys / KEY_MULTIPLE) * KEY_MULTIPLE
        self.queries = inputs.queries.permute(2, 0, 1, 3).contiguous()  # [H, B, n_q, d_h]
        keys = inputs.keys.permute(2, 0, 1, 3)  # [H, B, n_k, d_h]
        self.keys = self._padded(keys)
        # Values are weighted by omega / max omega of the sample, so that they keep the range of u in float16.
        measure = inputs.omega
        largest = measure.amax(1)  # [B]
        self.scale = largest.where(largest > 0, 1)
        measure = measure / self.scale[:, None]
        self.measure = torch.nn.functional.pad(measure, (0, self.padded_keys - self.num_keys))  # [B, padded_keys]
        self.values = self._padded(keys * measure[..., None])
        none = inputs.row.new_zeros(self.width, self.head_dim)
        self.w_key = none if inputs.w_key is None else inputs.w_key.contiguous()
        self.w_product = none if inputs.w_product is None else inputs.w_product.contiguous()
        self.w2 = inputs.w2.to(self.dtype)  # [H, w * d_h, d_h]
        row = inputs.row.permute(2, 0, 1, 3)  # [H, B, n_q, w]
        self.bias = None
        if inputs.has_position_bias or inputs.is_causal:
            self.bias = TritonBias(inputs, self.bias_dtype)
            row = self.bias.with_row_term(row)
        self.row = (0.5 * row).contiguous()
        if inputs.is_causal:
            self.bias.outweigh(self.row)
        self.ranges = self.scale.new_ones(1) if self.bias is None else self.bias.ranges

    def _padded(self, keys: Tensor) -> Tensor:
        """[H, B, n_k, d_h] -> [H, B, padded_keys, d_h] in the operands' dtype, zeros behind the last key."""
        out = keys.new_zeros(*keys.shape[:2], self.padded_keys, self.head_dim, dtype=self.dtype)
        out[:, :, : self.num_keys] = keys
        return out

    # Chunks

    def _position_sets(self) -> Iterator[slice]:
        """Samples of each set of positions: all if the batch shares its positions, otherwise one."""
        inputs = self.inputs
        shared = not inputs.has_position_bias or len(inputs.query_positions) == len(inputs.key_positions) == 1
        return slices(0, self.batch, self.batch if shared else 1)

    def _query_chunks(self, group_bytes: int) -> Iterator[slice]:
        """Ranges of queries whose workspaces fit for one sample: ``group_bytes`` for each head, sample and query."""
        bias_bytes = self.width * self.padded_keys * torch.finfo(self.bias_dtype).bits // 8
        size = WORKSPACE_BYTES // max(self.num_heads * group_bytes, bias_bytes)
        size = min(max(size // BACKWARD_POSITIONS, 1) * BACKWARD_POSITIONS, _MOST_QUERIES)
        return slices(0, self.num_queries, size)

    def _sample_chunks(self, samples: slice, rows: slice, group_bytes: int) -> Iterator[slice]:
        size = WORKSPACE_BYTES // (self.num_heads * (rows.stop - rows.start) * group_bytes)
        return slices(samples.start, samples.stop, size)

    def _bias_tile(self, index: int, rows: slice) -> Tensor | None:
        """Half of P over its range, padded: [t, w, padded_keys]; None if there is nothing to add.

        A causal operator hides the future here, so that its kernels are those of the full one with an earlier end.
        """
        if self.bias is None:
            return None
        shape = (rows.stop - rows.start, self.width, self.padded_keys)
        # One key tile more behind it, which the kernels may prefetch.
        flat = self.keys.new_zeros(math.prod(shape) + KEY_MULTIPLE, dtype=self.bias_dtype)
        tile = flat[:-KEY_MULTIPLE].view(shape)
        self.bias.write_tile(index, rows, tile[..., : self.num_keys])
        if self.inputs.is_causal:
            key = torch.arange(self.padded_keys, device=tile.device)
            last = torch.arange(rows.start, rows.stop, device=tile.device) + (self.num_keys - self.num_queries)
            tile.masked_fill_((key > last[:, None]).unsqueeze(1), HIDDEN)
        return tile

    def _launch_arguments(self, tile: Tensor | None, samples: slice, rows: slice) -> dict:
        """What both kernels take, for the queries ``rows`` of ``samples``."""
        count, queries = samples.stop - samples.start, rows.stop - rows.start
        return {
            "p_bias": self.row if tile is None else tile,
            "p_range": self.ranges[min(samples.start, len(self.ranges) - 1) :],
            "HAS_BIAS": tile is not None,
            "p_queries": self.queries[:, samples, rows],
            "p_keys": self.keys[:, samples],
            "p_values": self.values[:, samples],
            "p_row": self.row[:, samples, rows],
            "p_w_key": self.w_key,
            "p_w_product": self.w_product,
            "p_scale": self.scale[samples],
            "num_queries": queries,
            "num_keys": self.num_keys,
            "padded_keys": self.padded_keys,
            "causal_offset": rows.start + self.num_keys - self.num_queries,
            "samples": count,
            "all_samples": self.batch,
            "all_queries": self.num_queries,
            "W": self.width,
            "D": self.head_dim,
            "size": size_class(self.num_heads * count * queries * self.width * self.num_keys),
            "IS_CAUSAL": self.inputs.is_causal,
            "GELU": gelu_form(self.dtype, self.keys.device),
            "PRECISION": dot_precision(self.keys.device),
            "enable_fp_fusion": True,  # the default depends on Triton's version
        }

    # Forward

    def forward(self) -> Tensor:
        """[B, n_q, H, d_h] in float32."""
        out = torch.empty_like(self.queries)
        group_bytes = self.width * self.head_dim * self.keys.element_size()
        with on_device(self.keys.device):
            for samples in self._position_sets():
                for rows in self._query_chunks(group_bytes):
                    tile = self._bias_tile(samples.start, rows)
                    for chunk in self._sample_chunks(samples, rows, group_bytes):
                        moments = self._moments(tile, chunk, rows)
                        where = (slice(None), chunk, rows)
                        out[where] = float32_product(moments, self.w2).view(out[where].shape)
        return resize("queries", out.permute(1, 2, 0, 3), self.sizes, self.given)

    def _moments(self, tile: Tensor | None, samples: slice, rows: slice) -> Tensor:
        """A of a chunk: [H, b * t, w * d_h]."""
        batch, count = samples.stop - samples.start, rows.stop - rows.start
        moments = self.keys.new_empty(self.num_heads, batch * count, self.width * self.head_dim)

        def grid(meta):
            units = min(self.width, meta["ROWS"])
            return self.num_heads * batch, math.ceil(count / (meta["ROWS"] // units)) * (self.width // units)

        itnet_fwd_kernel[grid](**self._launch_arguments(tile, samples, rows), p_moments=moments)
        return moments

    # Backward

    def backward(self, grad_out: Tensor, names: list[str]) -> dict[str, Tensor]:
        """Gradients of the named arguments, in their layout. They accumulate in float32."""
        grad_out = resize("queries", grad_out, self.given, self.sizes)
        upstream = grad_out.permute(2, 0, 1, 3).to(self.dtype)  # [H, B, n_q, d_h]
        inputs, grads = self.inputs, self.inputs.zeros(name for name in names if name not in HEAD_MAJOR)
        # Every chunk has queries of its own, and writes theirs.
        grads |= {"queries": torch.empty_like(self.queries), "row": torch.empty_like(self.row)}
        grads["keys"] = self.queries.new_zeros(self.num_heads, self.batch, self.num_keys, self.head_dim)
        pending = []  # (A, dL/dout) of chunks that dW2 does not hold yet
        group_bytes = self._backward_bytes()
        with on_device(self.keys.device):
            for samples in self._position_sets():
                of_this_set = gradients_of_set(grads, samples.start)
                for rows in self._query_chunks(group_bytes):
                    tile = self._bias_tile(samples.start, rows)
                    grad_bias = 0
                    for chunk in self._sample_chunks(samples, rows, group_bytes):
                        grad_pre = self._backward_chunk(tile, upstream, chunk, rows, grads, pending)
                        if inputs.has_position_bias:
                            grad_bias = grad_bias + self._sum_over_groups(grad_pre, chunk)
                    if inputs.has_position_bias:
                        where = inputs.position_set(samples.start)
                        bias = PositionBias(*where, inputs.position_weights, inputs.has_frequencies)
                        dtype = self.dtype if self.dtype == torch.bfloat16 else inputs.key_features.dtype
                        bias.backward(rows, grad_bias[..., : self.num_keys], of_this_set, dtype)
        self._add_to_w2(grads, pending, least_bytes=0)
        grads |= {name: grads[name].permute(1, 2, 0, 3) for name in HEAD_MAJOR}
        return {name: resize(name, grads[name], self.sizes, self.given) for name in names}

    @staticmethod
    def _add_to_w2(grads: dict[str, Tensor], pending: list[tuple[Tensor, Tensor]], least_bytes: int) -> None:
        """dW2 += A^T dL/dout, in few products: each of them reads and writes all of dW2, which may be 25 MB."""
        if pending and sum(moments.nbytes for moments, _ in pending) >= least_bytes:
            moments, upstream = (torch.cat(parts, dim=1) for parts in zip(*pending, strict=True))
            grads["w2"] += float32_product(moments.mT, upstream)
            pending.clear()

    def _sum_over_groups(self, grad_pre: Tensor, samples: slice) -> Tensor:
        """dL/dP of a chunk from 2 dL/dpre / scale [H * b, t, w, padded_keys]: float32 [t, w, padded_keys]."""
        per_sample = grad_pre.unflatten(0, (self.num_heads, -1)).sum(0, dtype=torch.float32)  # [b, t, w, padded_keys]
        return torch.tensordot(0.5 * self.scale[samples], per_sample, dims=1)

    def _backward_bytes(self) -> int:
        """Workspace of one (head, sample, query)."""
        tile_rows = BACKWARD_POSITIONS * self.backward_units
        pairs = self.width * self.padded_keys  # dL/dpre, and the key partials of width / tile_rows tiles
        moments = 2 * self.width * self.head_dim
        return (pairs + moments) * self.keys.element_size() + 4 * pairs * self.head_dim // tile_rows

    def _backward_chunk(
        self, tile, upstream, samples: slice, rows: slice, grads: dict[str, Tensor], pending: list
    ) -> Tensor:
        """Adds the chunk's gradients to ``grads``; returns 2 dL/dpre / scale [H * b, t, w, padded_keys]."""
        heads, batch, count = self.num_heads, samples.stop - samples.start, rows.stop - rows.start
        width, dim, units = self.width, self.head_dim, self.backward_units
        groups, position_tiles = heads * batch, math.ceil(count / BACKWARD_POSITIONS)
        tiles = position_tiles * (width // units)
        where = (slice(None), samples, rows)
        upstream = upstream[where].reshape(heads, batch * count, dim)
        grad_moments = upstream @ self.w2.mT  # dA [H, b * t, w * d_h]
        moments = torch.empty_like(grad_moments)
        # A causal program writes the keys it sees only.
        new = self.queries.new_zeros if self.inputs.is_causal else self.queries.new_empty
        pairs = (groups, count, width, self.padded_keys) if tile is not None else (1,)
        grad_pre = new(pairs, dtype=self.dtype)
        grad_keys = new(groups, tiles, self.padded_keys, dim)
        grad_measure = new(groups, tiles, self.padded_keys) if "measure" in grads else self.measure
        grad_row = self.queries.new_empty(groups, count, width)
        grad_queries = self.queries.new_empty(width // units, groups, count, dim)
        grad_w_key, grad_w_product = self.queries.new_empty(2, groups, position_tiles, width, dim)
        itnet_bwd_kernel[(groups, tiles)](
            **self._launch_arguments(tile, samples, rows),
            p_measure=self.measure[samples],
            p_dmoments=grad_moments,
            p_moments=moments,
            p_dbias=grad_pre,
            p_drow=grad_row,
            p_dqueries=grad_queries,
            p_dw_key=grad_w_key,
            p_dw_product=grad_w_product,
            p_dkeys=grad_keys,
            p_dmeasure=grad_measure,
            BP=BACKWARD_POSITIONS,
            KC=units,
            NEEDS_MEASURE="measure" in grads,
        )
        pending.append((moments, upstream))
        self._add_to_w2(grads, pending, WORKSPACE_BYTES // 4)
        for name, partial in (("w_key", grad_w_key), ("w_product", grad_w_product)):
            if name in grads:
                grads[name] += partial.sum((0, 1))
        grads["row"][where] = grad_row.view(heads, batch, count, width)
        grads["queries"][where] = grad_queries.sum(0).view(heads, batch, count, dim)
        keys = grad_keys.sum(1)[:, : self.num_keys].view(heads, batch, self.num_keys, dim)
        grads["keys"][:, samples] += keys * (0.5 * self.scale[samples, None, None])
        if "measure" in grads:
            measure = grad_measure.sum(1)[:, : self.num_keys]
            grads["measure"][samples] += measure.view(heads, batch, self.num_keys).sum(0)
        return grad_pre


def gelu_form(dtype: torch.dtype, device: torch.device) -> str:
    """Which form of gelu.py the kernels use."""
    if dtype == torch.float32:
        return "erf"
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return "tanh.approx" if is_nvidia and not is_interpreted() else "tanh"


def dot_precision(device: torch.device) -> str:
    """The precision of float32 products: float32, unless PyTorch's old or new setting allows TF32.

    NVIDIA's tensor cores reach it by three TF32 products ("tf32x3"), 2^-21 relative error.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return "ieee"
    try:  # torch >= 2.9; the old function raises once the new setting was used
        allowed = torch.backends.cuda.matmul.fp32_precision
    except AttributeError:
        allowed = "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    return "tf32" if allowed == "tf32" else "tf32x3"


def device_major(device: torch.device) -> int | None:
    """Major compute capability of an NVIDIA device."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return torch.cuda.get_device_capability(device)[0] if is_nvidia else None


def float32_product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right of [H, m, k] and [H, k, n], accumulated and returned in float32 whatever their dtype."""
    has_out_dtype = "dtype" in torch.ops.aten.bmm.overloads()  # torch >= 2.8
    if left.dtype != torch.float32 and left.is_cuda and torch.version.hip is None and has_out_dtype:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def on_device(device: torch.device):
    """Triton launches on the current device: makes it that of the tensors."""
    return contextlib.nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device)
