"""Where the values of a signal lie, as the layers of peers ask for it: pairs, balls, nearest positions."""

from functools import cached_property

import torch
from torch import Tensor

from modeling_itnet.operator import ITNetFourierFeatures


class Places:
    """Positions x [B, n, s], their measure ω [B, n], which sums to 1, and γ. What is asked for is computed once."""

    def __init__(self, positions: Tensor, measure: Tensor | None, fourier: ITNetFourierFeatures):
        self.positions, self.fourier, self.is_uniform = positions, fourier, measure is None
        if measure is None:
            measure = positions.new_ones(positions.shape[:2])
        self.measure = measure / measure.sum(1, keepdim=True)
        self._edges: dict[float, tuple[Tensor, Tensor, Tensor]] = {}

    @cached_property
    def gamma(self) -> Tensor:
        """γ(x) [B, n, 2 L_f]."""
        return self.fourier(self.positions).to(self.positions.dtype)

    @cached_property
    def log_measure(self) -> Tensor | None:
        """log ω [B, n], or None where no measure was given: a softmax feels nothing of a uniform one."""
        return None if self.is_uniform else self.measure.clamp_min(torch.finfo(self.measure.dtype).tiny).log()

    @cached_property
    def pairs(self) -> Tensor:
        """γ(x_i − x_j) and |x_i − x_j| [B, n, n, 2 L_f + 1]."""
        return pair_features(self.fourier, self.positions)

    @cached_property
    def distances(self) -> Tensor:
        """|x_i − x_j| [B, n, n]. The products of the fast way would lose digits of small ones."""
        return torch.cdist(self.positions, self.positions, compute_mode="donot_use_mm_for_euclid_dist")

    def edges(self, radius: float) -> tuple[Tensor, Tensor, Tensor]:
        """Returns samples, queries i and keys j of all pairs with |x_i − x_j| < radius, each with itself: [E] each."""
        if radius not in self._edges:
            self._edges[radius] = (self.distances < radius).nonzero(as_tuple=True)
        return self._edges[radius]

    def nearest(self, count: int) -> Tensor:
        """Returns the ``count`` positions that are nearest to each, itself first, or all there are: [B, n, K]."""
        return self.distances.topk(min(count, self.positions.shape[1]), largest=False).indices


def pair_features(fourier: ITNetFourierFeatures, positions: Tensor) -> Tensor:
    """Returns γ(x_i − x_j) and |x_i − x_j| of positions [B, n, s]: [B, n, n, 2 L_f + 1]."""
    offsets = positions.unsqueeze(2) - positions.unsqueeze(1)
    return torch.cat([fourier(offsets).to(offsets.dtype), offsets.norm(dim=-1, keepdim=True)], dim=-1)
