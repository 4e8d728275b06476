# SPDX-License-Identifier: Apache-2.0
"""Computes singular values of learned kernels, and what a low rank keeps of them (App. rank_bound of the paper)."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .kernels import layer_kernels


@dataclass(frozen=True)
class KernelSpectrum:
    """Singular values of the integral operator u -> sum_j omega_j K_ij u_j, per layer, sample and head.

    They are those of the matrix K [n d_h, n d_h] with the blocks sqrt(omega_i) K_ij sqrt(omega_j): the operator in
    L2 of the measure. So a point that is split in two changes nothing, and padding adds nothing but zeros. In a causal
    model omega_j is relative to what query i sees, and blocks of the future are 0.
    """

    singular_values: Tensor  # [L, B, H, n * d_h], falling

    def energy(self, rank: int) -> Tensor:
        """Returns the share of |K|_F^2 that the best approximation of this rank keeps: [L, B, H]."""
        squares = self.singular_values.square()
        return squares[..., :rank].sum(-1) / squares.sum(-1).clamp(min=torch.finfo(squares.dtype).tiny)

    def error(self, rank: int) -> Tensor:
        """Returns |K - K_r|_F of the best approximation K_r of this rank (Eckart-Young): [L, B, H]."""
        return self.singular_values[..., rank:].square().sum(-1).sqrt()

    def bound(self, rank: int) -> Tensor:
        """Returns the paper's bound on the error, |K|_* / sqrt(r): [L, B, H]."""
        return self.singular_values.sum(-1) / rank**0.5


@torch.no_grad()
def kernel_spectrum(model: nn.Module, batch: Mapping[str, Tensor], *, centred: bool = False) -> KernelSpectrum:
    """Computes the singular values of the kernels of all layers at the features that the model has on ``batch``.

    ``model`` is an ITNetModel or a head around one, with exact kernels, and ``batch`` holds keyword arguments of its
    forward. (Near kernels, of ``integration_mode="near_far"``, are 0 where keys are not near, and are without the far
    field.) K is formed with all its (n d_h)^2 entries per sample and head, so that inputs must be small. ``centred``
    first takes out the mean of K_ij over all pairs, by the measure of both: the constant part, which low-rank
    integration has besides its factors.
    """
    values = []
    for kernels in layer_kernels(model, batch, name="batch"):
        omega, pairs = kernels.measure.double(), kernels.pair_measure.double()
        matrices = torch.cat([piece.double() for _, piece in kernels.pieces()], 1)
        if centred:
            matrices = matrices - kernels.weighted_sum(omega.unsqueeze(2) * pairs)[:, None, None]
        root = omega.sqrt()
        weights = root.unsqueeze(2) * pairs / root.where(root > 0, 1).unsqueeze(1)  # sqrt(omega_i omega_j), or causal
        matrices = matrices * weights[..., None, None, None]
        blocks = matrices.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)  # [B, H, n * d_h, n * d_h]
        values.append(torch.linalg.svdvals(blocks))
    return KernelSpectrum(torch.stack(values))
