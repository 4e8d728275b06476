"""Positions and what follows from them alone: Fourier features, and the displacements of a regular lattice."""

import math
from collections.abc import Callable
from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor

from .transforms import has_values, is_transformed, may_look_at

# A displacement table must be this many times smaller than the pairs it serves.
_TABLE_SAVING = 4
# How far putting the points on a lattice may move a phase 2 pi B (x - y), in rounding errors of the features' dtype:
# 2e-5 in float32, of 2 pi. Image grids and text in float32 stay below, at frequencies of some tens.
_PHASE_ERRORS = 192
# Elements of the displacement tables that are kept for all layers of a forward: 32 MB in float32.
_KEPT_ELEMENTS = 2**23


def position_dtype(device: torch.device) -> torch.dtype:
    """Returns float64 wherever the device has it: positions are few, and angles of 2 pi B x lose digits in float32."""
    return torch.float32 if device.type == "mps" else torch.float64


def fourier_features(positions: Tensor, frequencies: Tensor) -> Tensor:
    """Returns gamma(x) = [sin(2 pi B x); cos(2 pi B x)], Eq. fourier_features.

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


class Displacements(NamedTuple):
    """The displacements x_i - y_j of positions on a regular lattice: few, and each belongs to many pairs.

    A displacement's number is linear in its steps along the axes, and that of 0 is the middle of the table: the pair
    (i, j) has the number queries[i] - keys[j] + rows // 2.
    """

    table: Tensor  # [rows, F + 1]: gamma(v) and |v| of every displacement v; find_lattice gives v itself, [rows, s]
    queries: Tensor  # [n_q] index of each query on the lattice
    keys: Tensor  # [n_k]


def find_displacements(x: Tensor, y: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Displacements | None:
    """Returns the displacements of positions ``[n_q, s]`` and ``[n_k, s]`` on a lattice, or None if there is none.

    ``dtype`` is that of the features, whose rounding decides how closely the lattice has to be met.
    """
    lattice = find_lattice(x, y, torch.finfo(dtype).eps, frequencies)
    if lattice is None:
        return None
    lengths = torch.linalg.vector_norm(lattice.table, dim=-1, keepdim=True)
    features = fourier_features(lattice.table, frequencies)
    return lattice._replace(table=torch.cat([features, lengths], dim=-1).to(dtype))


def find_lattice(
    query_positions: Tensor, key_positions: Tensor, precision: float, frequencies: Tensor | None = None
) -> Displacements | None:
    """Returns the regular lattice of all positions ``[n_q, s]`` and ``[n_k, s]``, or None if a table would not pay.

    A table evaluates the kernel at the lattice's displacements instead of the given ones. ``precision``, the relative
    rounding error of the features' dtype, bounds what that may change: along each axis a coordinate may be twice this
    error of the axis' own extent away from the lattice, and all axes together may move no phase of ``frequencies``
    ``[L, s]`` by more than ``_PHASE_ERRORS`` of it. Coordinates that were rounded more coarsely are no lattice.
    """
    points = torch.cat([query_positions, key_positions])  # [n, s]
    shifts, moved, flat = [], [], 0
    budget = len(query_positions) * len(key_positions) // _TABLE_SAVING
    for coordinate in points.T:
        values = torch.unique(coordinate)  # sorted
        extent = values[-1] - values[0]
        if not extent.isfinite():
            return None
        tolerance = 2 * precision * extent
        gaps = values.diff()
        gaps = gaps[gaps > 2 * tolerance]  # the others separate roundings of the same lattice point
        # Without gaps all points share this coordinate, or no table would pay.
        cells = int((extent / gaps.min()).round()) if len(gaps) > 0 else (budget if extent > 0 else 0)
        budget //= 2 * cells + 1
        if budget == 0:
            return None
        step = extent / cells if cells > 0 else torch.ones_like(extent)
        index = ((coordinate - values[0]) / step).round()
        residual = (values[0] + index * step - coordinate).abs().max()
        if residual > tolerance:
            return None
        shifts.append(torch.arange(-cells, cells + 1, device=points.device) * step)
        flat = flat * (2 * cells + 1) + index.long()
        moved.append(2 * residual)  # a displacement has two ends
    if frequencies is not None and len(frequencies) > 0:
        phases = 2 * math.pi * frequencies.abs().to(points.dtype) @ torch.stack(moved)  # [L]
        if phases.max() > _PHASE_ERRORS * precision:
            return None
    table = torch.stack(torch.meshgrid(*shifts, indexing="ij"), dim=-1).flatten(0, -2)  # [rows, s]
    return Displacements(table, *flat.split([len(query_positions), len(key_positions)]))


def find_tables(
    x: Tensor, y: Tensor, frequencies: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Returns the displacements of all sets of positions, x ``[B or 1, n_q, s]`` and y ``[B or 1, n_k, s]``, in two
    tensors: what :meth:`Coordinates.lattice` returns."""
    x, y, frequencies = x.detach(), y.detach(), frequencies.detach()
    columns = (2 * len(frequencies) or x.shape[2]) + 1
    tables, index = [y.new_zeros(0, columns, dtype=dtype)], []
    sets = max(len(x), len(y))
    for own_x, own_y in zip(x.expand(sets, -1, -1), y.expand(sets, -1, -1), strict=True):
        first = sum(map(len, tables))
        found = find_displacements(own_x, own_y, frequencies, dtype)
        if found is None:
            index.append(torch.zeros(2 + x.shape[1] + y.shape[1], dtype=torch.long, device=y.device))
            continue
        tables.append(found.table)
        rows = torch.tensor([first, len(found.table)], device=y.device)
        index.append(torch.cat([rows, found.queries, found.keys]))
        if (first + len(found.table)) * columns > _KEPT_ELEMENTS:
            return None, None
    return torch.cat(tables), torch.stack(index)


class Coordinates:
    """Positions, and what the operator computes from them alone: each on first use, and then kept.

    All operators take it in place of positions. The layers of a model that share one compute these things once per
    forward, and not once per layer. Nothing is kept of positions that require a gradient, since each use needs a
    graph of its own, nor while a transform of torch.func runs.

    Args:
        positions: ``[n, s]``, shared by a batch, or ``[B, n, s]``. Keep them in float32.
        frequencies: B ``[L, s]`` of gamma, those of the weights that it will be used with.
        name: what errors call the positions.
    """

    def __init__(self, positions: Tensor, frequencies: Tensor, *, name: str = "positions"):
        if positions.dim() not in (2, 3) or positions.shape[-1] != frequencies.shape[1]:
            raise ValueError(
                f"`{name}` {list(positions.shape)} must be [n, {frequencies.shape[1]}] or [B, n, "
                f"{frequencies.shape[1]}] to go with `frequencies` {list(frequencies.shape)}"
            )
        if not positions.is_floating_point():
            raise ValueError(f"`{name}` must be a floating-point tensor, got {positions.dtype}")
        if may_look_at(positions) and not bool(positions.isfinite().all()):
            raise ValueError(f"`{name}` holds values that are not finite; coordinates must be finite numbers")
        self.positions, self.frequencies = positions, frequencies
        self._kept = {}

    @property
    def exact(self) -> Tensor:
        """Returns the positions in :func:`position_dtype`: [B, n, s], or [1, n, s] if all samples have the same."""
        return self._once("exact", self._exact)

    @property
    def features(self) -> Tensor:
        """Returns gamma(x) in :func:`position_dtype`: [B or 1, n, F]."""
        return self._once("features", lambda: fourier_features(self.exact, self.frequencies))

    def features_in(self, dtype: torch.dtype) -> Tensor:
        """Returns gamma(x), computed in :func:`position_dtype` and rounded to ``dtype``: [B or 1, n, F]."""
        return self._once(("features", dtype), lambda: self.features.to(dtype))

    def lattice(
        self, dtype: torch.dtype, queries: "Coordinates | None" = None
    ) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Returns the :class:`Displacements` of all sets of positions in two tensors.

        The first is [rows, F + 1], the tables of all sets. The second, [sets, 2 + n_q + n_k], holds for each set its
        first row and number of rows (0 without a lattice), and the indices of queries and keys on the lattice.
        These positions are the keys, and the queries unless ``queries`` are given. (None, None) where the values
        cannot be looked at, or where the tables of a large batch would take too much memory to be kept.
        """
        x = self if queries is None else queries
        if not (has_values(x.positions) and has_values(self.positions)):
            return None, None
        return self._once(
            ("lattice", dtype, None if x is self else x),
            lambda: find_tables(x.exact, self.exact, self.frequencies, dtype),
        )

    def steps(self, dtype: torch.dtype, count: int) -> Tensor | None:
        """Returns gamma(v) and |v| of the displacements v of a position from the last ``count`` ones, itself the last
        of them: [count, F + 1]. It is None unless all samples have the same positions, evenly spaced on a line, in
        rising order, and no gradient is wanted."""
        if self.positions.requires_grad or not has_values(self.positions):
            return None
        return self._once(("steps", dtype, count), lambda: self._steps(*self.lattice(dtype), count))

    def _steps(self, tables: Tensor | None, index: Tensor | None, count: int) -> Tensor | None:
        if index is None or len(index) > 1 or index[0, 1] == 0 or self.positions.shape[-1] > 1:
            return None
        (first, rows), keys = index[0, :2].tolist(), index[0, -self.positions.shape[-2] :]
        step = int(keys[1] - keys[0])  # a lattice has more than one position
        if step < 1 or not bool((keys.diff() == step).all()):
            return None
        numbers = rows // 2 + step * torch.arange(count - 1, -1, -1, device=keys.device)
        return tables[first + numbers.clamp(max=rows - 1)]  # nothing is farther apart than the first and the last

    def select(self, samples: Tensor | slice) -> "Coordinates":
        """Returns the coordinates of some samples of the batch, with what was computed for them."""
        if self.positions.dim() == 2 or len(self.positions) == 1:
            return self
        chosen = copy(self)
        chosen.positions, chosen._kept = self.positions[samples], {}
        for key, value in self._kept.items():
            if isinstance(value, Tensor):
                chosen._kept[key] = value if len(value) == 1 else value[samples]
        return chosen

    def has_frequencies_of(self, frequencies: Tensor) -> bool:
        """Returns whether these coordinates belong to ``frequencies``: compared by value where that is possible."""
        own = self.frequencies
        if own is frequencies or own.shape != frequencies.shape:
            return own is frequencies
        is_readable = may_look_at(frequencies) and may_look_at(own)
        return not is_readable or torch.equal(own, frequencies.to(own.dtype))

    def _exact(self) -> Tensor:
        positions = self.positions if self.positions.dim() == 3 else self.positions.unsqueeze(0)
        can_share = may_look_at(positions) and not positions.requires_grad
        if can_share and len(positions) > 1 and bool((positions == positions[:1]).all()):
            positions = positions[:1]
        return positions.to(position_dtype(positions.device))

    def _once(self, key, compute: Callable):
        """Calls ``compute()`` the first time, and keeps its result."""
        if self.positions.requires_grad or self.frequencies.requires_grad or is_transformed():
            return compute()
        # Tensors made in inference mode are of no use outside of it, and a compiled function cannot ask for it.
        key = (key, not torch.compiler.is_compiling() and torch.is_inference_mode_enabled())
        if key not in self._kept:
            self._kept[key] = compute()
        return self._kept[key]
