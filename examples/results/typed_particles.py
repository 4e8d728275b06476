"""Typed particles: forces whose law depends on the types of both ends and on their distance, at short range.

n particles lie uniformly in the unit square, each of one of T types. The force on particle i is

    f_i = 1/n Σ_j g(t_i, t_j, |x_i − x_j|) (x_i − x_j),    g(a, b, r) = exp(−(r/ρ)²) Σ_k c_abk cos(πkr / 2ρ)

with c_abk drawn once for every ordered pair of types and k = 0..K−1, from N(0, 1), and from N(1, 1) for k = 0. So g is
joint in query, key and distance: no sum of few products of a function of (x_i, t_i) and one of (x_j, t_j) holds it.
The mean over particles is an integral against their measure, so that a model may be asked at another n.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F


def seeded(*numbers: int) -> torch.Generator:
    """A generator whose draws follow from all of these numbers, each 0 or more."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]))


@dataclass(frozen=True)
class ForceLaw:
    """The coefficients c [T, T, K] of the radial profiles, and their range ρ: at 2ρ the envelope is down to 2 %."""

    coefficients: Tensor
    scale: float

    @classmethod
    def draw(cls, num_types: int = 4, num_waves: int = 2, scale: float = 0.15, seed: int = 0) -> "ForceLaw":
        shape = num_types, num_types, num_waves
        coefficients = torch.randn(shape, generator=seeded(seed), dtype=torch.float64)
        coefficients[..., 0] += 1
        return cls(coefficients, scale)

    @property
    def num_types(self) -> int:
        return self.coefficients.shape[0]

    def profile(self, queries: Tensor, keys: Tensor, distance: Tensor) -> Tensor:
        """g of types t_i and t_j and of distances, in shapes that broadcast."""
        waves = torch.arange(self.coefficients.shape[-1], dtype=distance.dtype)
        basis = torch.cos(distance.unsqueeze(-1) * waves * (math.pi / 2 / self.scale))  # [..., K]
        amplitude = (self.coefficients.to(distance.dtype)[queries, keys] * basis).sum(-1)
        return torch.exp(-((distance / self.scale) ** 2)) * amplitude

    def forces(self, positions: Tensor, types: Tensor) -> Tensor:
        """f [..., n, s] of positions [..., n, s] and types [..., n]."""
        offsets = positions.unsqueeze(-2) - positions.unsqueeze(-3)  # x_i − x_j: [..., n, n, s]
        strength = self.profile(types.unsqueeze(-1), types.unsqueeze(-2), offsets.norm(dim=-1))  # [..., n, n]
        return (strength.unsqueeze(-1) * offsets).mean(-2)


@dataclass(frozen=True)
class TypedParticles:
    """Batches of particles under a law, their forces divided by ``unit``. A batch follows from its seeds alone."""

    law: ForceLaw
    unit: float = 1.0

    @classmethod
    def normalised(cls, law: ForceLaw, num_particles: int, num_samples: int = 256) -> "TypedParticles":
        """With the root mean square of the forces' components at ``num_particles`` as the unit."""
        labels = cls(law).batch(num_samples, num_particles, seeded(0))["labels"]
        return cls(law, labels.square().mean().sqrt().item())

    def batch(self, num_samples: int, num_particles: int, generator: torch.Generator) -> dict[str, Tensor]:
        """signal_values [B, n, T], the types one-hot; positions [B, n, 2]; labels [B, n, 2], the forces."""
        positions = torch.rand(num_samples, num_particles, 2, generator=generator)
        types = torch.randint(self.law.num_types, (num_samples, num_particles), generator=generator)
        return {
            "signal_values": F.one_hot(types, self.law.num_types).float(),
            "positions": positions,
            "labels": self.law.forces(positions, types) / self.unit,
        }
