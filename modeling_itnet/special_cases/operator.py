# SPDX-License-Identifier: Apache-2.0
"""One operator for every kernel: it takes the integral, tile by tile, over any measure and any query domain."""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .kernel import Kernel, Pairs

# Numbers of a tile of kernel values that are in memory at a time: 32 MB in float64.
_TILE_ENTRIES = 2**22


class IntegralOperator(nn.Module):
    r"""K[u](x) = integral of kappa(x, y, u(x), u(y)) v(y) dmu(y) + W_theta u(x), with v = u unless told otherwise.

    The integral is a sum over tiles of pairs, so that kernel values of one tile only are in memory; in training, each
    row of tiles is recomputed in the backward pass.

    Args:
        normalization: None for kappa itself; "sum" for kappa / integral of kappa(x, .) dmu; "softmax" for the same
            of exp(kappa), computed with a running maximum. Both need a scalar kernel.
        is_causal: kappa is 0 where y > x in the first coordinate.
        measure: the measure where none is given: "uniform" (1/n each) or "counting" (1 each).
        residual: W_theta, a module that is applied to u(x); None for 0.
        tile: (queries, keys) per tile; None chooses it by the size of the kernel's values.
    """

    def __init__(
        self,
        kernel: Kernel,
        *,
        normalization: Literal["sum", "softmax"] | None = None,
        is_causal: bool = False,
        measure: Literal["uniform", "counting"] = "uniform",
        residual: nn.Module | None = None,
        tile: tuple[int, int] | None = None,
    ):
        super().__init__()
        if normalization not in (None, "sum", "softmax"):
            raise ValueError(f"`normalization` ({normalization!r}) must be None, 'sum' or 'softmax'")
        if measure not in ("uniform", "counting"):
            raise ValueError(f"`measure` ({measure!r}) must be 'uniform' or 'counting'")
        self.kernel, self.residual = kernel, residual
        self.normalization, self.is_causal, self.measure, self.tile = normalization, is_causal, measure, tile

    def forward(
        self,
        u: Tensor,
        positions: Tensor | None = None,
        *,
        measure: Tensor | None = None,
        queries: Tensor | None = None,
        query_positions: Tensor | None = None,
        values: Tensor | None = None,
        context: Any = None,
    ) -> Tensor:
        """Integrates over the keys: [B, n_q, features], or [B, n_q, G, features] if u has groups.

        Args:
            u: features of the keys, [B, n_k, d], or [B, n_k, G, c] for kernels with groups.
            positions: of the keys, [n_k, s] or [B, n_k, s]; their indices 0, 1, ... if None.
            measure: mass of each key, [n_k] or [B, n_k].
            queries: features of the queries, [B, n_q, d] or [B, n_q, G, c]; those of the keys if None.
            query_positions: [n_q, s] or [B, n_q, s]; if None, those of the keys, or the indices of the queries where
                the keys have theirs. Without ``queries`` they may be any number, and u(x) is 0.
            values: v, integrated instead of u, with the axes of u.
            context: data of this call that the kernel asks for.
        """
        grouped = u.dim() == 4
        if queries is None:
            queries = u if query_positions is None else u.new_zeros(len(u), query_positions.shape[-2], *u.shape[2:])
        given = (queries, u, u if values is None else values)
        u_x, u_y, values = (t if grouped else t.unsqueeze(2) for t in given)  # [B, n_q, G, c], [B, n_k, G, c] twice
        y, x = _points(positions, u_y), _points(positions if query_positions is None else query_positions, u_x)
        _check(u_x, u_y, values, x, y, measure)
        if measure is None:
            measure = u_y.new_full(u_y.shape[1:2], 1 / u_y.shape[1] if self.measure == "uniform" else 1)
        omega = measure if measure.dim() == 2 else measure.unsqueeze(0)  # [B or 1, n_k]

        prepared = self.kernel.prepare(u_x, u_y, x, y, context)
        rows, columns = self._tile(len(u_y))
        out = []
        for tile in _slices(x.shape[1], rows):
            arguments = (tile, columns, u_x, u_y, values, x, y, omega, prepared)
            if torch.is_grad_enabled() and x.shape[1] > rows:
                out.append(checkpoint(self._integrate, *arguments, use_reentrant=False))
            else:
                out.append(self._integrate(*arguments))
        integral = torch.cat(out, dim=1)  # [B, n_q, G, features]
        integral = integral if grouped else integral.squeeze(2)
        return integral if self.residual is None else integral + self.residual(queries)

    def _integrate(self, rows: slice, step: int, u_x, u_y, values, x, y, omega, prepared) -> Tensor:
        """Returns the integral at the queries ``rows``, over tiles of ``step`` keys: [B, t_q, G, features]."""
        tiles = _slices(u_y.shape[1], step)
        seen = [tile for tile in tiles if not self._vanishes(x[:, rows], y[:, tile])]
        total, mass, peak = 0.0, 0.0, torch.tensor(-torch.inf, device=x.device)
        for columns in seen or tiles[:1]:
            pairs = Pairs(x[:, rows], y[:, columns], u_x[:, rows], u_y[:, columns], rows, columns, prepared)
            kappa = self.kernel(pairs)  # [B or 1, t_q, t_k, G or 1, ...]
            weight = omega[:, None, columns]  # [B or 1, t_q or 1, t_k]
            if self.is_causal:
                weight = weight * (pairs.y[:, None, :, 0] <= pairs.x[:, :, None, 0])
            weight = weight.view(*weight.shape, *(1,) * (kappa.dim() - 3)).to(kappa.dtype)
            if self.normalization == "softmax":
                kappa = kappa + weight.log()
                new_peak = torch.maximum(peak.to(kappa.dtype), kappa.detach().amax(2))  # [B, t_q, G]
                shift = new_peak.where(new_peak.isfinite(), 0)
                kappa, scale = (kappa - shift.unsqueeze(2)).exp(), (peak - shift).exp()
                total, mass, peak = total * scale.unsqueeze(-1), mass * scale, new_peak
            else:
                kappa = kappa * weight
            total = total + _contract(kappa, values[:, columns])
            if self.normalization is not None:
                mass = mass + kappa.sum(2)  # [B or 1, t_q, G]
        return total if self.normalization is None else total / mass.where(mass != 0, 1).unsqueeze(-1)  # no mass: 0

    def _vanishes(self, x: Tensor, y: Tensor) -> bool:
        """Says whether the tile is empty: all of it in the future, or outside of the kernel's support."""
        is_future = self.is_causal and bool(y[..., 0].min() > x[..., 0].max())
        return is_future or self.kernel.vanishes(x, y)

    def _tile(self, batch: int) -> tuple[int, int]:
        if self.tile is not None:
            return self.tile
        entries = self.kernel.entries_per_pair * (batch if self.kernel.depends_on_sample else 1)
        side = max(1, min(256, int((_TILE_ENTRIES / max(1, entries)) ** 0.5)))
        return side, side


def _slices(count: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def _contract(kappa: Tensor, values: Tensor) -> Tensor:
    """Returns the sum over the keys of kappa v: values [B, t_k, G, c] -> [B, t_q, G, c or a]."""
    formulas = {4: "bijg,bjgc->bigc", 5: "bijgc,bjgc->bigc", 6: "bijgac,bjgc->biga"}
    if kappa.dim() not in formulas:
        raise ValueError(f"a kernel returned {kappa.dim()} axes: 4 (scalar), 5 (diagonal) or 6 (matrix) were expected")
    return torch.einsum(formulas[kappa.dim()], kappa.to(values.dtype), values)


def _points(positions: Tensor | None, features: Tensor) -> Tensor:
    """Returns positions [B or 1, n, s], which are the indices of the features [B, n, ...] if none are given."""
    if positions is None:
        positions = torch.arange(features.shape[1], device=features.device).unsqueeze(1)
    return positions if positions.dim() == 3 else positions.unsqueeze(0)


def _check(u_x: Tensor, u_y: Tensor, values: Tensor, x: Tensor, y: Tensor, measure: Tensor | None) -> None:
    for name, positions, features in (("positions", y, u_y), ("query_positions", x, u_x)):
        if positions.shape[1] != features.shape[1]:
            raise ValueError(f"`{name}` holds {positions.shape[1]} points for {features.shape[1]} feature vectors")
    if values.shape[:2] != u_y.shape[:2]:
        raise ValueError(f"`values` {list(values.shape)} must start with {list(u_y.shape[:2])}, as `u` does")
    if measure is not None and measure.shape[-1] != u_y.shape[1]:
        raise ValueError(f"`measure` {list(measure.shape)} must end with the number of keys, {u_y.shape[1]}")
