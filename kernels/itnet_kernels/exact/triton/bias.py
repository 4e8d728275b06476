"""The position bias P in the form that the Triton kernels read: tiles of P/2 in half precision, the rest in rows.

float16 (which serves bfloat16 operands too: three more bits at the same width) holds 11 bits and ends at 65504. So

* what the keys of raw coordinates (L = 0) have in common moves to the row term, which is float32. With the centre c
  of the keys,

      W_y y_j + W_rel (x_i - y_j)  =  (W_y - W_rel) (y_j - c)  +  W_y c + W_rel (x_i - c);

* a tile is stored divided by its *range*, a power of two that is 1 unless P may exceed 2^15. The range is found on the
  device from the size of the weights and the extent of the positions. Nobody waits for it.

Samples with positions of their own are a dimension of every tensor here: S is their number, or 1 if the batch shares
its positions. A tile then belongs to some samples and some queries.
"""

import math

import torch
from torch import Tensor

from ...first_layer import key_factors, length
from ..pair_inputs import POSITIONS, PairInputs
from .configs import KEY_MULTIPLE
from .position_gradients import of_samples

_LARGEST = 2.0**14  # of half of P over its range
HIDDEN = -65504.0  # stored for a key that its query must not see; GELU and its slope are exactly 0 there


class TritonBias:
    """P of the whole batch, and the row terms [H, B, n_q, w] that go with its tiles: ``row``, already halved."""

    def __init__(self, inputs: PairInputs, padded_keys: int):
        self.inputs, self.weights = inputs, inputs.position_weights
        self.dtype = torch.float32 if inputs.operand_dtype == torch.float32 else torch.float16
        x, y, gamma_x, gamma_y = (getattr(inputs, name) for name in POSITIONS)
        self.x, self.gamma_x = x, gamma_x
        self.is_shared = not inputs.has_position_bias or len(x) == len(y) == 1
        # Behind the last key comes the last key again: finite, as it must be where the values are 0.
        padded = torch.arange(padded_keys, device=y.device).clamp_max(y.shape[1] - 1)
        self.y = y[:, padded]  # [S or 1, padded_keys, s]
        has_features = inputs.w_y is not None or inputs.w_relative is not None
        self.is_raw = has_features and not inputs.has_frequencies
        row = inputs.row.permute(2, 0, 1, 3)
        if self.is_raw:
            centre = (y.amin(1, keepdim=True) + y.amax(1, keepdim=True)) / 2  # [S or 1, 1, s]
            if inputs.w_y is not None:
                row = row + centre.to(row.dtype) @ inputs.w_y.T
            if inputs.w_relative is not None:
                row = row + (x - centre).to(row.dtype) @ inputs.w_relative.T
            w_y, w_relative = (0 if weight is None else weight for weight in self.weights[:2])
            self.slope = w_y - w_relative  # [w, s]
        self.row = (0.5 * row).contiguous()
        self.ranges = _power_of_two(0.5 * self._bound(y))  # [S or 1]
        if inputs.is_causal:  # HIDDEN is far below any row term
            largest = self.row.abs().amax((0, 2, 3))  # [B]
            largest = largest.amax(0, keepdim=True) if self.is_shared else largest
            self.ranges = torch.maximum(self.ranges, _power_of_two(largest))
        self.factor = 0.5 / self.ranges[:, None, None]  # [S or 1, 1, 1]
        # What the factors of first_layer.key_factors meet: [S or 1, padded_keys, F]
        if self.is_raw:
            self.key_side = self.factor * (self.y - centre).to(row.dtype)
        else:
            self.key_side = (self.factor * gamma_y[:, padded]).to(self.dtype)

    def bytes_per_query(self, with_gradient: bool) -> int:
        """Memory for each query of a tile: itself, its gradient, and the factors of gamma(y) in float32."""
        num_keys, num_features = self.y.shape[1], self.gamma_x.shape[-1]
        per_unit = self.dtype.itemsize * num_keys + 8 * num_features
        return self.row.shape[-1] * (per_unit + (6 * num_keys + 4 * num_features if with_gradient else 0))

    def _bound(self, y: Tensor) -> Tensor:
        """At least max |P|: [S or 1]."""
        low, high = y.amin(1), y.amax(1)  # [S or 1, s]
        bound = low.new_zeros(1, 1, dtype=self.row.dtype)  # [S or 1, w or 1]
        if self.is_raw:
            bound = bound + ((high - low) / 2).to(bound.dtype) @ self.slope.abs().T
        else:
            for weight in self.weights[:2]:
                bound = bound if weight is None else bound + weight.abs().sum(1)
        if self.weights.distance is not None:
            far = torch.maximum(high - self.x.amin(1), self.x.amax(1) - low)
            far = torch.linalg.vector_norm(far, dim=-1, keepdim=True).to(bound.dtype)
            bound = bound + far * self.weights.distance[:, 0].abs()
        return bound.amax(1)

    def tile(self, samples: slice, rows: slice) -> Tensor:
        """Half of P over its range: [b, t, w, padded_keys] for queries ``rows`` of ``samples``; b = 1 if shared.

        A causal operator hides the future here, so that its kernels are those of the full one with an earlier end.
        """
        num_samples = 1 if self.is_shared else samples.stop - samples.start
        shape = (num_samples, rows.stop - rows.start, self.row.shape[-1], self.y.shape[1])
        # One key tile more behind it, which the kernels may prefetch.
        flat = self.row.new_empty(math.prod(shape) + KEY_MULTIPLE, dtype=self.dtype)
        tile = flat[:-KEY_MULTIPLE].view(shape)
        x, y, gamma_x, key_side, factor = (
            of_samples(tensor, samples) for tensor in (self.x, self.y, self.gamma_x, self.key_side, self.factor)
        )
        factors = self.slope if self.is_raw else key_factors(self.weights, gamma_x[:, rows], has_frequencies=True)
        if factors is None:
            tile.zero_()
        elif factors.dim() == 2:  # all queries have the same
            tile.copy_((factors.to(key_side.dtype) @ key_side.mT).unsqueeze(1))
        else:
            torch.matmul(factors.flatten(1, 2).to(self.dtype), key_side.mT, out=tile.flatten(1, 2))
        distance = self.weights.distance
        if distance is not None:
            lengths = length(x[:, rows, None] - y.unsqueeze(1)).to(distance.dtype)  # [b or 1, t, padded_keys]
            tile.addcmul_(distance, (factor * lengths).unsqueeze(2))
        if self.inputs.is_causal:
            offset = self.inputs.keys.shape[1] - self.inputs.queries.shape[1]
            key, query = (torch.arange(s.start, s.stop, device=tile.device) for s in (slice(0, shape[-1]), rows))
            tile.masked_fill_((key > query[:, None] + offset).unsqueeze(1), HIDDEN)
        return tile


def _power_of_two(bound: Tensor) -> Tensor:
    """The smallest power of two, from 1 on, times which ``_LARGEST`` reaches ``bound``."""
    return torch.exp2((bound / _LARGEST).log2().ceil().clamp_min(0))
