"""The pair sum by Triton: operands in the kernels' layout, chunks with bounded workspaces, library GEMMs with W2.

A chunk is a range of samples times a range of queries, for all heads. What lives for a chunk only:

    both       the position bias [b, t, w, n_k], b = 1 if the batch shares its positions
    forward    moments A [H, b, t, w, d_h]
    backward   dL/dP [b, t, w, n_k], where gradients of positions want it

Each line is at most ``ITNET_WORKSPACE_MB`` (32) megabytes, so that it stays in the L2 cache of a large GPU, unless 16
queries of one sample need more. Chunks of the bias may hold several of the moments. The backward kernel needs neither
A nor its gradient outside of itself: it adds to partial sums that are as large as the gradients, a few times over.

Everything that a sample's result depends on belongs to that sample or is shared by the batch: the same sample and the
same bias give the same moments, bit by bit, whatever they are batched with.
"""

import math
import os
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...products import float32_product
from ..pair_inputs import HEAD_MAJOR, PairInputs, slices
from .bias import TritonBias
from .configs import KEY_MULTIPLE, TILE_SIZES, size_class
from .device import dot_precision, gelu_form, multiprocessors, on_device
from .forward import itnet_fwd_kernel
from .fragments import FRAGMENT_POSITIONS, from_gradient_fragments
from .fused_backward import itnet_fused_bwd_kernel
from .position_gradient import itnet_position_gradient_kernel
from .sizes import KernelSizes, resize
from .weight_sums import PositionWeightSums

_MOST_QUERIES = 2048  # of a chunk: the second dimension of a CUDA grid ends at 65535 tiles
WORKSPACE_BYTES = int(os.environ.get("ITNET_WORKSPACE_MB", "32")) * 2**20


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
        self.padded_keys = math.ceil(self.num_keys / KEY_MULTIPLE) * KEY_MULTIPLE
        self.queries = inputs.queries.permute(2, 0, 1, 3).to(self.dtype).contiguous()  # [H, B, n_q, d_h]
        keys = inputs.keys.permute(2, 0, 1, 3)  # [H, B, n_k, d_h]
        self.keys = self._padded(keys)
        # Hidden units are weighted by omega / max omega of the sample, so that they keep their range in float16.
        measure = inputs.omega
        largest = measure.amax(1)  # [B]
        self.scale = largest.where(largest > 0, 1)
        measure = measure / self.scale[:, None]
        self.measure = torch.nn.functional.pad(measure, (0, self.padded_keys - self.num_keys))  # [B, padded_keys]
        none = inputs.row.new_zeros(self.width, self.head_dim)
        self.w_key = none if inputs.w_key is None else inputs.w_key.contiguous()
        self.w_product = none if inputs.w_product is None else inputs.w_product.contiguous()
        self.w2 = inputs.w2.to(self.dtype).contiguous()  # [H, w * d_h, d_h]
        if inputs.has_position_bias or inputs.is_causal:
            self.bias = TritonBias(inputs, self.padded_keys)
            self.row, self.ranges = self.bias.row, self.bias.ranges.expand(self.batch).contiguous()
        else:
            self.bias, self.ranges = None, self.scale
            self.row = (0.5 * inputs.row.permute(2, 0, 1, 3)).contiguous()  # [H, B, n_q, w]

    def _padded(self, keys: Tensor) -> Tensor:
        """Turns [H, B, n_k, d_h] into [H, B, padded_keys, d_h] in the operands' dtype, zeros behind the last key."""
        out = keys.new_zeros(*keys.shape[:2], self.padded_keys, self.head_dim, dtype=self.dtype)
        out[:, :, : self.num_keys] = keys
        return out

    def _bias_chunks(self, with_gradient: bool) -> Iterator[tuple[slice, slice]]:
        """Yields (samples, queries) of each tile of the bias."""
        if self.bias is None:
            yield slice(0, self.batch), slice(0, self.num_queries)
            return
        bias_bytes = self.bias.bytes_per_query(with_gradient)
        size = WORKSPACE_BYTES // bias_bytes // FRAGMENT_POSITIONS * FRAGMENT_POSITIONS
        size = min(max(size, FRAGMENT_POSITIONS), _MOST_QUERIES)
        for rows in slices(0, self.num_queries, size):
            count = self.batch if self.bias.is_shared else WORKSPACE_BYTES // ((rows.stop - rows.start) * bias_bytes)
            yield from ((samples, rows) for samples in slices(0, self.batch, count))

    def _moment_chunks(self, samples: slice, rows: slice) -> Iterator[tuple[slice, slice]]:
        """Yields (samples, queries) whose moments fit into the workspace: whole samples, or parts of a single one."""
        group_bytes = self.num_heads * self.width * self.head_dim * self.keys.element_size()  # of a query
        queries = rows.stop - rows.start
        if queries * group_bytes > WORKSPACE_BYTES:
            most = max(WORKSPACE_BYTES // group_bytes // FRAGMENT_POSITIONS, 1)
            size = FRAGMENT_POSITIONS * self._chunk_size(math.ceil(queries / FRAGMENT_POSITIONS), most, self.num_heads)
            for chunk in slices(rows.start, rows.stop, size):
                yield from ((sample, chunk) for sample in slices(samples.start, samples.stop, 1))
            return
        programs = self.num_heads * math.ceil(queries / FRAGMENT_POSITIONS)  # for each sample and 8 hidden units
        size = self._chunk_size(samples.stop - samples.start, WORKSPACE_BYTES // (queries * group_bytes), programs)
        yield from ((chunk, rows) for chunk in slices(samples.start, samples.stop, size))

    def _chunk_size(self, count: int, most: int, programs: int) -> int:
        """Says how many of ``count`` parts, at most ``most``, a launch takes for the fewest waves of all launches.

        A part has ``programs`` tiles of positions times all tiles of 8 hidden units, two programs run on a
        multiprocessor at a time. Of sizes that need as many waves, the largest.
        """
        slots = 2 * multiprocessors(self.keys.device)

        def waves(size: int) -> int:
            full, rest = divmod(count, size)
            per_part = programs * self.width // 8
            return full * math.ceil(size * per_part / slots) + math.ceil(rest * per_part / slots)

        return min(range(max(1, min(count, most)), 0, -1), key=waves)

    def _launch_arguments(self, samples: slice, rows: slice, tile: Tensor | None) -> dict:
        """Returns what the kernels have in common, for some queries of some samples and their bias."""
        return self._problem(samples, rows, tile) | {
            "bias_blocks_per_sample": 0 if tile is None or self.bias.is_shared else self.bias_blocks,
            "p_queries": self.queries[:, samples, rows],
            "p_measure": self.measure[samples],
        }

    def _problem(self, samples: slice, rows: slice, tile: Tensor | None) -> dict:
        """Returns what every kernel of an exact sum takes, the chunked backward's included."""
        count, queries = samples.stop - samples.start, rows.stop - rows.start
        return {
            "p_bias": self.row if tile is None else tile,
            "p_range": self.ranges[samples],
            "HAS_BIAS": tile is not None,
            "p_keys": self.keys[:, samples],
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

    def _bias_tile(self, samples: slice, rows: slice) -> Tensor | None:
        if self.bias is None:
            return None
        tile = self.bias.tile(samples, rows)
        self.bias_blocks = tile.shape[1]
        return tile

    # Forward

    def forward(self) -> Tensor:
        """Returns the sums [B, n_q, H, d_h] in float32."""
        out = self.row.new_empty(self.queries.shape)
        with on_device(self.keys.device):
            for samples, rows in self._bias_chunks(with_gradient=False):
                tile = self._bias_tile(samples, rows)
                for chunk, queries in self._moment_chunks(samples, rows):
                    part = self._part(tile, chunk, queries, samples, rows)
                    moments = self._moments(chunk, queries, part)
                    target = out[:, chunk, queries]
                    if target.is_contiguous():  # whole samples of a batch that is not cut: no copy
                        float32_product(moments, self.w2, out=target.view(self.num_heads, -1, self.head_dim))
                    else:
                        target.copy_(float32_product(moments, self.w2).view(target.shape))
        return resize("queries", out.permute(1, 2, 0, 3), self.sizes, self.given)

    def _part(self, tile: Tensor | None, chunk: slice, queries: slice, samples: slice, rows: slice) -> Tensor | None:
        """Returns the bias from a chunk's first sample and query on; the tile begins at ``samples`` and ``rows``."""
        if tile is None:
            return None
        first = 0 if self.bias.is_shared else chunk.start - samples.start
        return tile[first:, (queries.start - rows.start) // FRAGMENT_POSITIONS :]

    def _moments(self, samples: slice, rows: slice, tile: Tensor | None) -> Tensor:
        """Returns A of a chunk: [H, b * t, w * d_h]."""
        batch, count = samples.stop - samples.start, rows.stop - rows.start
        moments = self.keys.new_empty(self.num_heads, batch * count, self.width * self.head_dim)

        def grid(meta):
            units = meta["ROWS"] // meta["BP"]
            return self.num_heads * batch, math.ceil(count / meta["BP"]) * (self.width // units)

        itnet_fwd_kernel[grid](**self._launch_arguments(samples, rows, tile), p_moments=moments)
        return moments

    # Backward

    def backward(self, grad_out: Tensor, names: list[str]) -> dict[str, Tensor]:
        """Returns the gradients of the named arguments, in their layout. They accumulate in float32."""
        grad_out = resize("queries", grad_out, self.given, self.sizes)
        self.upstream = grad_out.permute(2, 0, 1, 3).to(self.dtype).contiguous()  # [H, B, n_q, d_h]
        grads = self.inputs.zeros(name for name in names if name not in HEAD_MAJOR)
        grads["row"] = torch.empty_like(self.row)  # every program has rows of its own
        partial = self._partial_sums("measure" in grads)
        needs_dp = stores_bias_gradient(self.inputs, names)
        sums = PositionWeightSums(self) if self.inputs.has_position_bias and not needs_dp else None
        with on_device(self.keys.device):
            for samples, rows in self._bias_chunks(with_gradient=needs_dp):
                tile = self._bias_tile(samples, rows)
                self._backward_chunk(samples, rows, tile, grads["row"], partial)
                if needs_dp:
                    self.bias.backward(samples, rows, self._bias_gradient(samples, rows, tile), grads)
                elif sums is not None:
                    arguments = self._launch_arguments(samples, rows, tile)
                    del arguments["HAS_BIAS"]
                    sums.add(samples, rows, tile, arguments)
        grads |= {} if sums is None else sums.gradients()
        grads["queries"] = from_gradient_fragments(partial.queries.sum(0))[..., : self.num_queries, :]
        grads["keys"] = from_gradient_fragments(partial.keys.sum(0))[..., : self.num_keys, :]
        grads["w2"] = from_gradient_fragments(partial.w2.sum(0))
        grads["w_key"], grads["w_product"] = (part.sum((0, 1)) for part in partial.content.unbind(2))
        if "measure" in grads:
            grads["measure"] = partial.measure[..., : self.num_keys].sum((0, 1))
        grads |= {name: grads[name].permute(1, 2, 0, 3) for name in HEAD_MAJOR}
        return {name: resize(name, grads[name], self.sizes, self.given) for name in names}

    def _partial_sums(self, needs_measure: bool) -> "PartialSums":
        """Makes zeros that programs add to: a place for each group of hidden units, or for each group of samples."""
        units, samples = self._groups()
        zeros, pairs = self.row.new_zeros, (units, self.num_heads, self.batch)
        shape = *pairs, math.ceil(self.num_queries / 16) * 16, self.head_dim
        queries = zeros(math.prod(shape) + max(TILE_SIZES) * self.head_dim)  # the last tile may reach beyond the end
        return PartialSums(
            group_units=self.width // units,
            group_samples=math.ceil(self.batch / samples),
            queries=queries[: math.prod(shape)].view(shape),
            keys=zeros(*pairs, self.padded_keys, self.head_dim),
            measure=zeros(*pairs, self.padded_keys) if needs_measure else self.measure,
            content=zeros(samples, self.num_heads, 2, self.width, self.head_dim),
            w2=zeros(samples, *self.w2.shape),
        )

    def _groups(self) -> tuple[int, int]:
        """Returns the numbers of groups of hidden units and of samples: a program has one of each, for one head.

        Fewer of them are longer programs, which may leave multiprocessors idle; more are more partial sums, which are
        written and read once. The cost of a choice is the time that idle multiprocessors lose and that of the sums, in
        elements: memory moves a number (4 bytes, twice) in the time of some 16 elements.
        """
        slots = multiprocessors(self.keys.device)
        elements = self.num_heads * self.batch * self.num_queries * self.num_keys * self.width
        per_units = self.num_heads * self.batch * (self.num_queries + self.padded_keys) * self.head_dim

        def cost(choice: tuple[int, int]) -> float:
            units, samples = choice
            longest = math.ceil(self.batch / samples) / self.batch / units / self.num_heads  # share of a program
            waves = math.ceil(self.num_heads * units * math.ceil(self.batch / math.ceil(self.batch / samples)) / slots)
            return elements * waves * longest * slots + 16 * (units * per_units + samples * self.w2.numel())

        choices = (
            (2**power, samples) for power in range(self.width.bit_length()) for samples in range(1, self.batch + 1)
        )
        return min(choices, key=cost)

    def _backward_chunk(self, samples: slice, rows: slice, tile: Tensor | None, grad_row: Tensor, partial) -> None:
        """Adds the chunk to the partial sums and writes its part of the row term's gradient."""
        groups = self.width // partial.group_units, math.ceil((samples.stop - samples.start) / partial.group_samples)
        itnet_fused_bwd_kernel[self.num_heads, *groups](
            **self._launch_arguments(samples, rows, tile),
            p_upstream=self.upstream[:, samples, rows],
            p_w2=self.w2,
            p_drow=grad_row[:, samples, rows],
            p_dqueries=partial.queries[:, :, samples, rows],
            p_dkeys=partial.keys[:, :, samples],
            p_dmeasure=partial.measure[:, :, samples] if partial.measure.dim() == 4 else partial.measure,
            p_dcontent=partial.content,
            p_dw2=partial.w2,
            group_samples=partial.group_samples,
            group_units=partial.group_units,
            NEEDS_MEASURE=partial.measure.dim() == 4,
        )

    def _bias_gradient(self, samples: slice, rows: slice, tile: Tensor) -> Tensor:
        """Returns dL/dP [b or 1, t, w, n_k] of a chunk, summed over heads and over the samples that share it."""
        count, queries = samples.stop - samples.start, rows.stop - rows.start
        grad = self.row.new_empty(len(tile), queries, self.width, self.padded_keys, dtype=self.bias.gradient_dtype)
        arguments = self._launch_arguments(samples, rows, tile) | {"samples": count // len(tile)}
        del arguments["HAS_BIAS"]

        def grid(meta):
            units = meta["ROWS"] // meta["BP"]
            tiles = math.ceil(queries / meta["BP"]) * (self.width // units)
            return tiles, self.padded_keys // meta["BK"], len(tile)

        itnet_position_gradient_kernel[grid](
            **arguments, p_upstream=self.upstream[:, samples, rows], p_w2=self.w2, p_dbias=grad, heads=self.num_heads
        )
        return grad[..., : self.num_keys]


def stores_bias_gradient(inputs: PairInputs, names: list[str]) -> bool:
    """Says whether a backward needs dL/dP: for positions, for weights of raw coordinates and of distances alone."""
    has_fourier = inputs.has_frequencies and any(weight is not None for weight in inputs.position_weights[:2])
    return inputs.has_position_bias and (not has_fourier or "key_positions" in names)


class PartialSums(NamedTuple):
    """What the programs of the backward kernel add to, chunk by chunk, in float32.

    Those marked * are in the order of fragments.gradient_offsets.
    """

    group_units: int  # hidden units of a program
    group_samples: int  # samples of a program
    queries: Tensor  # * [unit groups, H, B, n_q up to a multiple of 16, d_h]
    keys: Tensor  # * [unit groups, H, B, padded_keys, d_h]
    measure: Tensor  # [unit groups, H, B, padded_keys]; the measure itself if nobody wants its gradient
    content: Tensor  # [sample groups, H, 2, w, d_h], of W_uy and W_had
    w2: Tensor  # * [sample groups, H, w * d_h, d_h]
