"""Irregular meshes under the protocol of evidence.py: three sets of others, and Darcy flow on generated meshes.

- `darcy-meshes` (fem_meshes.py): trained on 256 nodes, judged there, at 1,024 nodes and with shifted densities.
- `holed-poisson`: 121 geometries; trained on 256 random nodes of each, judged on 256 and on all 1,352.
- `flow-past-shapes`: 75 bodies; trained on 256 random nodes, judged on 256 and on all 1,024.
- `linear-elastic`: 100 loads; the map from loads to displacements is linear, and so is the best model of it: ridge
  regression is among the baselines. It is here to say so, and is only run if it is named.

Every symmetry of a problem is an augmentation of all models: Darcy's and Poisson's equations do not change under the
eight motions of the square, the flow does not under a reflection. Geometries that such a motion maps onto each other
are in the same part of the data. Inputs and Fourier features are the same for all.
Every model has two rows: with the measure, which makes its sums integrals, and, of the same search, without it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import examples_path  # noqa: F401
import numpy as np
import torch
from common.peers import (
    PointwiseMLP,
    SignalFNO,
    SignalGNO,
    SignalLinearAttention,
    SignalPointNet,
    SignalTransformer,
    Transolver,
)
from fem_meshes import deformed_darcy
from field_models import OfFields, PointwiseITNet, weighted_errors
from mesh_data import Samples, bodies_alike, flow_past_shapes, holed_poisson, holes_alike, linear_elastic, read_split
from mode_problems import NO_DROPOUT, TRAIN
from particle_problems import ALL_INPUTS, RELATIVE_INPUTS
from protocol import DECAY, SCALE, Rival, Searched
from torch import Tensor, nn
from trials import Batch
from typed_particles import seeded

MOTIONS = torch.tensor(  # of the square: four turns, and each after a reflection
    [[[a, 0], [0, b]] for a in (1, -1) for b in (1, -1)] + [[[0, a], [b, 0]] for a in (1, -1) for b in (1, -1)],
    dtype=torch.float32,
)
UP_DOWN = torch.tensor([[[1, 0], [0, 1]], [[1, 0], [0, -1]]], dtype=torch.float32)
STILL = torch.eye(2).unsqueeze(0)
PAIRS = 256 * 256 * 8  # at most so many pairs of nodes in a batch of validation or test


@dataclass(frozen=True)
class Meshes(Searched):
    """Fields on meshes. Errors are relative, in the norm of L²(μ)."""

    load: Callable[[], dict[str, Samples]] = dict  # "train", "validation" and, by name, tests
    num_nodes: int | None = None  # random nodes of every training sample; default: all
    motions: Tensor = None  # symmetries [M, 2, 2] of the problem
    vector: slice | None = None  # components of labels that turn with them

    def batch(self, seed: int, step: int) -> Batch:
        """Random rows, each moved by a random symmetry, on random nodes."""
        generator, train = seeded(TRAIN, seed, step), self.load()["train"]
        samples = train.rows(torch.randint(len(train), (self.batch_size,), generator=generator))
        moved = self.motions[torch.randint(len(self.motions), (self.batch_size,), generator=generator)]
        return drawn(samples, self.num_nodes, generator).turned(moved, self.vector).batch()

    def validation(self) -> Iterator[Batch]:
        return batches(self._few(self.load()["validation"]))

    def tests(self) -> dict[str, Iterator[Batch]]:
        return {name: batches(samples) for name, samples in self.tested_samples().items()}

    def tested_samples(self) -> dict[str, Samples]:
        """The tests of the data; if models train on random nodes, the first of them on as many, and on all."""
        tests = {name: part for name, part in self.load().items() if name not in ("train", "validation")}
        if self.num_nodes is None:
            return tests
        name, samples = next(iter(tests.items()))
        few = {f"{name}, n = {self.num_nodes}": self._few(samples)}
        return few | {f"{name}, n = {part.values.shape[1]:,}": part for name, part in tests.items()}

    def _few(self, samples: Samples) -> Samples:
        """The same random nodes each time."""
        return drawn(samples, self.num_nodes, seeded(len(samples)))

    @staticmethod
    def errors(model: nn.Module, batches: Iterator[Batch]) -> Tensor:
        found = []
        for batch in batches:
            inputs = {name: values for name, values in batch.items() if name != "labels"}
            found.append(weighted_errors(model(**inputs).predictions, batch["labels"], batch["measure"]))
        return torch.cat(found)

    def trivial(self) -> dict[str, dict[str, Tensor]]:
        """The mean field; the field of the nearest training sample; both looked up at the nearest node of it.

        Samples are nearest by their inputs, averaged in the cells of a grid of 8 × 8. Where nodes are the same in all
        samples, there is also ridge regression from inputs to fields, on all nodes.
        """
        train = self.load()["train"]
        found: dict[str, dict[str, Tensor]] = {"mean of all nodes": {}, "nearest training sample": {}}
        described = torch.stack([_described(train.rows(i)) for i in range(len(train))])
        mean = (train.measure.unsqueeze(-1) * train.labels).sum(1).mean(0)
        for name, samples in self.tested_samples().items():
            constant = mean.expand_as(samples.labels)
            found["mean of all nodes"][name] = weighted_errors(constant, samples.labels, samples.measure)
            fields = []
            for row in range(len(samples)):
                sample = samples.rows(row)
                nearest = train.rows((described - _described(sample)).square().sum(1).argmin().item())
                fields.append(nearest.labels[torch.cdist(sample.positions, nearest.positions).argmin(1)])
            nearest_fields = torch.stack(fields)
            found["nearest training sample"][name] = weighted_errors(nearest_fields, samples.labels, samples.measure)
        if (train.positions == train.positions[:1]).all():
            found["ridge regression"] = self._ridge(train)
        return found

    def _ridge(self, train: Samples) -> dict[str, Tensor]:
        """The penalty is chosen on validation rows, among powers of ten."""
        validation = self.load()["validation"]
        penalties = [10.0**k for k in range(-10, 1)]
        scores = [_regressed(train, validation, penalty).mean().item() for penalty in penalties]
        best = penalties[int(np.argmin(scores))]
        shape = train.values.shape[1:]
        tests = {name: part for name, part in self.tested_samples().items() if part.values.shape[1:] == shape}
        return {name: _regressed(train, samples, best) for name, samples in tests.items()}


def drawn(samples: Samples, count: int | None, generator: torch.Generator) -> Samples:
    """``count`` random nodes of every sample, none twice; all if it is None."""
    if count is None:
        return samples
    order = torch.rand(samples.measure.shape, generator=generator).argsort(1)
    return samples.nodes(order[:, :count])


def batches(samples: Samples) -> Iterator[Batch]:
    size = max(1, PAIRS // samples.values.shape[1] ** 2)
    for first in range(0, len(samples), size):
        yield samples.rows(slice(first, first + size)).batch()


def _described(sample: Samples, cells: int = 8) -> Tensor:
    """Inputs of one sample, and the measure, averaged in cells of the square."""
    place = (sample.positions.clamp(0, 1 - 1e-6) * cells).long()
    cell = place[:, 0] * cells + place[:, 1]
    weighted = sample.measure.unsqueeze(-1) * sample.values
    mass = torch.zeros(cells**2).index_add(0, cell, sample.measure)
    total = torch.zeros(cells**2, weighted.shape[1]).index_add(0, cell, weighted)
    means = total / mass.clamp_min(1e-9).unsqueeze(-1)
    return torch.cat([means.flatten(), cells**2 * mass])


def _regressed(train: Samples, samples: Samples, penalty: float) -> Tensor:
    """Errors of ridge regression from all inputs to all outputs, in the form with as many unknowns as rows."""
    inputs, outputs = train.values.flatten(1).double(), train.labels.flatten(1).double()
    middle, mean = inputs.mean(0), outputs.mean(0)
    centred = inputs - middle
    gram = centred @ centred.T
    gram += penalty * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
    weights = torch.linalg.solve(gram, outputs - mean)
    fields = (samples.values.flatten(1).double() - middle) @ centred.T @ weights + mean
    return weighted_errors(fields.view_as(samples.labels), samples.labels.double(), samples.measure.double())


SETTINGS = {
    "modality": "signal",
    "position_dim": 2,
    "signal_loss": "relative_l2",
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "num_fourier_features": 16,
    "fourier_scale": 1.0,
    "kernel_hidden_size": 16,
    "kernel_init_scale": 1.0,
    "initializer_range": 0.1,
    "near_radius": 0.15,
    "rank": 8,
    "factor_hidden_size": 16,
    **NO_DROPOUT,
}
KNOBS = {SCALE: (1.0, 0.5, 2.0), DECAY: (1e-4, 1e-2), "fourier_scale": (1.0, 0.5)}
FNO = partial(SignalFNO, modes=4)
NARROW = {"integration_mode": "exact", "kernel_hidden_size": 8}


def _peer(label: str, build, settings: dict | None = None, **knobs: tuple) -> Rival:
    return Rival(label, OfFields(build), settings or {}, knobs)


def _itnet(label: str, settings: dict, **knobs: tuple) -> Rival:
    """With all inputs of the kernel or relative ones; low rank has none, and the form of its factors instead."""
    has_kernel = settings["integration_mode"] != "low_rank"
    first = {"kernel_inputs": (ALL_INPUTS, RELATIVE_INPUTS)} if has_kernel else {"factor_form": ("vector", "matrix")}
    knobs = {**first, **knobs}
    return Rival(label, OfFields(PointwiseITNet), settings, knobs, is_itnet=True)


NEAR_FAR = {"integration_mode": "near_far", "kernel_hidden_size": 8, "factor_form": "matrix", "rank": 4}
DEPTHS = (3, 4, 2)  # numbers of layers that a search tries
RADII = (0.15, 0.1, 0.25)  # radii of neighbourhoods, the same for ITNet and GNO
WITH_MEASURE = {
    "exact": _itnet("ITNet, exact", NARROW, kernel_init_scale=(1.0, 0.3, 0.1)),
    "near_far": _itnet("ITNet, near and far", NEAR_FAR, near_radius=RADII),
    "low_rank": _itnet("ITNet, low rank", {"integration_mode": "low_rank"}, rank=(8, 16, 4)),
    "gno": _peer("GNO", SignalGNO, near_radius=RADII, kernel_hidden_size=(32, 64)),
    "transolver": _peer("Transolver", Transolver, rank=(32, 64, 16), num_attention_heads=(4, 8)),
    "linear_attention": _peer(
        "linear attention (GNOT)", SignalLinearAttention, num_attention_heads=(4, 8), num_hidden_layers=DEPTHS
    ),
    "transformer": _peer("softmax attention", SignalTransformer, num_attention_heads=(4, 8), num_hidden_layers=DEPTHS),
    "point_net": _peer("PointNet", SignalPointNet, num_fourier_features=(16, 32), num_hidden_layers=DEPTHS),
    "fno": _peer("FNO on a grid of 32 × 32", FNO, num_fourier_features=(16, 32), num_hidden_layers=DEPTHS),
    "mlp": _peer("MLP of each node alone", PointwiseMLP, num_fourier_features=(16, 32), num_hidden_layers=DEPTHS),
}
BLIND = ("mlp",)  # models to which a measure is nothing


def without_measure(name: str, rival: Rival) -> Rival:
    build = OfFields(rival.build.build, sees_measure=False)
    return Rival(f"{rival.label}, without the measure", build, {}, {}, rival.is_itnet, tuned_as=name)


RIVALS = WITH_MEASURE | {
    f"{name}-uniform": without_measure(name, rival) for name, rival in WITH_MEASURE.items() if name not in BLIND
}


def problems(data: Path) -> dict[str, Meshes]:
    """By name. ``data`` is the folder of the data sets."""
    folder = data / "meshes"

    def meshes(name: str, title: str, inputs: int, outputs: int, **own) -> Meshes:
        settings = {
            "steps": 600,
            "tuning_steps": 150,
            "batch_size": 4,
            "weight_decay": 1e-4,
            "rates": (1e-3, 3e-3, 1e-2),
            "parameters": 60_000,
            "knobs": KNOBS,
            "clock": "near_far",
            "curve": 4,
            "shared": {**SETTINGS, "signal_feature_size": inputs, "num_labels": outputs},
            "contestants": RIVALS,
            **own,
        }
        return Meshes(name, title, "relative L2 error", is_error=True, **settings)

    found = (
        meshes(
            "darcy-meshes",
            "Darcy flow on deformed meshes, trained on 256 nodes",
            4,
            1,
            load=partial(deformed_darcy, 1000, 64, 16),
            motions=MOTIONS,
            steps=1000,
            tuning_steps=250,
        ),
        meshes(
            "holed-poisson",
            "Poisson's equation on a square with a hole",
            2,
            1,
            load=partial(read_split, holed_poisson, folder, 70, 20, holes_alike),
            num_nodes=256,
            motions=MOTIONS,
        ),
        meshes(
            "flow-past-shapes",
            "Flow past shapes",
            2,
            3,
            load=partial(read_split, flow_past_shapes, folder, 45, 10, bodies_alike),
            num_nodes=256,
            motions=UP_DOWN,
            vector=slice(1, 3),
        ),
        meshes(
            "linear-elastic",
            "Elastic plate under a load",
            4,
            2,
            load=partial(read_split, linear_elastic, folder, 60, 15),
            num_nodes=256,
            motions=STILL,
            on_request=True,
        ),
    )
    return {problem.name: problem for problem in found}
