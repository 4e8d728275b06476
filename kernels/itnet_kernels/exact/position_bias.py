"""P and its gradients, tile by tile, for the hand-written derivatives of the sum over pairs.

Two ways to evaluate P: a table of displacements, where the positions lie on a regular lattice (text, image grids) and
there are few of them; otherwise the bilinear form of first_layer.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..first_layer import PositionWeights, key_factors, length, position_term
from ..positions import Displacements, of_set
from .pair_inputs import POSITIONS


@dataclass
class PositionBias:
    """P for one set of positions: ``tile(rows)`` is that of some queries, [t, w, n_k]."""

    x: Tensor  # [n_q, s]
    y: Tensor  # [n_k, s]
    gamma_x: Tensor  # [n_q, F]
    gamma_y: Tensor  # [n_k, F]
    weights: PositionWeights
    has_frequencies: bool
    displacements: Displacements | None = None

    def __post_init__(self):
        if self.displacements is None:
            return
        (w_y, w_relative, w_distance), features = self.weights, self.displacements.table
        if w_relative is None:
            self.table = w_distance * features[:, -1]  # [w, rows]
        elif w_distance is None:
            self.table = w_relative @ features[:, :-1].T
        else:
            self.table = torch.cat([w_relative, w_distance], dim=1) @ features.T
        self.key_term = None if w_y is None else w_y @ self.gamma_y.T  # [w, n_k]

    def tile(self, rows: slice) -> Tensor:
        if self.displacements is None:
            where = (self.x[rows], self.y, self.gamma_x[rows], self.gamma_y)
            term = position_term(*where, self.weights, self.has_frequencies, in_place=True)
            return term.expand(rows.stop - rows.start, -1, -1)
        numbers = self.displacements.numbers(rows)  # [t, n_k]
        bias = self.table.index_select(1, numbers.flatten()).view(-1, *numbers.shape).transpose(0, 1)  # [t, w, n_k]
        out = torch.empty_like(bias, memory_format=torch.contiguous_format)
        return out.copy_(bias) if self.key_term is None else torch.add(bias, self.key_term, out=out)

    def backward(self, rows: slice, grad: Tensor, grads: dict[str, Tensor], dtype: torch.dtype) -> None:
        """Adds the tile's part to every gradient in ``grads``, given dL/dP [t, w, n_k]. Always in the bilinear form.

        ``grads`` go by the names of :class:`PairInputs`, and hold positions and features or none of them. Products
        with dL/dP are taken in ``dtype``.
        """
        w_y, w_relative, w_distance = self.weights
        needs_positions = "key_positions" in grads
        factors = key_factors(self.weights, self.gamma_x[rows], self.has_frequencies)
        if factors is not None:
            grad_factors = (grad.to(dtype) @ self.gamma_y.to(dtype)).to(grad.dtype)  # [t, w, F]
            if needs_positions:
                grads["key_features"] += torch.einsum("tkj,tkf->jf", grad, factors.expand_as(grad_factors))
            if w_y is not None:
                grads["w_y"] += grad_factors.sum(0)
            if w_relative is not None and self.has_frequencies:
                self._rotation_backward(rows, grad_factors, grads)
        is_raw = w_relative is not None and not self.has_frequencies
        differences = self.x[rows, None] - self.y if is_raw or w_distance is not None else None  # [t, n_k, s]
        if is_raw:
            grads["w_relative"] += (grad @ differences.to(grad.dtype)).sum(0)
            if needs_positions:
                grads["query_positions"][rows] += grad.sum(2) @ w_relative
                grads["key_positions"] -= grad.sum(0).T @ w_relative
        if w_distance is not None:
            lengths = length(differences).to(grad.dtype)  # [t, n_k]
            grads["w_distance"] += torch.einsum("tkj,tj->k", grad, lengths).unsqueeze(-1)
            if needs_positions:
                pull = torch.einsum("tkj,k->tj", grad, w_distance[:, 0])
                pull = torch.where(lengths > 0, pull / lengths, 0)  # the gradient of |v| at v = 0 is 0
                pull = pull.unsqueeze(-1) * differences  # [t, n_k, s]
                grads["query_positions"][rows] += pull.sum(1)
                grads["key_positions"] -= pull.sum(0)

    def _rotation_backward(self, rows: slice, grad_factors: Tensor, grads: dict[str, Tensor]) -> None:
        """Through :func:`rotate`: C = [W_c s - W_s c ; W_s s + W_c c]."""
        sine, cosine = self.gamma_x[rows].chunk(2, dim=-1)  # [t, L]
        w_sine, w_cosine = self.weights.relative.chunk(2, dim=-1)  # [w, L]
        top, bottom = grad_factors.chunk(2, dim=-1)  # [t, w, L]

        # Not einsum: it would make a batch of L matrix-vector products of these.
        def over_queries(grad, factor):
            return (grad * factor.unsqueeze(1)).sum(0)

        def over_hidden(grad, factor):
            return (grad * factor).sum(1)

        grad_w_sine = over_queries(bottom, sine) - over_queries(top, cosine)
        grad_w_cosine = over_queries(top, sine) + over_queries(bottom, cosine)
        grads["w_relative"] += torch.cat([grad_w_sine, grad_w_cosine], dim=-1)
        if "query_features" in grads:
            grad_sine = over_hidden(top, w_cosine) + over_hidden(bottom, w_sine)
            grad_cosine = over_hidden(bottom, w_cosine) - over_hidden(top, w_sine)
            grads["query_features"][rows] += torch.cat([grad_sine, grad_cosine], dim=-1)


def gradients_of_set(grads: dict[str, Tensor], index: int) -> dict[str, Tensor]:
    """The accumulators that :meth:`PositionBias.backward` of a set of positions adds to."""
    return grads | {name: of_set(grads[name], index) for name in POSITIONS if name in grads}
