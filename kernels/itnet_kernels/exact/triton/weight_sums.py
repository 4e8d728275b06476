"""The gradients of the position weights W_y, W_rel and w_d on the host: operands, launches and the last sums."""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...first_layer import length
from .bias import of_samples
from .device import multiprocessors
from .gelu import triton
from .position_weights import itnet_position_weights_kernel

if TYPE_CHECKING:
    from .pairs import TritonPairs

_MOST_FREQUENCIES = 64  # of a program: its accumulators are [rows, 2 L]
_POSITIONS = 16  # of a tile, at least


class PositionWeightSums:
    """What the programs of itnet_position_weights_kernel add to, chunk by chunk, in float32."""

    def __init__(self, pairs: "TritonPairs"):
        self.pairs, self.bias = pairs, pairs.bias
        inputs = pairs.inputs
        self.frequencies = len(inputs.frequencies)
        block = min(_MOST_FREQUENCIES, max(16, triton.next_power_of_2(self.frequencies)))
        self.block, self.padded = block, math.ceil(self.frequencies / block) * block
        self.gamma_x = self._halves(inputs.query_features)
        gamma_y = pad(inputs.key_features, (0, 0, 0, pairs.padded_keys - pairs.num_keys))
        self.gamma_y = self._halves(gamma_y).to(pairs.dtype)
        self.has_distance = self.bias.weights.distance is not None
        self.longest = self.bias.longest() if self.has_distance else None
        # Samples are summed up in one accumulator: their measures are taken relative to the largest of all.
        self.factor = pairs.scale.amax()
        self.scale = pairs.scale / self.factor
        self.features = self.distance = None

    def _halves(self, features: Tensor) -> Tensor:
        """Turns gamma [S or 1, n, 2 L] into [S or 1, n, 2, padded L]: sines and cosines, zeros behind both."""
        return pad(features.unflatten(2, (2, -1)), (0, self.padded - self.frequencies)).contiguous()

    def add(self, samples: slice, rows: slice, tile: Tensor, arguments: dict) -> None:
        """Adds a chunk, given its bias and the arguments that all kernels take."""
        pairs, count = self.pairs, samples.stop - samples.start
        has_own_queries = len(self.gamma_x) > 1
        tiles = math.ceil((rows.stop - rows.start) / _POSITIONS)
        group = 1 if has_own_queries else self._group_samples(count, tiles * pairs.width // 8)
        groups = math.ceil(count / group)
        self._reserve(groups * tiles)

        def grid(meta):
            units = meta["ROWS"] // meta["BP"]
            return math.ceil((rows.stop - rows.start) / meta["BP"]) * (pairs.width // units), groups, blocks

        blocks = self.padded // self.block
        itnet_position_weights_kernel[grid](
            **arguments | {"p_scale": self.scale[samples]},
            p_upstream=pairs.upstream[:, samples, rows],
            p_w2=pairs.w2,
            p_gamma_x=of_samples(self.gamma_x, samples)[:, rows],
            p_gamma_y=of_samples(self.gamma_y, samples),
            p_lengths=self._lengths(samples, rows) if self.has_distance else tile,
            p_dfeatures=self.features,
            p_ddistance=self.distance,
            group_samples=group,
            x_samples=int(has_own_queries),
            y_samples=int(len(self.gamma_y) > 1),
            heads=pairs.num_heads,
            BL=self.block,
            HAS_DISTANCE=self.has_distance,
        )

    def _reserve(self, programs: int) -> None:
        """Makes a place for each program. A later chunk has fewer queries, but it may have more groups of samples."""
        if self.features is None:
            self.features = self.pairs.row.new_zeros(programs, 4, self.pairs.width, self.padded)
            self.distance = self.pairs.row.new_zeros(programs, self.pairs.width)
        missing = programs - len(self.features)
        if missing > 0:
            self.features = pad(self.features, (0, 0, 0, 0, 0, 0, 0, missing))
            self.distance = pad(self.distance, (0, 0, 0, missing))

    def _group_samples(self, count: int, programs: int) -> int:
        """Returns the samples of a program for which all groups end first; ``programs`` is their number in a group."""
        slots = multiprocessors(self.pairs.row.device)

        def end(size: int) -> int:
            return size * math.ceil(programs * math.ceil(count / size) / slots)

        return min(range(count, 0, -1), key=end)

    def _lengths(self, samples: slice, rows: slice) -> Tensor:
        """Returns |x_i - y_j| over the longest, [b or 1, t, padded_keys]."""
        x, y = of_samples(self.bias.x, samples)[:, rows, None], of_samples(self.bias.y, samples).unsqueeze(1)
        return (length(x - y) / self.longest).to(self.pairs.dtype)

    def gradients(self) -> dict[str, Tensor]:
        """Returns those of the weights that the kernel has, by name."""
        weights, found, factor = self.bias.weights, {}, 0.5 * self.factor
        parts = (self.features.sum(0) * factor)[..., : self.frequencies].unflatten(0, (2, 2))  # [2, 2, w, L]
        for name, weight, (sine, cosine) in zip(("w_y", "w_relative"), weights[:2], parts, strict=True):
            if weight is not None:
                found[name] = torch.cat([sine, cosine], dim=1)
        if self.has_distance:
            found["w_distance"] = (self.distance.sum(0) * (factor * self.longest)).unsqueeze(1).float()
        return found
