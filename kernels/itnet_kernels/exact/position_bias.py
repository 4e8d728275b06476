"""P for the hand-written derivatives of the sum over pairs: its value for the cells of a place, and its gradients.

Two ways to evaluate P: a table of displacements, where the positions lie on a regular lattice (text, image grids) and
there are few of them; otherwise the bilinear form of first_layer.py. The gradients always take the bilinear form.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..first_layer import PositionWeights, key_factors, length, position_tile
from ..positions import find_tables
from .pair_inputs import POSITIONS, PairInputs

if TYPE_CHECKING:
    from .tiled import Cells, Place

#: What P is where a pair does not count: GELU and its derivative are exactly 0 there, whatever is added.
HIDDEN = -1e15


class PositionBias:
    """P_ij[k] of cells. In blocks, ``HIDDEN`` stands where a pair does not count, and everywhere for the last unit."""

    def __init__(self, inputs: PairInputs):
        self.inputs = inputs
        tables, index = inputs.displacements, inputs.displacement_index
        if index is None and (inputs.w_relative is not None or inputs.w_distance is not None):
            given = inputs.query_positions, inputs.key_positions, inputs.frequencies, inputs.keys.dtype
            tables, index = find_tables(*given)
        self.table = None
        if index is not None and len(index) and bool((index[:, 1] > 0).all()):
            w_y, w_relative, w_distance = inputs.position_weights
            if w_relative is None:
                self.table = tables[:, -1:] @ w_distance.T  # [rows, w]
            elif w_distance is None:
                self.table = tables[:, :-1] @ w_relative.T
            else:
                self.table = tables @ torch.cat([w_relative, w_distance], dim=1).T
            first, queries, keys = index.split([2, inputs.queries.shape[1], inputs.keys.shape[1]], dim=1)
            middle = first[:, :1] + first[:, 1:] // 2
            self.lattice = (queries + middle).unsqueeze(-1), keys.unsqueeze(-1)  # [sets, n, 1] each
            # W_y . gamma(y_j): [B or 1, n_k, w]
            self.key_term = None if w_y is None else inputs.key_features @ w_y.T

    def tile(self, cells: "Cells", place: "Place") -> Tensor:
        """Returns [cells, m, t * w], with the cells of one sample if all samples have the same bias."""
        inputs = self.inputs
        shape = cells.num_keys, place.num_queries, inputs.row.shape[-1]  # m, t, w
        if not inputs.has_position_bias:
            bias = inputs.row.new_zeros(1, *shape)
        elif self.table is None:
            where = self._positions(cells, place)
            bias = position_tile(*where, inputs.position_weights, inputs.has_frequencies)
        else:
            queries, keys = (cells.take_positions(t, s, place) for t, s in zip(self.lattice, _SIDES, strict=True))
            numbers = queries.mT - keys  # [c, m, t]
            bias = self.table.index_select(0, numbers.flatten()).view(-1, *shape)
            if self.key_term is not None:
                bias += cells.take_positions(self.key_term, "keys", place).unsqueeze(2)
        if cells.pairs is None:
            return bias.flatten(2, 3)
        count = place.num_blocks if cells.is_shared else place.num_cells
        if len(bias) < count:  # blocks without a position term, or samples that share positions, but not the pairs
            bias = bias.repeat(count // len(bias), 1, 1, 1)
        if inputs.w_mid is None:
            bias.masked_fill_(~self.pairs(cells, place).unsqueeze(-1), HIDDEN)
        bias[..., -1] = HIDDEN
        return bias.flatten(2, 3)

    def pairs(self, cells: "Cells", place: "Place") -> Tensor:
        """Returns which pairs of the blocks count: [cells, m, t], with as many cells as :meth:`tile`."""
        pairs = cells.pairs[slice(0, 1) if len(cells.pairs) == 1 else place.samples, place.blocks, place.rows]
        num_samples = 1 if cells.is_shared else place.samples.stop - place.samples.start
        return pairs.expand(num_samples, -1, -1, -1).flatten(0, 1).mT

    def backward(self, cells: "Cells", place: "Place", grad: Tensor, grads: dict[str, Tensor]) -> None:
        """Adds the part of a place to every gradient in ``grads``, given dL/dP [cells, m, t * w]."""
        inputs, where = self.inputs, self._positions(cells, place)
        needs_positions = "key_positions" in grads
        grad = grad.mT.unflatten(1, (place.num_queries, -1))  # [c, t, w, m]
        found = bias_gradients(grad, *where, inputs.position_weights, inputs.has_frequencies, needs_positions)
        for name, value in found.items():
            if name in POSITIONS:
                side = "queries" if name.startswith("query") else "keys"
                cells.add_positions(grads[name], side, place, value.to(grads[name].dtype))
            else:
                grads[name] += value

    def _positions(self, cells: "Cells", place: "Place") -> list[Tensor]:
        """Returns x, y, gamma(x) and gamma(y) of the cells: [c, t or m, .]."""
        parts = [
            cells.take_positions(getattr(self.inputs, name), side, place)
            for name, side in zip(POSITIONS, (*_SIDES, *_SIDES), strict=True)
        ]
        count = max(map(len, parts))
        return [part.expand(count, -1, -1) for part in parts]


_SIDES = ("queries", "keys")


def bias_gradients(
    grad: Tensor,  # dL/dP [c, t, w, m]
    x: Tensor,  # [c, t, s]
    y: Tensor,  # [c, m, s]
    gamma_x: Tensor,  # [c, t, F]
    gamma_y: Tensor,  # [c, m, F]
    weights: PositionWeights,
    has_frequencies: bool,
    needs_positions: bool,
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Returns the gradients of W_y, W_rel and w_d, summed over all cells, and on request of positions and features.

    They go by the names of :class:`PairInputs`; those of positions and features have a row for each of the cells. The
    product of dL/dP with gamma(y) may be taken in another ``dtype``.
    """
    w_y, w_relative, w_distance = weights
    found, flat = {}, grad.flatten(1, 2)  # [c, t w, m]
    if needs_positions:
        found = dict(zip(POSITIONS, map(torch.zeros_like, (x, y, gamma_x, gamma_y)), strict=True))
    if w_y is not None or (w_relative is not None and has_frequencies):
        dtype = grad.dtype if dtype is None else dtype
        grad_factors = (
            (flat.to(dtype) @ gamma_y.to(dtype)).to(grad.dtype).unflatten(1, grad.shape[1:3])
        )  # [c, t, w, F]
        if needs_positions:
            factors = key_factors(weights, gamma_x, has_frequencies).to(grad.dtype)  # [c, t, w, F] or [w, F]
            found["key_features"] = flat.mT @ factors.expand_as(grad_factors).flatten(1, 2)
        if w_y is not None:
            found["w_y"] = grad_factors.sum((0, 1))
        if w_relative is not None and has_frequencies:
            # Through rotate: C = [W_c s - W_s c ; W_s s + W_c c]. Not einsum: it would make a batch of L matrix-vector
            # products of these.
            sine, cosine = gamma_x.unsqueeze(2).chunk(2, dim=-1)  # [c, t, 1, L]
            top, bottom = grad_factors.chunk(2, dim=-1)  # [c, t, w, L]
            parts = (bottom * sine).addcmul_(top, cosine, value=-1), (top * sine).addcmul_(bottom, cosine)
            found["w_relative"] = torch.cat([part.sum((0, 1)) for part in parts], dim=-1)
            if needs_positions:
                w_sine, w_cosine = w_relative.chunk(2, dim=-1)  # [w, L]
                parts = (top * w_cosine).addcmul_(bottom, w_sine), (bottom * w_cosine).addcmul_(top, w_sine, value=-1)
                found["query_features"] = torch.cat([part.sum(2) for part in parts], dim=-1)
    is_raw = w_relative is not None and not has_frequencies
    differences = x.unsqueeze(2) - y.unsqueeze(1) if is_raw or w_distance is not None else None  # [c, t, m, s]
    if is_raw:
        found["w_relative"] = (grad @ differences.to(grad.dtype)).sum((0, 1))
        if needs_positions:
            found["query_positions"] += grad.sum(3) @ w_relative
            found["key_positions"] -= grad.sum(1).mT @ w_relative
    if w_distance is not None:
        lengths = length(differences).to(grad.dtype)  # [c, t, m]
        if grad.stride(2) == 1:  # [c, m, t, w] in memory, as one matrix
            by_pair = grad.permute(0, 3, 1, 2).reshape(-1, grad.shape[2])
            found["w_distance"] = by_pair.T @ lengths.mT.reshape(-1, 1)
        else:
            found["w_distance"] = (grad @ lengths.unsqueeze(-1)).sum((0, 1))
        if needs_positions:
            pull = torch.einsum("ctkj,k->ctj", grad, w_distance[:, 0])
            pull = torch.where(lengths > 0, pull / lengths, 0)  # the gradient of |v| at v = 0 is 0
            pull = pull.unsqueeze(-1) * differences  # [c, t, m, s]
            found["query_positions"] += pull.sum(2)
            found["key_positions"] -= pull.sum(1)
    return found
