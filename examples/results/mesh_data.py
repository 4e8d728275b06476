"""Fields on irregular meshes: samples with positions, quadrature weights, inputs and outputs, and how they are read.

Files are those of `python examples/data/download.py meshes`: holed_poisson.npz, flow_past_shapes.npz and
linear_elastic.npz. Inputs of all models are the same: what the problem gives (a load, a source), whether a node lies
on a boundary, and how far it is from it. Positions lie in the unit square.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from scipy.sparse.csgraph import connected_components
from scipy.spatial import Delaunay
from scipy.spatial.distance import directed_hausdorff
from torch import Tensor

SPLIT_SEED = 0  # of the rows that train, validate and test


@dataclass(frozen=True)
class Samples:
    """N samples of n nodes each."""

    values: Tensor  # [N, n, c]
    positions: Tensor  # [N, n, 2]
    measure: Tensor  # quadrature weights [N, n]; each row sums to 1
    labels: Tensor  # [N, n, k]

    def __len__(self) -> int:
        return len(self.values)

    def rows(self, index) -> "Samples":
        return Samples(*(part[index] for part in (self.values, self.positions, self.measure, self.labels)))

    def nodes(self, index: Tensor) -> "Samples":
        """Only the nodes index [N, m] of each sample, which then have the measure among themselves."""
        parts = [
            torch.take_along_dim(part, index.view(*index.shape, *[1] * (part.dim() - 2)), dim=1)
            for part in (self.values, self.positions, self.measure, self.labels)
        ]
        parts[2] = parts[2] / parts[2].sum(1, keepdim=True)
        return Samples(*parts)

    def turned(self, matrices: Tensor, vector: slice | None) -> "Samples":
        """Every sample turned about the middle of the square by an orthogonal matrix, [N, 2, 2].

        ``vector`` names the components of labels that are a vector of the plane, and turn with it.
        """
        positions = (self.positions - 0.5) @ matrices.transpose(1, 2) + 0.5
        labels = self.labels
        if vector is not None:
            labels = labels.clone()
            labels[..., vector] = labels[..., vector] @ matrices.transpose(1, 2)
        return Samples(self.values, positions, self.measure, labels)

    def batch(self) -> dict[str, Tensor]:
        names = "signal_values", "positions", "measure", "labels"
        return dict(zip(names, (self.values, self.positions, self.measure, self.labels), strict=True))


def tensors(values: np.ndarray, positions: np.ndarray, measure: np.ndarray, labels: np.ndarray) -> Samples:
    measure = measure / measure.sum(1, keepdims=True)
    parts = values, positions, measure, labels
    return Samples(*(torch.from_numpy(np.ascontiguousarray(part, np.float32)) for part in parts))


def split(samples: Samples, train: int, validation: int, groups: np.ndarray | None = None) -> dict[str, Samples]:
    """Rows in an order that a seed decides: so many to train on, so many for validation, the rest for the test.

    Rows of one of ``groups`` [N] stay together, so that the first two parts may have some more. Labels are divided by
    the root mean square of each component over the rows that train.
    """
    groups = np.arange(len(samples)) if groups is None else groups
    order = np.random.default_rng(SPLIT_SEED).permutation(np.unique(groups))
    rows = [np.flatnonzero(groups == group) for group in order]
    ends = np.cumsum([len(part) for part in rows])
    first = int(np.searchsorted(ends, train)) + 1
    second = int(np.searchsorted(ends, ends[first - 1] + validation)) + 1
    parts = [torch.from_numpy(np.concatenate(part)) for part in (rows[:first], rows[first:second], rows[second:])]
    unit = samples.labels[parts[0]].square().mean((0, 1)).sqrt()
    samples = Samples(samples.values, samples.positions, samples.measure, samples.labels / unit)
    return {name: samples.rows(part) for name, part in zip(("train", "validation", "test"), parts, strict=True)}


@lru_cache(maxsize=4)
def read_split(
    read: Callable[[Path], Samples],
    folder: Path,
    train: int,
    validation: int,
    groups: Callable[[Path], np.ndarray] | None = None,
) -> dict[str, Samples]:
    return split(read(folder), train, validation, None if groups is None else groups(folder))


def node_measure(positions: np.ndarray, triangles: np.ndarray) -> np.ndarray:
    """A third of the areas of the triangles around each node, ∫ φ_i of linear elements: [n, 2], [T, 3] -> [n]."""
    a, b, c = (positions[triangles[:, k]] for k in range(3))
    (x, y), (z, w) = (b - a).T, (c - a).T
    area = np.abs(x * w - y * z) / 2
    return np.bincount(triangles.ravel(), np.repeat(area / 3, 3), minlength=len(positions))


def boundary_edges(triangles: np.ndarray) -> np.ndarray:
    """Edges of exactly one triangle: [E, 2]."""
    ends = np.sort(np.concatenate([triangles[:, [0, 1]], triangles[:, [1, 2]], triangles[:, [2, 0]]]), axis=1)
    counts = Counter(map(tuple, ends.tolist()))
    return np.array([edge for edge, count in counts.items() if count == 1])


def distance_to_edges(positions: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """From every node to the nearest of the segments between the nodes of edges [E, 2]: [n]."""
    start, end = positions[edges[:, 0]], positions[edges[:, 1]]
    along = end - start  # [E, 2]
    offsets = positions[:, None] - start  # [n, E, 2]
    part = (offsets * along).sum(-1) / np.maximum((along**2).sum(-1), 1e-30)
    nearest = offsets - np.clip(part, 0, 1)[..., None] * along
    return np.sqrt((nearest**2).sum(-1)).min(1)


def boundary_features(positions: np.ndarray, triangles: np.ndarray) -> np.ndarray:
    """Whether a node lies on the boundary, and its distance to the boundary: [n, 2]."""
    edges = boundary_edges(triangles)
    on_boundary = np.zeros(len(positions))
    on_boundary[np.unique(edges)] = 1
    return np.stack([on_boundary, distance_to_edges(positions, edges)], axis=1)


def _read(folder: Path, name: str) -> dict[str, np.ndarray]:
    path = folder / f"{name}.npz"
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}: python examples/data/download.py meshes")
    with np.load(path) as data:
        return {key: data[key].astype(np.float64) if data[key].dtype.kind == "f" else data[key] for key in data}


def holed_poisson(folder: Path) -> Samples:
    """Poisson's equation on a square with a square hole that moves; 0 on all boundaries. Inputs: the boundary."""
    data = _read(folder, "holed_poisson")
    positions, triangles = data["positions"], data["triangles"]
    measure = np.stack([node_measure(x, triangles) for x in positions])
    values = np.stack([boundary_features(x, triangles) for x in positions])
    return tensors(values, positions, measure, data["u"][..., None])


def holes_alike(folder: Path) -> np.ndarray:
    """A number for every geometry, the same for those that a motion of the square maps onto each other: [121].

    Models are trained on images under these motions: no image of a test geometry may be among the others.
    """
    corners = _read(folder, "holed_poisson")["mu"]
    offsets = np.abs(corners - (corners.min(0) + corners.max(0)) / 2)  # of the hole from the middle
    return np.unique(np.sort(offsets, axis=1).round(3), axis=0, return_inverse=True)[1].reshape(-1)


def flow_past_shapes(folder: Path) -> Samples:
    """Steady flow past a body, from the left: pressure and velocity (p, u, v). Inputs: the body and how far it is.

    Nodes of the body are those without velocity. Triangles are Delaunay's, without those between nodes of the body.
    """
    data = _read(folder, "flow_past_shapes")
    positions = data["positions"]
    low, high = positions.min((0, 1)), positions.max((0, 1))
    positions = (positions - (low + high) / 2) / (high - low).max() + 0.5  # the same scale along both axes
    labels = np.stack([data["p"], data["u"], data["v"]], axis=-1)
    body = (labels[..., 1:] == 0).all(-1)
    measure, values = [], []
    for x, inside in zip(positions, body, strict=True):
        triangles = Delaunay(x).simplices
        measure.append(node_measure(x, triangles[~inside[triangles].all(1)]))
        distance = np.linalg.norm(x[:, None] - x[inside], axis=-1).min(1)
        values.append(np.stack([inside, distance], axis=1))
    return tensors(np.stack(values), positions, np.stack(measure), labels)


def bodies_alike(folder: Path) -> np.ndarray:
    """A number for every body, the same for one and the body that is nearest to its mirror image, upside down: [75].

    Nearest by the largest distance of a node from those of the other, if that is below 0.015 of the width of bodies.
    Models are trained on mirror images: that of a test body should not be among them.
    """
    data = _read(folder, "flow_past_shapes")
    bodies = [x[(u == 0) & (v == 0)] for x, u, v in zip(data["positions"], data["u"], data["v"], strict=True)]
    nodes = np.concatenate(bodies)
    low, high = nodes.min(0), nodes.max(0)
    mirrored = [np.stack([x[:, 0], low[1] + high[1] - x[:, 1]], axis=1) for x in bodies]
    limit = 0.015 * (high - low).max()
    distances = np.array([[hausdorff_distance(a, b) for b in bodies] for a in mirrored])
    nearest = distances == distances.min(1, keepdims=True)
    return connected_components(nearest & (distances < limit), directed=False)[1]


def hausdorff_distance(first: np.ndarray, second: np.ndarray) -> float:
    """The largest distance of a point of either set from the other set: [n, 2], [m, 2] -> a number."""
    return max(directed_hausdorff(first, second)[0], directed_hausdorff(second, first)[0])


def linear_elastic(folder: Path) -> Samples:
    """Displacements of a plate with a round hole under a load along an edge.

    Inputs: the load at the x and at the y of a node, and the boundary. Triangles are Delaunay's, without the hole's.
    """
    data = _read(folder, "linear_elastic")
    positions, load = data["positions"], data["load"]
    on_hole = np.abs(np.linalg.norm(positions - 0.5, axis=1) - 0.25) < 1e-3
    triangles = Delaunay(positions).simplices
    triangles = triangles[~on_hole[triangles].all(1)]
    axis = np.linspace(0, 1, load.shape[1])
    loads = np.stack([[np.interp(x, axis, row) for x in positions.T] for row in load]).transpose(0, 2, 1)  # [N, n, 2]
    shared = np.broadcast_to(boundary_features(positions, triangles), loads.shape)
    places = np.broadcast_to(positions, (len(load), *positions.shape))
    measure = np.broadcast_to(node_measure(positions, triangles), places.shape[:2])
    return tensors(np.concatenate([loads, shared], -1), places, measure, np.stack([data["ux"], data["uy"]], -1))
