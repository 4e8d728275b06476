"""The position bias P in the form that the Triton kernels read: tiles of P/2 in half precision, the rest in rows.

float16 (which serves bfloat16 operands too: three more bits at the same width) holds 11 bits and ends at 65504. So

* what the keys of raw coordinates (L = 0) have in common moves to the row term, which is float32. With the centre c
  of the keys,

      W_y y_j + W_rel (x_i - y_j)  =  (W_y - W_rel) (y_j - c)  +  W_y c + W_rel (x_i - c);

* a tile is stored divided by its *range*, a power of two that is 1 unless P may exceed 2^15. The range is found on the
  device from the size of the weights and the extent of the positions. Nobody waits for it.
"""

import torch
from torch import Tensor

from ...first_layer import key_factors, length
from ...positions import of_set
from ..pair_inputs import PairInputs

_LARGEST = 2.0**14  # of half of P over its range
HIDDEN = -65504.0  # stored for a key that its query must not see; GELU and its slope are exactly 0 there


class TritonBias:
    """P of every set of positions: one that the batch shares, or one for each sample."""

    def __init__(self, inputs: PairInputs, dtype: torch.dtype):
        self.query_positions, self.key_positions = inputs.query_positions, inputs.key_positions
        self.inputs, self.weights = inputs, inputs.position_weights
        self.dtype = dtype
        has_features = inputs.w_y is not None or inputs.w_relative is not None
        self.is_raw = not inputs.has_frequencies and has_features
        if self.is_raw:
            low, high = (extreme(1, keepdim=True) for extreme in (self.key_positions.amin, self.key_positions.amax))
            self.centre = (low + high) / 2  # [S or 1, 1, s]
            w_y, w_relative = (0 if weight is None else weight for weight in (inputs.w_y, inputs.w_relative))
            self.slope = w_y - w_relative  # [w, s]
        self.ranges = _power_of_two(0.5 * self._bound())  # [S or 1]

    def _bound(self) -> Tensor:
        """At least max |P|, for each set: [S or 1]."""
        y, relative, distance = self.weights
        low, high = self.key_positions.amin(1), self.key_positions.amax(1)  # [S or 1, s]
        bound = low.new_zeros(1, 1, dtype=self.inputs.key_features.dtype)  # [S or 1, w or 1]
        if self.is_raw:
            bound = bound + ((high - low) / 2).to(bound.dtype) @ self.slope.abs().T
        else:
            for weight in (y, relative):
                bound = bound if weight is None else bound + weight.abs().sum(1)
        if distance is not None:
            far = torch.maximum(high - self.query_positions.amin(1), self.query_positions.amax(1) - low)
            bound = bound + torch.linalg.vector_norm(far, dim=-1, keepdim=True).to(bound.dtype) * distance[:, 0].abs()
        return bound.amax(1)

    def with_row_term(self, row: Tensor) -> Tensor:
        """q [H, B, n_q, w] and what of P is not in the tiles."""
        if not self.is_raw:
            return row
        if self.weights.y is not None:
            row = row + self.centre.to(row.dtype) @ self.weights.y.T
        if self.weights.relative is not None:
            row = row + (self.query_positions - self.centre).to(row.dtype) @ self.weights.relative.T
        return row

    def outweigh(self, row: Tensor) -> None:
        """Widens the ranges so that HIDDEN is far below any row term: the [H, B, n_q, w] that the kernels get."""
        largest = row.abs().amax((0, 2, 3))  # [B]
        shared = len(self.query_positions) == len(self.key_positions) == 1
        self.ranges = torch.maximum(self.ranges, _power_of_two(largest.amax(0, keepdim=True) if shared else largest))

    def write_tile(self, index: int, rows: slice, out: Tensor) -> None:
        """Adds half of P over its range, for queries ``rows`` of set ``index``, to zeros ``out`` [t, w, n_k]."""
        x, y, gamma_x, gamma_y = self.inputs.position_set(index)
        factor = 0.5 / of_set(self.ranges, index)
        if self.is_raw:
            centred = (y - of_set(self.centre, index)).to(self.slope.dtype)
            out.copy_((factor * self.slope) @ centred.T)
        else:
            factors = key_factors(self.weights, gamma_x[rows], has_frequencies=True)  # [t, w, F]
            if factors is not None:
                out.copy_((factor * factors).to(self.dtype) @ gamma_y.T.to(self.dtype))
        distance = self.weights.distance
        if distance is not None:
            lengths = length(x[rows, None] - y).to(distance.dtype)  # [t, n_k]
            out.addcmul_(factor * distance, lengths.unsqueeze(1))


def _power_of_two(bound: Tensor) -> Tensor:
    """The smallest power of two, from 1 on, times which ``_LARGEST`` reaches ``bound``."""
    return torch.exp2((bound / _LARGEST).log2().ceil().clamp_min(0))
