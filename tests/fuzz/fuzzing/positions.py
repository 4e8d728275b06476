"""Sets of points that are hard to tell apart: lattices and what is almost one."""

import torch
from torch import Tensor

from .case import Draw


def draw_positions(draw: Draw, count: int, dim: int) -> Tensor:
    """[n, s] in float64, of extent about 1: a lattice, complete or not, shuffled, perturbed, stretched, far away."""
    kind = draw.choice("points", ("lattice", "lattice", "some of a lattice", "random", "duplicates"))
    if kind in ("random", "duplicates"):
        points = draw.uniform(count, dim)
    else:
        points = _lattice(draw, count, dim, holes=kind != "lattice")
    if kind == "duplicates":
        points = points[draw.integers(0, max(1, count // 2), count)]
    if draw.chance("near-lattice", 0.25):
        points = points + draw.power("perturbation", -9, -2) * draw.normal(count, dim)
    if draw.chance("shuffled", 0.4):
        points = points[draw.permutation(count)]
    if draw.chance("anisotropic", 0.25):
        points = points * 10 ** (6 * draw.uniform(dim) - 3)
    if draw.chance("offset", 0.4):
        points = points + draw.power("offset size", 0, 6) * draw.normal(dim)
    if draw.chance("constant axis", 0.25):
        points = points.clone()
        points[:, draw.integer("axis", 0, dim - 1)] = draw.power("height", -3, 6)
    return points


def _lattice(draw: Draw, count: int, dim: int, holes: bool) -> Tensor:
    """The first or any ``count`` nodes of a grid that is about as long on every axis."""
    side = 1
    while side**dim < count * (2 if holes else 1):
        side += 1
    sizes = [side] * dim
    grid = torch.cartesian_prod(*(torch.arange(size, dtype=torch.float64) for size in sizes)).view(-1, dim)
    chosen = draw.permutation(len(grid))[:count].sort().values if holes else torch.arange(count)
    step = draw.choice("step", (1 / 64, 1 / 196, 1 / 7, 0.25, 0.1, 1 / 3))
    return grid[chosen] * step
