# SPDX-License-Identifier: Apache-2.0
"""Points and masses that stand for a continuous domain: grids and Gauss-Legendre rules."""

import numpy as np
import torch
from torch import Tensor


def grid(*axes: Tensor) -> Tensor:
    """Positions of a grid in row-major order: coordinates along each axis -> [n, s]."""
    return torch.cartesian_prod(*axes).view(-1, len(axes))


def gauss_legendre(nodes: int, start: float = 0.0, stop: float = 1.0, segments: int = 1) -> tuple[Tensor, Tensor]:
    """Points [n] of [start, stop] and their masses [n], ``nodes`` in each of equal segments; float64."""
    roots, weights = (torch.from_numpy(array) for array in np.polynomial.legendre.leggauss(nodes))
    width = (stop - start) / segments
    points = start + (torch.arange(segments, dtype=torch.float64).unsqueeze(1) + (roots + 1) / 2) * width
    return points.flatten(), (weights * width / 2).repeat(segments)
