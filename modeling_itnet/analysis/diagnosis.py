# SPDX-License-Identifier: Apache-2.0
"""What trained kernels have become: local, convolutional, content-driven, causal? Per layer and head, in numbers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from itnet_kernels import KernelWeights, kernel_matrices

from ..integration.capture import OperatorInput, operator_inputs
from ..operator import ITNetOperator, find_operators
from .visualization import matplotlib_classes

# Elements of the matrices K_ij that are in memory at a time: 64 MB in float32.
_CHUNK_ELEMENTS = 2**24


@dataclass(frozen=True)
class HeadDiagnosis:
    """Figures of one kernel, over the pairs (i, j) that see each other. nan where one cannot be computed."""

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

    heads: tuple[HeadDiagnosis, ...]
    radius: float
    uniform_locality: float  # locality of a constant kernel on the same domain
    largest_distance: float

    def __repr__(self) -> str:
        layers = 1 + max(head.layer for head in self.heads)
        return f"KernelDiagnosis({layers} layers of {len(self.heads) // layers} heads, radius={self.radius:.3g})"

    def __str__(self) -> str:
        return self.table()

    def table(self) -> str:
        """Markdown, a row per layer and head."""
        names = [field.name for field in fields(HeadDiagnosis)][2:-1]
        lines = ["| layer | head | " + " | ".join(names) + " |", "|---" * (len(names) + 2) + "|"]
        for head in self.heads:
            cells = [f"{getattr(head, name):.3f}" for name in names]
            lines.append(f"| {head.layer + 1} | {head.head + 1} | " + " | ".join(cells) + " |")
        lines.append(f"\nlocality: share within {self.radius:.3g} (a constant kernel has {self.uniform_locality:.3f})")
        return "\n".join(lines)

    def plot(self, path: str | Path) -> None:
        """A map of each figure over layers and heads, and the distance profiles of every layer. Needs matplotlib."""
        figure_class, _ = matplotlib_classes()
        names = [field.name for field in fields(HeadDiagnosis)][2:-1]
        layers, heads = (1 + max(getattr(h, name) for h in self.heads) for name in ("layer", "head"))
        figure = figure_class(figsize=(2.6 * len(names), 6.0), layout="constrained", dpi=150)
        figure.suptitle(f"Kernels of {layers} layers of {heads} heads: figures per head, and |K| by distance")
        maps, curves = figure.subfigures(2, 1)
        for axis, name in zip(maps.subplots(1, len(names)), names, strict=True):
            values = torch.tensor([getattr(h, name) for h in self.heads]).view(layers, heads)
            axis.set_title(name, fontsize=10)
            axis.set_xticks(range(heads), range(1, heads + 1), fontsize=8)
            axis.set_yticks(range(layers), range(1, layers + 1), fontsize=8)
            axis.set_xlabel("head", fontsize=9)
            axis.set_ylabel("layer", fontsize=9)
            _draw_map(figure, axis, name, values)
        bins = len(self.heads[0].profile)
        distances = (torch.arange(bins) + 0.5) * self.largest_distance / bins
        axes = curves.subplots(1, layers, sharey=True, squeeze=False)[0]
        axes[0].set_ylabel("|K|, relative to all pairs", fontsize=9)
        for layer, axis in enumerate(axes):
            for head in self.heads[layer * heads : (layer + 1) * heads]:
                axis.plot(distances.numpy(), head.profile, marker=".", label=f"head {head.head + 1}")
            axis.set_title(f"layer {layer + 1}", fontsize=10)
            axis.set_xlabel("distance", fontsize=9)
            axis.tick_params(labelsize=8)
        axis.legend(fontsize=8)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def _draw_map(figure, axis, name: str, values: Tensor) -> None:
    """One figure over layers and heads [L, H], with its numbers where they fit; says so if it is not defined."""
    if values.isnan().all():
        axis.set_xlim(-0.5, values.shape[1] - 0.5)
        axis.set_ylim(values.shape[0] - 0.5, -0.5)
        axis.text(
            0.5,
            0.5,
            f"not defined:\n{_NEEDS.get(name, 'no pairs')}",
            ha="center",
            va="center",
            fontsize=8,
            transform=axis.transAxes,
        )
        return
    low, high = (-1.0 if name == "causality" else 0.0), 1.0
    if name == "entropy":  # close to 1 in most kernels
        low, high = float(values.nan_to_num(1.0).min()) - 1e-3, float(values.nan_to_num(0.0).max()) + 1e-3
    image = axis.imshow(values.numpy(), cmap="coolwarm" if low < 0 else "viridis", vmin=low, vmax=high, aspect="auto")
    figure.colorbar(image, ax=axis, shrink=0.8).ax.tick_params(labelsize=8)
    if values.numel() <= 48:
        for (row, column), value in zip(
            torch.cartesian_prod(*map(torch.arange, values.shape)).tolist(), values.flatten().tolist(), strict=True
        ):
            color = "black" if low < 0 or value > (low + high) / 2 else "white"
            axis.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=7, color=color)


# Why a figure may be missing.
_NEEDS = {"content": "needs several samples\non one domain", "convolution": "no displacement\noccurs twice"}


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

    K_ij is evaluated for every pair of positions of every sample, in chunks. Two figures need more than one value:
    ``convolution`` displacements that several pairs share (a regular domain), ``content`` several samples on one
    domain. Both are unbiased estimates, so that few samples do not make a kernel look like a convolution.

    Args:
        model: an ITNetModel, or any model that contains one, with exact kernels.
        inputs: keyword arguments of its forward; 8 samples or more are a good number.
        radius: for ``locality``; a quarter of the largest distance if None.
        part: "full" for K itself; "centred" takes out its mean over all pairs first: b2, which starts as the
            identity, may outweigh what differs from pair to pair.
        num_shifts: random shifts of the positions that ``invariance`` averages over.
        num_bins: of the distance profile.
        seed: of the shifts.
    """
    if part not in ("full", "centred"):
        raise ValueError(f"`part` ({part!r}) must be 'full' or 'centred'")
    operators = find_operators(model)
    if not operators or any(operator.kernel is None for operator in operators):
        raise ValueError("the model has no exact kernels to look at: it is a low-rank model, or not an ITNet")
    captured = operator_inputs(model, inputs)
    heads, domain = [], None
    for layer, (operator, call) in enumerate(zip(operators, captured, strict=True)):
        domain = _Domain(call, operator.is_causal, radius, num_bins)
        kernels = _Kernels(operator, call, domain, part)
        heads.extend(_layer_heads(layer, kernels, domain, num_shifts, seed))
    return KernelDiagnosis(tuple(heads), domain.radius, domain.uniform_locality, domain.largest)


class _Domain:
    """Distances, order and displacements of the pairs that see each other."""

    def __init__(self, call: OperatorInput, is_causal: bool, radius: float | None, num_bins: int):
        self.batch, self.count = call.features.shape[:2]
        positions = call.positions if call.positions.dim() == 3 else call.positions.unsqueeze(0)
        self.is_shared = len(positions) == 1 or bool((positions == positions[:1]).all())
        self.positions = (positions[:1] if self.is_shared else positions).double()  # [B or 1, n, s]
        real = self.real = call.measure > 0
        self.visible = real.unsqueeze(2) & real.unsqueeze(1)  # [B, i, j]
        if is_causal:
            self.visible = self.visible.tril()
        self.distance = torch.cdist(self.positions, self.positions).expand(self.batch, -1, -1)
        self.largest = float(self.distance[self.visible].max()) or 1.0
        self.radius = self.largest / 4 if radius is None else radius
        self.near = self.distance <= self.radius * (1 + 1e-9)
        self.uniform_locality = float(self.near[self.visible].double().mean())
        self.bins = (self.distance / self.largest * num_bins).long().clamp(max=num_bins - 1)
        self.num_bins = num_bins
        steps = (self.positions.unsqueeze(2) - self.positions.unsqueeze(1)).flatten(0, 2)
        _, group, sizes = (steps / self.largest * 1e6).round().unique(dim=0, return_inverse=True, return_counts=True)
        self.group = group.view(len(self.positions), self.count, self.count).expand(self.batch, -1, -1)
        self.num_groups = len(sizes)
        self.shares_displacements = sizes[group].view_as(self.group[: len(self.positions)]) > 1  # several pairs each


class _Kernels:
    """K_ij of one layer, chunk by chunk of queries."""

    def __init__(self, operator: ITNetOperator, call: OperatorInput, domain: _Domain, part: str):
        self.heads = call.features.unflatten(-1, (operator.num_heads, -1))  # [B, n, H, d_h]
        self.weights: KernelWeights = operator.kernel(call.frequencies)
        self.domain = domain
        self.mean = 0
        if part == "centred":
            total = sum(k[domain.visible[:, rows]].sum(0) for rows, k in self.chunks())  # [H, d_h, d_h]
            self.mean = total / domain.visible.sum()

    def chunks(self, shift: Tensor | float = 0.0):
        """(rows, K [B, t, n, H, d_h, d_h] in float64), with all positions moved by ``shift``."""
        positions = self.domain.positions + shift
        batch, count, heads, size = self.heads.shape
        step = max(1, _CHUNK_ELEMENTS // (batch * count * heads * size**2))
        for start in range(0, count, step):
            rows = slice(start, start + step)
            matrices = kernel_matrices(self.heads[:, rows], self.heads, positions[:, rows], positions, self.weights)
            yield rows, matrices.double() - self.mean


def _layer_heads(layer: int, kernels: _Kernels, domain: _Domain, num_shifts: int, seed: int) -> list[HeadDiagnosis]:
    squares, convolution, content = _moments(kernels, domain)  # [B, n, n, H], [H], [H]
    invariance = _invariance(kernels, domain, num_shifts, seed)
    visible = domain.visible.unsqueeze(-1)
    squares = squares * visible
    total = squares.sum((0, 1, 2))
    lower = torch.ones(domain.count, domain.count, dtype=torch.bool, device=squares.device).tril(-1)
    past, future = (squares[:, mask].sum((0, 1)) for mask in (lower, lower.T))
    norms = squares.sqrt()
    weights = norms / norms.sum(2, keepdim=True).clamp(min=1e-300)
    entropy = -torch.special.xlogy(weights, weights).sum(2)  # [B, n, H]
    keys = domain.visible.sum(2).unsqueeze(-1)  # [B, n, 1]
    several = (keys > 1).expand_as(entropy)
    relative = (entropy / keys.clamp(min=2).log()).where(several, 0).sum((0, 1)) / several.sum((0, 1))
    profile = torch.stack(
        [squares[(domain.bins == k) & domain.visible].mean(0) for k in range(domain.num_bins)], -1
    )  # [H, bins]
    profile = (profile / squares[domain.visible].mean(0).unsqueeze(-1)).sqrt()
    locality = squares[domain.near].sum(0) / total
    balance = (past - future) / (past + future)
    figures = torch.stack([locality, convolution, invariance, content, balance, relative], -1).tolist()
    return [
        HeadDiagnosis(layer, head, *values, tuple(curve))
        for head, (values, curve) in enumerate(zip(figures, profile.tolist(), strict=True))
    ]


def _moments(kernels: _Kernels, domain: _Domain) -> tuple[Tensor, Tensor, Tensor]:
    """|K_ij|^2 [B, n, n, H]; the shares of the displacement [H] and of the content [H]."""
    squares, within = [], 0
    batch, _, heads, size = kernels.heads.shape
    sums = torch.zeros(domain.num_groups, heads, size, size, dtype=torch.float64, device=kernels.heads.device)
    sizes = torch.zeros(domain.num_groups, dtype=torch.float64, device=sums.device)
    energy = torch.zeros(domain.num_groups, heads, dtype=torch.float64, device=sums.device)
    used = domain.visible & domain.shares_displacements
    for rows, matrices in kernels.chunks():
        square = matrices.square().sum((-1, -2))  # [B, t, n, H]
        squares.append(square)
        chosen = used[:, rows]
        group = domain.group[:, rows][chosen]
        sums.index_add_(0, group, matrices[chosen])
        energy.index_add_(0, group, square[chosen])
        sizes.index_add_(0, group, torch.ones_like(group, dtype=torch.float64))
        if batch > 1 and domain.is_shared:
            every = domain.visible[:, rows].all(0)  # pairs that all samples have
            within = within + matrices.var(0).sum((-1, -2))[every].sum(0)  # [H]
    squares = torch.cat(squares, 1)

    # |E[K | x-y]|^2 from products of different pairs: (|sum|^2 - sum of squares) / (N (N - 1)), weighted by N.
    several = sizes > 1
    count = sizes[several].unsqueeze(-1)
    shared = ((sums[several].square().sum((-1, -2)) - energy[several]) / (count - 1)).sum(0)
    convolution = (shared / energy[several].sum(0)).clamp(0, 1)  # 0 / 0 = nan: no displacement occurs twice

    every = domain.visible.all(0)
    if batch > 1 and domain.is_shared:
        mean = sum(m[:, every[rows]].sum((0, 1)) for rows, m in kernels.chunks()) / (batch * every.sum())
        variance = squares[:, every].mean((0, 1)) - mean.square().sum((-1, -2))
        content = (within / every.sum() / variance).clamp(0, 1)
    else:
        content = torch.full_like(convolution, math.nan)
    return squares, convolution, content


def _invariance(kernels: _Kernels, domain: _Domain, num_shifts: int, seed: int) -> Tensor:
    """|K^TI|^2 / |K|^2 [H] with K^TI_ij the mean over shifts d of kappa(x_i + d, x_j + d, u_i, u_j).

    The shifts are those that leave both points inside of the box around the domain. The square of the mean comes from
    products of different shifts, as above.
    """
    real = domain.positions.expand(domain.batch, -1, -1)[domain.real]  # [all real positions, s]
    low, high = real.amin(0), real.amax(0)
    generator = torch.Generator().manual_seed(seed)
    shifts = (2 * torch.rand(num_shifts, len(low), generator=generator, dtype=torch.float64) - 1).to(low.device)
    shifts = torch.cat([torch.zeros_like(shifts[:1]), shifts * (high - low)])
    slack = 1e-9 * domain.largest
    inside = [
        ((domain.positions + shift >= low - slack) & (domain.positions + shift <= high + slack)).all(-1)
        for shift in shifts
    ]  # [B or 1, n] each
    top = bottom = 0
    for chunks in zip(*(kernels.chunks(shift) for shift in shifts), strict=True):
        rows = chunks[0][0]
        total = energy = count = 0
        for (_, matrices), points in zip(chunks, inside, strict=True):
            both = (points[:, rows].unsqueeze(2) & points.unsqueeze(1)) & domain.visible[:, rows]  # [B, t, n]
            total = total + matrices * both[..., None, None, None]
            energy = energy + matrices.square().sum((-1, -2)) * both.unsqueeze(-1)
            count = count + both.double()
        usable = count > 1
        count = count[usable].unsqueeze(-1)
        top = top + ((total.square().sum((-1, -2)) - energy)[usable] / (count * (count - 1))).sum(0)
        bottom = bottom + (energy[usable] / count).sum(0)
    return (top / bottom).clamp(0, 1)


__all__ = ["HeadDiagnosis", "KernelDiagnosis", "diagnose_kernels"]
