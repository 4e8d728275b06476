# Copyright 2026 The ITNet Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
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
