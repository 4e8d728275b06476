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
from ..position_bias import bias_gradients
from .bias_kernel import BIAS_UNITS, itnet_bias_kernel
from .configs import KEY_MULTIPLE
from .device import dot_precision
from .fragments import FRAGMENT, FRAGMENT_KEYS, FRAGMENT_POSITIONS
from .gelu import triton

_LARGEST = 2.0**14  # of half of P over its range
HIDDEN = -65504.0  # stored for a key that its query must not see; GELU and its slope are exactly 0 there


class TritonBias:
    """P of the whole batch, and the row terms [H, B, n_q, w] that go with its tiles: ``row``, already halved."""

    def __init__(self, inputs: PairInputs, padded_keys: int):
        self.inputs, self.weights = inputs, inputs.position_weights
        self.dtype = torch.float32 if inputs.operand_dtype == torch.float32 else torch.float16
        x, y, gamma_x, gamma_y = (getattr(inputs, name) for name in POSITIONS)
        self.x, self.gamma_x = x.contiguous(), gamma_x.contiguous()
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
        # The kernel adds up what is there: zeros stand for what is not.
        none = self.row.new_zeros(self.row.shape[-1], max(1, gamma_x.shape[-1]))
        w_y, w_relative, w_distance = (none if weight is None else weight.contiguous() for weight in self.weights)
        self.key_weight = self.slope.contiguous() if self.is_raw else w_y
        self.relative_weight, self.distance_weight = w_relative, w_distance
        self.factor = 0.5 / self.ranges[:, None, None]  # [S or 1, 1, 1]
        # What the factors of first_layer.key_factors meet: [S or 1, padded_keys, F]
        if self.is_raw:
            self.key_side = self.factor * (self.y - centre).to(row.dtype)
        else:
            self.key_side = (self.factor * gamma_y[:, padded]).to(self.dtype)

    def bytes_per_query(self, with_gradient: bool) -> int:
        """Returns what the kernels read and write for each query of a tile: the bias, and its gradient.

        Its factors of gamma(y) and their gradient, 8 F bytes for each hidden unit, come and go around that.
        """
        itemsize = self.dtype.itemsize + (self.gradient_dtype.itemsize if with_gradient else 0)
        return self.row.shape[-1] * self.y.shape[1] * itemsize

    @property
    def gradient_dtype(self) -> torch.dtype:
        """Returns the dtype in which dL/dP is multiplied with gamma(y). float16 would need a scale."""
        return torch.bfloat16 if self.inputs.operand_dtype == torch.bfloat16 else torch.float32

    def _bound(self, y: Tensor) -> Tensor:
        """Returns at least max |P|: [S or 1]."""
        low, high = y.amin(1), y.amax(1)  # [S or 1, s]
        bound = low.new_zeros(1, 1, dtype=self.row.dtype)  # [S or 1, w or 1]
        if self.is_raw:
            bound = bound + ((high - low) / 2).to(bound.dtype) @ self.slope.abs().T
        else:
            for weight in self.weights[:2]:
                bound = bound if weight is None else bound + weight.abs().sum(1)
        if self.weights.distance is not None:
            bound = bound + self._farthest(y) * self.weights.distance[:, 0].abs()
        return bound.amax(1)

    def _farthest(self, y: Tensor) -> Tensor:
        """Returns at least max |x_i - y_j|: [S or 1, 1]."""
        far = torch.maximum(y.amax(1) - self.x.amin(1), self.x.amax(1) - y.amin(1))
        return torch.linalg.vector_norm(far, dim=-1, keepdim=True).to(self.row.dtype)

    def longest(self) -> Tensor:
        """Returns at least max |x_i - y_j| of all samples, and not 0: a number."""
        farthest = self._farthest(self.y).amax()
        return farthest.where(farthest > 0, 1)

    def tile(self, samples: slice, rows: slice) -> Tensor:
        """Returns half of P over its range in fragments: [b, blocks, w, padded_keys / 64, 1024]; b = 1 if shared.

        A causal operator hides the future here, so that its kernels are those of the full one with an earlier end.
        """
        count, padded_keys = rows.stop - rows.start, self.y.shape[1]
        num_samples = 1 if self.is_shared else samples.stop - samples.start
        width, blocks = self.row.shape[-1], math.ceil(count / FRAGMENT_POSITIONS)
        shape = num_samples, blocks, width, padded_keys // FRAGMENT_KEYS, FRAGMENT
        # Behind it is room for the next key tile, which the kernels may prefetch.
        flat = self.row.new_empty(math.prod(shape) + 2 * FRAGMENT, dtype=self.dtype)
        x, y, gamma_x, key_side, factor = (
            of_samples(tensor, samples) for tensor in (self.x, self.y, self.gamma_x, self.key_side, self.factor)
        )
        has_fourier = self.weights.y is not None or self.weights.relative is not None
        features = "raw" if self.is_raw else "fourier" if has_fourier else "none"
        frequencies = self.inputs.frequencies.shape[0]
        itnet_bias_kernel[num_samples, blocks, width // BIAS_UNITS](
            p_bias=flat,
            p_x=x,
            p_y=y,
            p_gamma_x=gamma_x,
            p_key_side=key_side,
            p_factor=factor.expand(num_samples, 1, 1).contiguous(),
            p_w_y=self.key_weight,
            p_w_relative=self.relative_weight,
            p_w_distance=self.distance_weight,
            first_query=rows.start,
            num_queries=count,
            all_queries=self.x.shape[1],
            padded_keys=padded_keys,
            causal_offset=rows.start + self.inputs.keys.shape[1] - self.inputs.queries.shape[1],
            x_samples=int(len(x) > 1),
            y_samples=int(len(y) > 1),
            key_samples=int(len(key_side) > 1),
            num_frequencies=frequencies,
            dim=x.shape[-1],
            W=width,
            KC=BIAS_UNITS,
            BL=min(64, max(16, triton.next_power_of_2(frequencies))),
            FEATURES=features,
            HAS_DISTANCE=self.weights.distance is not None,
            IS_CAUSAL=self.inputs.is_causal,
            HIDDEN=HIDDEN,
            PRECISION=dot_precision(self.row.device),
            num_warps=4,
        )
        return flat[: math.prod(shape)].view(shape)

    def rows(self, samples: slice, rows: slice) -> Tensor:
        """Returns the same as :meth:`tile` in the order [b, t, w, padded_keys]."""
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

    def backward(self, samples: slice, rows: slice, grad: Tensor, grads: dict[str, Tensor]) -> None:
        """Adds the parts of a tile to every gradient in ``grads``, given dL/dP [b, t, w, n_k]."""
        inputs, dtype = self.inputs, self.gradient_dtype
        x, y, gamma_x, gamma_y = (of_samples(getattr(inputs, name), samples) for name in POSITIONS)
        where = [part.expand(len(grad), -1, -1) for part in (x[:, rows], y, gamma_x[:, rows], gamma_y)]
        found = bias_gradients(grad, *where, self.weights, inputs.has_frequencies, "key_positions" in grads, dtype)
        for name, value in found.items():
            if name in POSITIONS:
                target = of_samples(grads[name], samples)
                target = target[:, rows] if name.startswith("query") else target
                target += value.sum(0, keepdim=True) if len(target) < len(value) else value
            else:
                grads[name] += value


def of_samples(tensor: Tensor, samples: slice) -> Tensor:
    """Returns what belongs to some samples, in a tensor [B, ...] or [1, ...] that all samples share."""
    return tensor if len(tensor) == 1 else tensor[samples]


def _power_of_two(bound: Tensor) -> Tensor:
    """Returns the smallest power of two, from 1 on, times which ``_LARGEST`` reaches ``bound``."""
    return torch.exp2((bound / _LARGEST).log2().ceil().clamp_min(0))
