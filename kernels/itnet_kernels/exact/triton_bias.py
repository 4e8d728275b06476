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

from ..positions import PositionWeights, rotate

_LARGEST = 2.0**14  # of half of P over its range
HIDDEN = -65504.0  # stored for a key that its query must not see; GELU and its slope are exactly 0 there


class TritonBias:
    """P of every set of positions: one that the batch shares, or one for each sample."""

    def __init__(
        self,
        query_positions: Tensor,  # [S or 1, n_q, s]
        key_positions: Tensor,  # [S or 1, n_k, s]
        query_features: Tensor,  # [S or 1, n_q, F]
        key_features: Tensor,  # [S or 1, n_k, F]
        weights: PositionWeights,
        has_frequencies: bool,
        dtype: torch.dtype,
    ):
        self.query_positions, self.key_positions = query_positions, key_positions
        self.query_features, self.key_features = query_features, key_features
        self.weights = weights
        self.dtype = dtype
        self.is_raw = not has_frequencies and (weights.y is not None or weights.relative is not None)
        if self.is_raw:
            self.centre = (key_positions.amin(1, keepdim=True) + key_positions.amax(1, keepdim=True)) / 2  # [., 1, s]
            self.slope = self._sum(weights.y, None if weights.relative is None else -weights.relative)  # [w, s]
        self.ranges = _power_of_two(0.5 * self._bound())  # [S or 1]

    @staticmethod
    def _sum(*terms: Tensor | None) -> Tensor:
        present = [term for term in terms if term is not None]
        return present[0] if len(present) == 1 else present[0] + present[1]

    def _bound(self) -> Tensor:
        """At least max |P|, for each set: [S or 1]."""
        y, relative, distance = self.weights
        low, high = self.key_positions.amin(1), self.key_positions.amax(1)  # [S or 1, s]
        bound = low.new_zeros(1, 1, dtype=self.key_features.dtype)  # [S or 1, w or 1]
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

    def write_tile(self, index: int, start: int, stop: int, out: Tensor) -> None:
        """Half of P over its range, for queries [start, stop) of set ``index``, into ``out`` [t, w, n_k]."""
        y, relative, distance = self.weights
        factor = 0.5 / self._of(self.ranges, index)
        x = self._of(self.query_positions, index)[start:stop]  # [t, s]
        keys = self._of(self.key_positions, index)  # [n_k, s]
        if self.is_raw:
            centred = (keys - self._of(self.centre, index)).to(self.slope.dtype)
            out.copy_((factor * self.slope) @ centred.T)
        elif y is not None or relative is not None:
            coefficients = y
            if relative is not None:
                gamma_x = self._of(self.query_features, index)[start:stop]
                coefficients = self._sum(rotate(relative, gamma_x), y)  # [t, w, F]
            gamma_y = self._of(self.key_features, index)
            out.copy_((factor * coefficients).to(self.dtype) @ gamma_y.T.to(self.dtype))
        if distance is not None:
            lengths = torch.linalg.vector_norm(x.unsqueeze(1) - keys, dim=-1).to(distance.dtype)  # [t, n_k]
            if self.is_raw or y is not None or relative is not None:
                out.addcmul_(factor * distance, lengths.unsqueeze(1))
            else:
                out.copy_((factor * distance) * lengths.unsqueeze(1))

    @staticmethod
    def _of(tensor: Tensor, index: int) -> Tensor:
        return tensor[min(index, len(tensor) - 1)]


def _power_of_two(bound: Tensor) -> Tensor:
    """The smallest power of two, from 1 on, times which ``_LARGEST`` reaches ``bound``."""
    return torch.exp2((bound / _LARGEST).log2().ceil().clamp_min(0))
