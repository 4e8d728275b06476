"""The pair sum by Triton: operands in the kernels' layout, chunks with bounded workspaces, library GEMMs with W2.

A chunk is a range of samples times a range of queries, for all heads. What lives for a chunk only:

    both       the position bias [b, t, w, n_k], b = 1 if the batch shares its positions; what computes it and dL/dP
    forward    moments A [H, b, t, w, d_h]
    backward   A, dA, dL/dpre [H, b, t, w, n_k], partial sums of the key gradients [H, b, tiles, n_k, d_h] in float32

Each of the three lines is at most ``ITNET_WORKSPACE_MB`` (256) megabytes, unless a single query tile (16 positions of
one sample) needs more. The first needs least, so that its chunks hold several of the others. A of further chunks is
kept for a quarter of that, until one product adds it all to dW2.

Everything that a sample's result depends on belongs to that sample or is shared by the batch: the same sample and the
same bias give the same moments, bit by bit, whatever they are batched with.
"""

import contextlib
import math
import os
from collections.abc import Iterator

import torch
from torch import Tensor

from ..pair_inputs import HEAD_MAJOR, PairInputs, slices
from .backward import itnet_bwd_kernel
from .bias import TritonBias
from .configs import BACKWARD_POSITIONS, KEY_MULTIPLE, backward_units, is_interpreted, size_class
from .forward import itnet_fwd_kernel
from .position_gradients import add_position_gradients, of_samples
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
        self.dtype = inputs.operand_dtype
        self.batch, self.num_queries, self.num_heads, self.head_dim = inputs.queries.shape
        self.num_keys, self.width = inputs.keys.shape[1], inputs.row.shape[-1]
        self.backward_units = backward_units(self.head_dim, self.dtype.itemsize, device_major(inputs.keys.device))
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
        if inputs.has_position_bias or inputs.is_causal:
            self.bias = TritonBias(inputs, self.padded_keys)
            self.row, self.ranges = self.bias.row, self.bias.ranges.expand(self.batch).contiguous()
        else:
            self.bias, self.ranges = None, self.scale
            self.row = (0.5 * inputs.row.permute(2, 0, 1, 3)).contiguous()  # [H, B, n_q, w]

    def _padded(self, keys: Tensor) -> Tensor:
        """[H, B, n_k, d_h] -> [H, B, padded_keys, d_h] in the operands' dtype, zeros behind the last key."""
        out = keys.new_zeros(*keys.shape[:2], self.padded_keys, self.head_dim, dtype=self.dtype)
        out[:, :, : self.num_keys] = keys
        return out

    def _bias_chunks(self, group_bytes: int, with_gradient: bool) -> Iterator[tuple[slice, slice]]:
        """(samples, queries) of each tile of the bias; ``group_bytes`` are for each head, sample and query."""
        bias_bytes = 1 if self.bias is None else self.bias.bytes_per_query(with_gradient)
        size = WORKSPACE_BYTES // max(self.num_heads * group_bytes, bias_bytes)
        size = min(max(size // BACKWARD_POSITIONS, 1) * BACKWARD_POSITIONS, _MOST_QUERIES)
        for rows in slices(0, self.num_queries, size):
            is_shared = self.bias is None or self.bias.is_shared
            count = self.batch if is_shared else WORKSPACE_BYTES // ((rows.stop - rows.start) * bias_bytes)
            yield from ((samples, rows) for samples in slices(0, self.batch, count))

    def _chunks(self, samples: slice, rows: slice, group_bytes: int) -> Iterator[tuple[tuple[slice, ...], slice]]:
        """Where a chunk is in tensors [H, B, n_q, .], and its samples counted from the first of its bias."""
        count = WORKSPACE_BYTES // (self.num_heads * (rows.stop - rows.start) * group_bytes)
        for chunk in slices(samples.start, samples.stop, count):
            yield (slice(None), chunk, rows), slice(chunk.start - samples.start, chunk.stop - samples.start)

    def _launch_arguments(self, where: tuple[slice, ...], tile: Tensor | None) -> dict:
        """What both kernels take, for a chunk and its bias [b or 1, t, w, padded_keys]."""
        _, samples, rows = where
        count, queries = samples.stop - samples.start, rows.stop - rows.start
        return {
            "p_bias": self.row if tile is None else tile,
            "bias_rows": 0 if tile is None or len(tile) == 1 else queries * self.width,
            "p_range": self.ranges[samples],
            "HAS_BIAS": tile is not None,
            "p_queries": self.queries[where],
            "p_keys": self.keys[:, samples],
            "p_values": self.values[:, samples],
            "p_row": self.row[where],
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
            for samples, rows in self._bias_chunks(group_bytes, with_gradient=False):
                tile = self.bias and self.bias.tile(samples, rows)
                for where, in_tile in self._chunks(samples, rows, group_bytes):
                    moments = self._moments(where, tile if tile is None else of_samples(tile, in_tile))
                    out[where] = float32_product(moments, self.w2).view(out[where].shape)
        return resize("queries", out.permute(1, 2, 0, 3), self.sizes, self.given)

    def _moments(self, where: tuple[slice, ...], tile: Tensor | None) -> Tensor:
        """A of a chunk: [H, b * t, w * d_h]."""
        heads, batch, count, _ = self.queries[where].shape
        moments = self.keys.new_empty(heads, batch * count, self.width * self.head_dim)

        def grid(meta):
            units = min(self.width, meta["ROWS"])
            return heads * batch, math.ceil(count / (meta["ROWS"] // units)) * (self.width // units)

        itnet_fwd_kernel[grid](**self._launch_arguments(where, tile), p_moments=moments)
        return moments

    # Backward

    def backward(self, grad_out: Tensor, names: list[str]) -> dict[str, Tensor]:
        """Gradients of the named arguments, in their layout. They accumulate in float32."""
        grad_out = resize("queries", grad_out, self.given, self.sizes)
        upstream = grad_out.permute(2, 0, 1, 3).to(self.dtype).contiguous()  # [H, B, n_q, d_h]
        grads = self.inputs.zeros(name for name in names if name not in HEAD_MAJOR)
        # Every chunk has queries of its own, and writes theirs.
        grads |= {"queries": torch.empty_like(self.queries), "row": torch.empty_like(self.row)}
        grads["keys"] = self.queries.new_zeros(self.num_heads, self.batch, self.num_keys, self.head_dim)
        grads["content"] = self.queries.new_zeros(2, self.width, self.head_dim)  # of W_uy and W_had
        pending = []  # (A, dL/dout) of chunks that dW2 does not hold yet
        group_bytes, half_scale = self._backward_bytes(), 0.5 * self.scale
        with on_device(self.keys.device):
            for samples, rows in self._bias_chunks(group_bytes, with_gradient=True):
                tile = self.bias and self.bias.tile(samples, rows)
                if self.inputs.has_position_bias:
                    grad_bias = self.queries.new_zeros(*tile.shape[:3], self.num_keys)
                for where, in_tile in self._chunks(samples, rows, group_bytes):
                    part = tile if tile is None else of_samples(tile, in_tile)
                    grad_pre = self._backward_chunk(where, part, upstream[where], grads, pending)
                    if self.inputs.has_position_bias:
                        self._add_to_bias(of_samples(grad_bias, in_tile), grad_pre, half_scale[where[1]])
                if self.inputs.has_position_bias:
                    add_position_gradients(self.inputs, samples, rows, grad_bias, grads)
        self._add_to_w2(grads, pending, least_bytes=0)
        grads["w_key"], grads["w_product"] = (grad.clone() for grad in grads.pop("content"))
        grads |= {name: grads[name].permute(1, 2, 0, 3) for name in HEAD_MAJOR}
        return {name: resize(name, grads[name], self.sizes, self.given) for name in names}

    @staticmethod
    def _add_to_w2(grads: dict[str, Tensor], pending: list[tuple[Tensor, Tensor]], least_bytes: int) -> None:
        """dW2 += A^T dL/dout, in few products: each of them reads and writes all of dW2, which may be 25 MB."""
        if pending and sum(moments.nbytes for moments, _ in pending) >= least_bytes:
            moments, upstream = (torch.cat(parts, dim=1) for parts in zip(*pending, strict=True))
            grads["w2"] += float32_product(moments.mT, upstream)
            pending.clear()

    def _add_to_bias(self, grad_bias: Tensor, grad_pre: Tensor, scale: Tensor) -> None:
        """dL/dP [b or 1, t, w, n_k] += the chunk's part, from dL/dpre / scale [H, b, t, w, padded_keys]."""
        per_sample = grad_pre[..., : self.num_keys].sum(0, dtype=torch.float32)  # [b, t, w, n_k]
        if self.bias.is_shared:
            grad_bias += torch.tensordot(scale, per_sample, dims=1)
        else:
            torch.mul(per_sample, scale[:, None, None, None], out=grad_bias)

    def _backward_bytes(self) -> int:
        """Workspace of one (head, sample, query)."""
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
        new = self.queries.new_zeros if self.inputs.is_causal else self.queries.new_empty
        pairs = (heads, batch, count, width, self.padded_keys) if tile is not None else (1,)
        grad_pre = new(pairs, dtype=self.dtype)
        grad_keys = new(heads, batch, tiles, self.padded_keys, dim)
        grad_measure = new(heads, batch, tiles, self.padded_keys) if "measure" in grads else self.measure
        grad_queries = self.queries.new_empty(width // units, heads, batch, count, dim)
        grad_content = self.queries.new_empty(2, heads * batch * position_tiles, width, dim)
        itnet_bwd_kernel[(heads * batch, tiles)](
            **self._launch_arguments(where, tile),
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
        self._add_to_w2(grads, pending, WORKSPACE_BYTES // 4)
        grads["content"] += grad_content.sum(1)
        # Not `grads[...] +=`, which would copy the sum once more.
        torch.sum(grad_queries, 0, out=grads["queries"][where])
        grads["keys"][:, samples].add_(grad_keys[..., : self.num_keys, :].sum(2))
        if "measure" in grads:
            grads["measure"][samples].add_(grad_measure[..., : self.num_keys].sum((0, 2)))
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
