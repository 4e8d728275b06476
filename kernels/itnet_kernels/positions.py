"""Functions of positions alone: Fourier features, regular lattices, and the position part of the kernel's input layer.

    P_ij[k] = W_y[k] . gamma(y_j) + W_rel[k] . gamma(x_i - y_j) + w_d[k] |x_i - y_j|

has no features in it, so batch and heads share it. Two ways to evaluate it, chosen by :class:`PositionBias`:

* **table**, on a regular domain (text, image grids): it depends on the displacement only, and a lattice has few;
* **bilinear**, anywhere: sin and cos of a difference are bilinear in gamma(x_i) and gamma(y_j),

      W_rel . gamma(x_i - y_j) = C_i . gamma(y_j),     C_i = [W_c s_i - W_s c_i ; W_s s_i + W_c c_i]

  with W_rel = [W_s; W_c] and gamma(x_i) = [s_i; c_i], so one GEMM with inner size 2L gives all pairs.

Raw coordinates (L = 0) are subtracted first, in :func:`position_dtype`: W_rel x_i - W_rel y_j would cancel far from
the origin.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

# A displacement table must be this many times smaller than the pairs it serves.
_TABLE_SAVING = 4
# How far putting the points on a lattice may move a phase 2 pi B (x - y), in rounding errors of the features' dtype:
# 2e-5 in float32, of 2 pi. Image grids and text in float32 stay below, at frequencies of some tens.
_PHASE_ERRORS = 192


def position_dtype(device: torch.device) -> torch.dtype:
    """float64 wherever the device has it: positions are few, and angles of 2 pi B x lose digits in float32."""
    return torch.float32 if device.type == "mps" else torch.float64


def fourier_features(positions: Tensor, frequencies: Tensor) -> Tensor:
    """gamma(x) = [sin(2 pi B x); cos(2 pi B x)], Eq. fourier_features.

    positions ``[..., s]``, frequencies B ``[L, s]`` -> ``[..., 2L]``; with L = 0 the coordinates themselves. Angles
    are taken in float64 where the device has it, under autocast too; the result has the dtype of the positions, but no
    less than float32.
    """
    if frequencies.shape[0] == 0:
        return positions
    dtype = position_dtype(positions.device)
    with torch.autocast(positions.device.type, enabled=False):
        angles = 2 * math.pi * positions.to(dtype) @ frequencies.to(dtype).T  # [..., L]
    return torch.cat([angles.sin(), angles.cos()], dim=-1).to(torch.promote_types(positions.dtype, torch.float32))


class Lattice(NamedTuple):
    """Positions x = origin + step * m with integer m in [0, size) on every axis."""

    step: Tensor  # [s]
    sizes: tuple[int, ...]  # lattice points along each axis
    queries: Tensor  # [n_q] flat index of each query under the table's strides
    keys: Tensor  # [n_k]

    @property
    def table_shape(self) -> tuple[int, ...]:
        """Displacements along each axis run from -(size-1) to size-1."""
        return tuple(2 * size - 1 for size in self.sizes)

    def displacements(self) -> Tensor:
        """All displacements, in the table's order: [rows, s]."""
        axes = [torch.arange(1 - size, size, device=self.step.device) for size in self.sizes]
        grid = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1)
        return grid.reshape(-1, len(self.sizes)) * self.step

    def rows(self, start: int, stop: int) -> Tensor:
        """Table row of every pair (query, key) with start <= query < stop: [stop - start, n_k]."""
        # flat(m_i - m_j + size - 1) = flat(m_i) - flat(m_j) + flat(size - 1), and the last is the middle of the table.
        middle = math.prod(self.table_shape) // 2
        return self.queries[start:stop, None] - self.keys[None, :] + middle


def find_lattice(
    query_positions: Tensor, key_positions: Tensor, precision: float, frequencies: Tensor | None = None
) -> Lattice | None:
    """The regular lattice that holds all positions (``[n_q, s]``, ``[n_k, s]``), or None if a table would not pay.

    A table evaluates the kernel at the lattice's displacements instead of the given ones, and nobody must feel that.
    ``precision`` is the relative rounding error of the features' dtype. Along each axis a coordinate may be twice that
    error of the axis' own extent away from the lattice, and all axes together may move no phase of ``frequencies``
    ``[L, s]`` by more than ``_PHASE_ERRORS`` of it. Coordinates that were rounded more coarsely (far from the origin,
    or in half precision) are no lattice, unless their rounded values form one.
    """
    num_queries, num_keys = len(query_positions), len(key_positions)
    points = torch.cat([query_positions, key_positions])  # [n, s]
    steps, sizes, indices, moved = [], [], [], []
    budget = num_queries * num_keys // _TABLE_SAVING
    for coordinate in points.T:
        values = torch.unique(coordinate)  # sorted
        extent = values[-1] - values[0]
        if not extent.isfinite():
            return None
        if extent == 0:  # all points share this coordinate
            steps.append(values.new_ones(()))
            sizes.append(1)
            indices.append(torch.zeros_like(coordinate, dtype=torch.long))
            moved.append(torch.zeros_like(extent))
            continue
        tolerance = 2 * precision * extent
        gaps = values.diff()
        gaps = gaps[gaps > 2 * tolerance]  # the others separate roundings of the same lattice point
        cells = int((extent / gaps.min()).round()) if len(gaps) > 0 else budget
        budget //= 2 * cells + 1
        if budget == 0:
            return None
        step = extent / cells
        index = ((coordinate - values[0]) / step).round()
        residual = (values[0] + index * step - coordinate).abs().max()
        if residual > tolerance:
            return None
        steps.append(step)
        sizes.append(cells + 1)
        indices.append(index.long())
        moved.append(2 * residual)  # a displacement has two ends
    if frequencies is not None and len(frequencies) > 0:
        phases = 2 * math.pi * frequencies.abs().to(points.dtype) @ torch.stack(moved)  # [L]
        if phases.max() > _PHASE_ERRORS * precision:
            return None
    flat = indices[0]
    for size, index in zip(sizes[1:], indices[1:], strict=True):
        flat = flat * (2 * size - 1) + index
    return Lattice(torch.stack(steps), tuple(sizes), flat[:num_queries], flat[num_queries:])


class PositionWeights(NamedTuple):
    """The columns of W1 that meet key positions; None for a group that the kernel does not use."""

    y: Tensor | None  # [w, F]
    relative: Tensor | None  # [w, F]
    distance: Tensor | None  # [w, 1]


class PositionBias:
    """P for one set of positions, tile by tile: ``tile(start, stop)`` is [stop - start, w, n_k].

    gamma(x_i) itself is not in it: it belongs to the query-only term.
    """

    def __init__(
        self,
        query_positions: Tensor,  # [n_q, s]
        key_positions: Tensor,  # [n_k, s]
        query_features: Tensor,  # gamma(x) [n_q, F]
        key_features: Tensor,  # gamma(y) [n_k, F]
        weights: PositionWeights,
        frequencies: Tensor,  # [L, s]
        lattice: Lattice | None,
        grad_dtype: torch.dtype | None = None,  # of the products with dL/dP
    ):
        self.query_positions, self.key_positions = query_positions, key_positions
        self.query_features, self.key_features = query_features, key_features
        self.weights = weights
        self.has_raw_differences = weights.relative is not None and len(frequencies) == 0
        self.grad_dtype = grad_dtype or key_features.dtype
        self.lattice = lattice if weights.relative is not None or weights.distance is not None else None
        if self.lattice is not None:
            self.table = self._displacement_table(frequencies)  # [w, rows]
            self.key_term = None if weights.y is None else weights.y @ key_features.T  # [w, n_k]

    def tile(self, start: int, stop: int) -> Tensor:
        return self._tile_from_table(start, stop) if self.lattice is not None else self._tile_bilinear(start, stop)

    def _displacement_table(self, frequencies: Tensor) -> Tensor:
        shifts = self.lattice.displacements()  # [rows, s]
        table = 0
        if self.weights.relative is not None:
            features = fourier_features(shifts, frequencies).to(self.key_features.dtype)
            table = self.weights.relative @ features.T
        if self.weights.distance is not None:
            lengths = torch.linalg.vector_norm(shifts, dim=-1).to(self.key_features.dtype)
            table = table + self.weights.distance * lengths
        return table

    def _tile_from_table(self, start: int, stop: int) -> Tensor:
        rows = self.lattice.rows(start, stop)  # [t, n_k]
        bias = self.table.index_select(1, rows.flatten()).view(-1, *rows.shape).transpose(0, 1)  # [t, w, n_k]
        out = torch.empty_like(bias, memory_format=torch.contiguous_format)
        return out.copy_(bias) if self.key_term is None else torch.add(bias, self.key_term, out=out)

    def _tile_bilinear(self, start: int, stop: int) -> Tensor:
        coefficients = self._coefficients(start, stop)  # [t, w, F]
        bias = None
        if coefficients is not None:
            bias = coefficients @ self.key_features.T
        if self.has_raw_differences:
            term = self.weights.relative @ self._differences(start, stop).mT.to(self.key_features.dtype)
            bias = term if bias is None else bias.add_(term)
        if self.weights.distance is not None:
            lengths = self._lengths(self._differences(start, stop))
            distance, lengths = self.weights.distance, lengths.unsqueeze(1)
            bias = distance * lengths if bias is None else bias.addcmul_(distance, lengths)  # [t, w, n_k]
        return bias

    def _coefficients(self, start: int, stop: int) -> Tensor | None:
        """C_i with P_i = C_i gamma(y)^T (+ raw differences and distance): [t, w, F]; None if no group needs it."""
        coefficients = self.weights.y
        if self.weights.relative is not None and not self.has_raw_differences:
            relative = rotate(self.weights.relative, self.query_features[start:stop])
            coefficients = relative if coefficients is None else relative + coefficients
        elif coefficients is not None:
            coefficients = coefficients.expand(stop - start, *coefficients.shape)
        return coefficients

    def _differences(self, start: int, stop: int) -> Tensor:
        """x_i - y_j [t, n_k, s], in the positions' dtype."""
        return self.query_positions[start:stop, None, :] - self.key_positions

    def _lengths(self, differences: Tensor) -> Tensor:
        """|x_i - y_j| [t, n_k], in the features' dtype."""
        return torch.linalg.vector_norm(differences, dim=-1).to(self.key_features.dtype)

    def backward(self, start: int, stop: int, grad: Tensor, grads: "PositionGradients") -> None:
        """Adds the tile's part of every gradient, given dL/dP [t, w, n_k]. Always in the bilinear form."""
        rows = slice(start, stop)
        coefficients = self._coefficients(start, stop)
        if coefficients is not None:
            grad_coefficients = grad.to(self.grad_dtype) @ self.key_features.to(self.grad_dtype)  # [t, w, F]
            grad_coefficients = grad_coefficients.to(grad.dtype)
            if grads.needs_positions:
                grads.key_features += torch.einsum("tkj,tkf->jf", grad, coefficients)
            if self.weights.y is not None:
                grads.y += grad_coefficients.sum(0)
            if self.weights.relative is not None and not self.has_raw_differences:
                self._rotation_backward(rows, grad_coefficients, grads)
        if self.has_raw_differences:
            grads.relative += (grad @ self._differences(start, stop).to(grad.dtype)).sum(0)
            if grads.needs_positions:
                grads.query_positions[rows] += grad.sum(2) @ self.weights.relative
                grads.key_positions -= grad.sum(0).T @ self.weights.relative
        if self.weights.distance is not None:
            differences = self._differences(start, stop)
            lengths = self._lengths(differences)
            grads.distance += torch.einsum("tkj,tj->k", grad, lengths).unsqueeze(-1)
            if grads.needs_positions:
                pull = torch.einsum("tkj,k->tj", grad, self.weights.distance[:, 0])
                pull = torch.where(lengths > 0, pull / lengths, 0)  # the gradient of |v| at v = 0 is 0
                pull = pull.unsqueeze(-1) * differences  # [t, n_k, s]
                grads.query_positions[rows] += pull.sum(1)
                grads.key_positions -= pull.sum(0)

    def _rotation_backward(self, rows: slice, grad_coefficients: Tensor, grads: "PositionGradients") -> None:
        """Through :func:`rotate`: C = [W_c s - W_s c ; W_s s + W_c c]."""
        sine, cosine = self.query_features[rows].chunk(2, dim=-1)  # [t, L]
        w_sine, w_cosine = self.weights.relative.chunk(2, dim=-1)  # [w, L]
        top, bottom = grad_coefficients.chunk(2, dim=-1)  # [t, w, L]

        # Not einsum: it would make a batch of L matrix-vector products of these.
        def over_queries(grad, factor):
            return (grad * factor.unsqueeze(1)).sum(0)

        def over_hidden(grad, factor):
            return (grad * factor).sum(1)

        grad_w_sine = over_queries(bottom, sine) - over_queries(top, cosine)
        grad_w_cosine = over_queries(top, sine) + over_queries(bottom, cosine)
        grads.relative += torch.cat([grad_w_sine, grad_w_cosine], dim=-1)
        if grads.needs_positions:
            grad_sine = over_hidden(top, w_cosine) + over_hidden(bottom, w_sine)
            grad_cosine = over_hidden(bottom, w_cosine) - over_hidden(top, w_sine)
            grads.query_features[rows] += torch.cat([grad_sine, grad_cosine], dim=-1)


def rotate(relative: Tensor, features: Tensor) -> Tensor:
    """Coefficients of gamma(y_j) in W_rel . gamma(x_i - y_j): W_rel [w, 2L], gamma(x_i) [..., 2L] -> [..., w, 2L]."""
    sine, cosine = features.unsqueeze(-2).chunk(2, dim=-1)  # [..., 1, L]
    w_sine, w_cosine = relative.chunk(2, dim=-1)  # [w, L]
    return torch.cat([w_cosine * sine - w_sine * cosine, w_sine * sine + w_cosine * cosine], dim=-1)


def length(differences: Tensor) -> Tensor:
    """|v| of [..., s]: [...]. All derivatives at v = 0 are 0: those of sqrt would be infinite."""
    squared = differences.square().sum(-1)
    is_positive = squared > 0
    return torch.where(is_positive, squared.where(is_positive, 1).sqrt(), 0)


def position_bias(
    x: Tensor,  # [b or 1, t, s]
    y: Tensor,  # [b or 1, t or 1, m, s], the keys of each query
    gamma_x: Tensor,  # [b or 1, t, F]
    gamma_y: Tensor,  # [b or 1, t or 1, m, F]
    weights: PositionWeights,
    has_frequencies: bool,
) -> Tensor | None:
    """P of many samples as a function that autograd differentiates: [b or 1, t, w, m]; None if no group needs it."""
    factors, terms = weights.y, []  # C_i: [w, F], or with a relative group [b or 1, t, w, F]
    if weights.relative is not None and has_frequencies:
        rotated = rotate(weights.relative, gamma_x)
        factors = rotated if factors is None else rotated + factors
    if factors is not None:
        terms.append(factors @ gamma_y.mT)
    if weights.relative is not None and not has_frequencies:
        terms.append(weights.relative @ (x.unsqueeze(2) - y).mT.to(gamma_y.dtype))
    if weights.distance is not None:
        terms.append(weights.distance * length(x.unsqueeze(2) - y).unsqueeze(2).to(gamma_y.dtype))
    return sum(terms) if terms else None


class PositionGradients:
    """Accumulators for :meth:`PositionBias.backward`, shaped like what they are the gradient of."""

    PER_SET = ("query_positions", "key_positions", "query_features", "key_features")

    def __init__(self, bias: PositionBias, needs_positions: bool):
        self.needs_positions = needs_positions
        for name in self.PER_SET:
            setattr(self, name, torch.zeros_like(getattr(bias, name)) if needs_positions else None)
        for name, weight in bias.weights._asdict().items():
            setattr(self, name, None if weight is None else torch.zeros_like(weight))


def collect_position_gradients(
    positions: tuple[Tensor, ...], grads: list[PositionGradients | None]
) -> list[Tensor | None]:
    """Gradients of the four position tensors, then of W_y, W_rel and w_d summed over the position sets."""
    if grads[0] is None:
        return [None] * 7
    collected = [None] * 4
    if grads[0].needs_positions:
        stacks = [torch.stack([getattr(grad, name) for grad in grads]) for name in PositionGradients.PER_SET]
        # A side that the batch shares collects from every sample.
        collected = [
            stack if len(stack) == len(tensor) else stack.sum(0, keepdim=True)
            for stack, tensor in zip(stacks, positions, strict=True)
        ]
    for name in PositionWeights._fields:
        parts = [getattr(grad, name) for grad in grads]
        collected.append(None if parts[0] is None else torch.stack(parts).sum(0))
    return collected
