# SPDX-License-Identifier: Apache-2.0
"""Measures per layer and head how local, convolutional, content-driven and causal trained kernels have become."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from .kernels import LayerKernels, layer_kernels
from .plots import plot_diagnosis


@dataclass(frozen=True)
class HeadDiagnosis:
    """Figures of one kernel, over the pairs (i, j) that see each other. A figure that cannot be computed is nan."""

    layer: int
    head: int
    locality: float  # share of |K|^2 at distances up to the radius
    convolution: float  # |E[K | x-y]|^2 / |K|^2: 1 if the kernel is a function of the displacement alone
    invariance: float  # |K^TI|^2 / |K|^2: 1 if shifting both points, features fixed, changes nothing (Theorem 5)
    content: float  # share of the variance of K that the features cause, at fixed positions; the rest is position
    causality: float  # (past - future) / (past + future) of |K|^2 by order of the positions: 1, 0 or -1
    entropy: float  # of |K_ij| over j, relative to that of equal norms: 1 global, towards 0 a few keys
    profile: tuple[float, ...]  # root mean square of |K| in equal bins of distance, relative to that of all pairs


@dataclass(frozen=True, repr=False)
class KernelDiagnosis:
    """All heads of a model. ``print(diagnosis)`` shows a table, ``diagnosis.plot("kernels.png")`` draws it."""

    figure_names: ClassVar[list[str]] = [field.name for field in fields(HeadDiagnosis)][2:-1]

    heads: tuple[HeadDiagnosis, ...]
    radius: float
    uniform_locality: float  # locality of a constant kernel on the same domain
    largest_distance: float

    def __repr__(self) -> str:
        layers = 1 + max(head.layer for head in self.heads)
        return f"KernelDiagnosis({layers} layers of {len(self.heads) // layers} heads, radius={self.radius:.3g})"

    def table(self) -> str:
        """Returns a Markdown table with a row per layer and head."""
        names = self.figure_names
        lines = ["| layer | head | " + " | ".join(names) + " |", "|---" * (len(names) + 2) + "|"]
        for head in self.heads:
            cells = [f"{getattr(head, name):.3f}" for name in names]
            lines.append(f"| {head.layer + 1} | {head.head + 1} | " + " | ".join(cells) + " |")
        lines.append(f"\nlocality: share within {self.radius:.3g} (a constant kernel has {self.uniform_locality:.3f})")
        return "\n".join(lines)

    __str__ = table

    def plot(self, path: str | Path) -> None:
        """Draws a map of each figure over layers and heads, and all distance profiles. It needs matplotlib."""
        plot_diagnosis(self, path)


@torch.no_grad()
def diagnose_kernels(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    *,
    radius: float | None = None,
    part: Literal["full", "centred"] = "full",
    num_shifts: int = 8,
    num_bins: int = 8,
    seed: int = 0,
) -> KernelDiagnosis:
    r"""Looks at the kernels of all layers at the features that the model has on ``inputs``.

    K_ij is evaluated for every pair of positions of every sample, in pieces. Two figures need more than one value:
    ``convolution`` displacements that several pairs share (a regular domain), ``content`` several samples on one
    domain. Both are unbiased estimates, so that few samples do not make a kernel look like a convolution.

    Args:
        model: an ITNetModel, or any model that contains one, with exact kernels; or with near ones
            (``integration_mode="near_far"``), of which the pairs count that are near.
        inputs: keyword arguments of its forward; 8 samples or more are a good number.
        radius: for ``locality``; a quarter of the largest distance if None.
        part: "full" for K itself; "centred" takes out its mean over all pairs first: b2, which starts as the
            identity, may outweigh what differs from pair to pair.
        num_shifts, seed: the random shifts of the positions that ``invariance`` averages over.
        num_bins: the number of bins of the distance profile.
    """
    if part not in ("full", "centred"):
        raise ValueError(f"`part` ({part!r}) must be 'full' or 'centred'")
    layers = layer_kernels(model, inputs)
    domain = _Domain(layers[0], radius)  # layers share it
    heads = []
    for layer, kernels in enumerate(layers):
        if part == "centred":
            kernels.subtract(kernels.weighted_sum(domain.visible / domain.visible.sum()).sum(0))
        squares, convolution, content = _moments(kernels, domain)
        locality, causality, entropy, profile = _norm_figures(squares, domain, num_bins)
        invariance = _invariance(kernels, domain, num_shifts, seed)
        figures = torch.stack([locality, convolution, invariance, content, causality, entropy], -1).tolist()
        for head, (values, curve) in enumerate(zip(figures, profile.tolist(), strict=True)):
            heads.append(HeadDiagnosis(layer, head, *values, tuple(curve)))
    return KernelDiagnosis(tuple(heads), domain.radius, domain.uniform_locality, domain.largest)


class _Domain:
    """Distances and displacements of the pairs that see each other."""

    def __init__(self, kernels: LayerKernels, radius: float | None):
        self.visible, self.real = kernels.visible, kernels.measure > 0  # [B, n, n], [B, n]
        self.positions = kernels.positions.double()  # [B or 1, n, s]
        self.distance = torch.cdist(self.positions, self.positions).expand_as(self.visible)
        self.largest = float(self.distance[self.visible].max()) or 1.0
        self.radius = self.largest / 4 if radius is None else radius
        self.near = self.visible & (self.distance <= self.radius * (1 + 1e-9))
        self.uniform_locality = float(self.near.sum() / self.visible.sum())
        steps = (self.positions.unsqueeze(2) - self.positions.unsqueeze(1)).flatten(0, 2)
        _, group, sizes = (steps / self.largest * 1e6).round().unique(dim=0, return_inverse=True, return_counts=True)
        pairs = (len(self.positions), *self.visible.shape[1:])
        self.group = group.view(pairs).expand_as(self.visible)  # number of the pair's displacement
        self.num_groups = len(sizes)
        self.comparable = self.visible & (sizes[group] > 1).view(pairs)  # pairs that share theirs with others
        # Pairs that all samples have, at the same positions: what the features alone make different.
        self.common = self.visible.all(0) & (len(self.visible) > 1 and len(self.positions) == 1)  # [n, n]


def _moments(kernels: LayerKernels, domain: _Domain) -> tuple[Tensor, Tensor, Tensor]:
    """Returns |K_ij|^2 [B, n, n, H], 0 for invisible pairs, and the shares of displacement and content [H]."""
    batch, _, heads, size = kernels.heads.shape
    options = {"dtype": torch.float64, "device": kernels.heads.device}
    sums = torch.zeros(domain.num_groups, heads, size, size, **options)
    energy, within = torch.zeros(domain.num_groups, heads, **options), torch.zeros(heads, **options)
    squares = []
    for rows, matrices in kernels.pieces():
        matrices = matrices.double()
        square = matrices.square().sum((-1, -2))  # [B, t, n, H]
        squares.append(square * domain.visible[:, rows].unsqueeze(-1))
        chosen = domain.comparable[:, rows]
        group = domain.group[:, rows][chosen]
        sums.index_add_(0, group, matrices[chosen])
        energy.index_add_(0, group, square[chosen])
        if domain.common.any():
            within += matrices[:, domain.common[rows]].var(0).sum((0, 2, 3))
    squares = torch.cat(squares, 1)

    # |E[K | x-y]|^2 from products of different pairs: (|sum|^2 - sum of squares) / (N (N - 1)), weighted by N.
    sizes = domain.group[domain.comparable].bincount(minlength=domain.num_groups).unsqueeze(-1)
    several = sizes[:, 0] > 1
    shared = (sums.square().sum((-1, -2)) - energy)[several] / (sizes[several] - 1)
    convolution = (shared.sum(0) / energy[several].sum(0)).clamp(0, 1)  # 0 / 0 = nan: no displacement occurs twice

    count = domain.common.sum()
    mean = kernels.weighted_sum(domain.common.expand_as(domain.visible) / (batch * count)).sum(0)  # nan without any
    variance = squares[:, domain.common].mean((0, 1)) - mean.square().sum((-1, -2))
    return squares, convolution, (within / count / variance).clamp(0, 1)


def _norm_figures(squares: Tensor, domain: _Domain, num_bins: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns locality, causality and entropy [H] and the profile [H, bins] of |K_ij|^2 [B, n, n, H]."""
    lower = torch.ones_like(domain.visible[0]).tril(-1)
    past, future = (squares[:, order].sum((0, 1)) for order in (lower, lower.T))
    norms = squares.sqrt()
    weights = norms / norms.sum(2, keepdim=True).clamp(min=1e-300)
    keys = domain.visible.sum(2)  # [B, n]
    entropy = -torch.special.xlogy(weights, weights).sum(2)[keys > 1] / keys[keys > 1].log().unsqueeze(-1)
    bins = (domain.distance / domain.largest * num_bins).long().clamp(max=num_bins - 1)
    profile = torch.stack([squares[(bins == k) & domain.visible].mean(0) for k in range(num_bins)], -1)
    profile = (profile / squares[domain.visible].mean(0).unsqueeze(-1)).sqrt()
    locality = squares[domain.near].sum(0) / squares.sum((0, 1, 2))
    return locality, (past - future) / (past + future), entropy.mean(0), profile


def _invariance(kernels: LayerKernels, domain: _Domain, num_shifts: int, seed: int) -> Tensor:
    """Returns |K^TI|^2 / |K|^2 [H] with K^TI_ij the mean over shifts d of kappa(x_i + d, x_j + d, u_i, u_j).

    The shifts are those that leave both points inside of the box around the domain. The square of the mean comes from
    products of different shifts, as above.
    """
    real = domain.positions.expand(len(domain.real), -1, -1)[domain.real]  # [all real positions, s]
    low, high = real.amin(0), real.amax(0)
    generator = torch.Generator().manual_seed(seed)
    shifts = (2 * torch.rand(num_shifts, len(low), generator=generator, dtype=torch.float64) - 1).to(low.device)
    shifts = torch.cat([torch.zeros_like(shifts[:1]), shifts * (high - low)])
    slack, moved = 1e-9 * domain.largest, domain.positions + shifts[:, None, None]  # [shifts + 1, B or 1, n, s]
    inside = ((moved >= low - slack) & (moved <= high + slack)).all(-1)
    top = bottom = 0
    for pieces in zip(*(kernels.pieces(shift) for shift in shifts), strict=True):
        total = energy = count = 0
        for (rows, matrices), points in zip(pieces, inside, strict=True):
            both = (points[:, rows].unsqueeze(2) & points.unsqueeze(1)) & domain.visible[:, rows]  # [B, t, n]
            matrices = matrices.double() * both[..., None, None, None]
            total, count = total + matrices, count + both.double()
            energy = energy + matrices.square().sum((-1, -2))
        usable = count > 1
        count = count[usable].unsqueeze(-1)
        top = top + ((total.square().sum((-1, -2)) - energy)[usable] / (count * (count - 1))).sum(0)
        bottom = bottom + (energy[usable] / count).sum(0)
    return (top / bottom).clamp(0, 1)
