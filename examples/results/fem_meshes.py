"""Darcy flow on randomly deformed meshes, solved with scikit-fem: every sample has its own domain, mesh and data.

    −div(a ∇u) = f in Ω,   u = 0 on its boundary

Ω is the unit square under a random smooth map. Its mesh has side² nodes: a lattice whose points are moved at random,
then along each axis by a grading t -> t + α t (1 − t), then by the map; Delaunay's triangles connect them. log a and f
are random sums of waves of x, so that they do not depend on the mesh. Solutions are those of quadratic elements, at
the nodes. Quadrature weights are exact for linear elements: ω_i = ∫ φ_i. Where |α| is large, nodes crowd in a corner:
their density there is (1 + |α|)² / (1 − |α|)² times that in the opposite one.

They need scikit-fem: pip install scikit-fem, or this package with its extra `fem`.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from mesh_data import Samples, boundary_features, node_measure, tensors
from scipy.spatial import Delaunay

GRADED, STRONGLY = (0.0, 0.3), (0.6, 0.8)  # ranges of |α| as trained, and shifted


@dataclass(frozen=True)
class Waves:
    """Σ_k c_k cos(2π w_k·x + φ_k), a random smooth function of the plane of mean square about ``size``²."""

    numbers: np.ndarray  # w [K, 2]
    phases: np.ndarray  # [K]
    amplitudes: np.ndarray  # [K]

    @classmethod
    def draw(cls, generator: np.random.Generator, size: float, highest: float, count: int = 8) -> "Waves":
        numbers = generator.uniform(-highest, highest, (count, 2))
        phases = generator.uniform(0, 2 * np.pi, count)
        return cls(numbers, phases, size * np.sqrt(2 / count) * generator.standard_normal(count))

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """x [2, ...] -> [...]."""
        angles = 2 * np.pi * np.tensordot(self.numbers, x, 1) + self.phases.reshape(-1, *[1] * (x.ndim - 1))
        return np.tensordot(self.amplitudes, np.cos(angles), 1)


def draw_mesh(
    side: int, grading: tuple[float, float], generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Nodes [side², 2] and triangles [T, 3] of a deformed square."""
    axis = np.linspace(0, 1, side)
    moved = (generator.random((2, side, side)) - 0.5) * 0.5 / (side - 1)
    first, second = np.meshgrid(axis, axis, indexing="ij")
    moved[0, [0, -1]] = 0  # nodes of an edge stay on it
    moved[1, :, [0, -1]] = 0
    lattice = np.stack([first + moved[0], second + moved[1]]).reshape(2, -1)
    alpha = generator.uniform(*grading, 2) * generator.choice([-1, 1], 2)
    lattice = lattice + alpha[:, None] * lattice * (1 - lattice)
    triangles = Delaunay(lattice.T).simplices
    corners = lattice.T[triangles]
    triangles = triangles[_areas(corners) > 1e-9]  # Delaunay may report flat ones along an edge
    bends = [Waves.draw(generator, 0.04, 1.0) for _ in range(2)]
    nodes = (0.8 * (lattice - 0.5) + 0.5 + np.stack([bend(lattice) for bend in bends])).T
    return nodes, triangles


def _areas(corners: np.ndarray) -> np.ndarray:
    """Signed areas of triangles [T, 3, 2]."""
    (a, b), (c, d) = (corners[:, 1] - corners[:, 0]).T, (corners[:, 2] - corners[:, 0]).T
    return (a * d - b * c) / 2


def solve_darcy(nodes: np.ndarray, triangles: np.ndarray, permeability, source) -> np.ndarray:
    """u at the nodes; ``permeability`` a and ``source`` f are functions of x [2, ...]."""
    from skfem import Basis, BilinearForm, ElementTriP2, LinearForm, MeshTri, asm, condense, solve
    from skfem.helpers import dot, grad

    mesh = MeshTri(np.ascontiguousarray(nodes.T), np.ascontiguousarray(triangles.T))
    basis = Basis(mesh, ElementTriP2())
    stiffness = asm(BilinearForm(lambda u, v, w: permeability(w.x) * dot(grad(u), grad(v))), basis)
    load = asm(LinearForm(lambda v, w: source(w.x) * v), basis)
    solution = solve(*condense(stiffness, load, D=basis.get_dofs()))
    return solution[basis.nodal_dofs[0]]


def draw_sample(side: int, grading: tuple[float, float], generator: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Inputs [n, 4] (log a, f, boundary, distance to it), nodes, weights and solution of one problem."""
    while True:
        nodes, triangles = draw_mesh(side, grading, generator)
        signs = _areas(nodes[triangles])
        is_whole = (signs > 0).all() or (signs < 0).all()  # the map did not fold the square
        if is_whole and nodes.min() >= 0 and nodes.max() <= 1:
            break
    logarithm, source = Waves.draw(generator, 0.5, 1.5), Waves.draw(generator, 1.0, 1.5)
    solution = solve_darcy(nodes, triangles, lambda x: np.exp(logarithm(x)), source)
    values = np.concatenate(
        [np.stack([logarithm(nodes.T), source(nodes.T)], axis=1), boundary_features(nodes, triangles)], axis=1
    )
    return values, nodes, node_measure(nodes, triangles), solution[:, None]


@lru_cache(maxsize=8)
def draw_samples(count: int, side: int, grading: tuple[float, float], seed: int, unit: float = 1.0) -> Samples:
    """``count`` problems; their solutions are divided by ``unit``."""
    generator = np.random.default_rng(seed)
    samples = [draw_sample(side, grading, generator) for _ in range(count)]
    values, nodes, measure, labels = map(np.stack, zip(*samples, strict=True))
    return tensors(values, nodes, measure, labels / unit)


@lru_cache(maxsize=2)
def deformed_darcy(train: int, held_out: int, side: int) -> dict[str, Samples]:
    """Samples to train, validate and test on: as trained, at four times as many nodes, and with shifted densities."""
    unit = draw_samples(64, side, GRADED, 0).labels.square().mean().sqrt().item()
    return {
        "train": draw_samples(train, side, GRADED, 1, unit),
        "validation": draw_samples(held_out, side, GRADED, 2, unit),
        "as trained": draw_samples(held_out, side, GRADED, 3, unit),
        "4 × finer": draw_samples(held_out // 2, 2 * side, GRADED, 4, unit),
        "shifted density": draw_samples(held_out, side, STRONGLY, 5, unit),
        "4 × finer, shifted": draw_samples(held_out // 2, 2 * side, STRONGLY, 6, unit),
    }
