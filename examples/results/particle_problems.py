"""Typed particles under the protocol of evidence.py: forces of pairs, trained at n = 32, judged at n = 16 to 128.

The law depends on differences of positions alone, which all models may know: the interaction network, EGNN and ITNet
start from types and see positions in pairs only. Every model has about 24,000 parameters. The force on a particle is
one sum over pairs, for which one layer of messages is enough; how many layers a model has is one of its knobs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import examples_path  # noqa: F401
import torch
from common.peers import (
    EGNN,
    InteractionNetwork,
    PointwiseMLP,
    SignalLinearAttention,
    SignalPointTransformer,
    SignalTransformer,
)
from field_models import PointwiseITNet
from force_law import fitted_law
from mode_problems import PARTICLE_SETTINGS, TEST, Particles
from protocol import DECAY, SCALE, Rival, Searched
from torch import Tensor, nn
from trials import Batch
from typed_particles import ForceLaw, TypedParticles, seeded

from modeling_itnet.heads.signal import relative_l2

ALL_INPUTS = ("x", "y", "x-y", "distance", "u_x", "u_y", "u_x*u_y")
RELATIVE_INPUTS = ("x-y", "distance", "u_x", "u_y", "u_x*u_y")
KNOBS = {SCALE: (1.0, 0.5, 2.0), DECAY: (1e-4, 1e-2)}


@dataclass(frozen=True)
class TypedForces(Particles, Searched):
    """Particles at half, the same, twice and four times the n of training."""

    def tested_counts(self) -> tuple[int, ...]:
        return tuple(round(factor * self.num_particles) for factor in (0.5, 1, 2, 4))

    def observed(self, model: nn.Module) -> dict:
        """The law that fits the forces which a model predicts, as values at distances, of every pair of types."""
        batch = self.data.batch(self.held_out, self.num_particles, seeded(TEST, 0))
        inputs = {name: values for name, values in batch.items() if name != "labels"}
        with torch.no_grad():
            forces = model(**inputs).predictions * self.data.unit
        distances, law = fitted_law(forces, batch["positions"], batch["signal_values"].argmax(-1), self.data.law)
        return {"law": {"distances": _short(distances), "values": [[_short(v) for v in row] for row in law]}}

    def trivial(self) -> dict[str, dict[str, Tensor]]:
        """No force; the mean of the laws of all pairs of types; their mean for each type of the query."""
        law = self.data.law
        of_pairs = law.coefficients
        means = {"mean law": of_pairs.mean((0, 1), True), "mean law of the query's type": of_pairs.mean(1, True)}
        found = {"no force": {name: self._judged(batches, None) for name, batches in self.tests().items()}}
        for label, mean in means.items():
            data = TypedParticles(ForceLaw(mean.expand_as(law.coefficients), law.scale), self.data.unit)
            found[label] = {name: self._judged(batches, data) for name, batches in self.tests().items()}
        return found

    @staticmethod
    def _judged(batches: Iterator[Batch], data: TypedParticles | None) -> Tensor:
        errors = []
        for batch in batches:
            forces = torch.zeros_like(batch["labels"])
            if data is not None:
                forces = data.law.forces(batch["positions"], batch["signal_values"].argmax(-1)) / data.unit
            errors.append(relative_l2(forces, batch["labels"]))
        return torch.cat(errors)


def _short(values: Tensor) -> list[float]:
    return [float(f"{value:.4g}") for value in values.tolist()]


def _itnet(label: str, **settings) -> Rival:
    """One layer or two, relative inputs of the kernel or all, and a third knob of the mode; low rank has other two."""
    knobs = {"num_hidden_layers": (1, 2), "kernel_inputs": (RELATIVE_INPUTS, ALL_INPUTS)}
    if settings["integration_mode"] == "exact":
        knobs["kernel_hidden_size"] = (32, 16)
    elif settings["integration_mode"] == "near_far":
        knobs["near_radius"] = (0.3, 0.4)
    else:
        knobs = {"num_hidden_layers": (1, 2), "factor_form": ("matrix", "vector"), "rank": (8, 16)}
    return Rival(label, partial(PointwiseITNet, absolute=False), settings, knobs, is_itnet=True)


#: A kernel with directions: a strength, which is a function of types and distance, and what points along x - y. The
#: weights of the distance and the biases begin so that hidden units bend at distances of up to a third.
DIRECTED = {
    "kernel_directions": True,
    "kernel_num_layers": 3,
    "kernel_position_scale": 60.0,
    "kernel_bias_scale": 2.0,
}
DISTANCE_INPUTS = ("distance", "u_x", "u_y", "u_x*u_y")
NEAR_FAR = {"factor_form": "matrix", "rank": 4, "factor_hidden_size": 16, "kernel_hidden_size": 32}
RIVALS = {
    "exact": _itnet("ITNet, exact", integration_mode="exact"),
    "directions": Rival(
        "ITNet, exact, with directions",
        partial(PointwiseITNet, absolute=False, final_norm=False),
        {"integration_mode": "exact", **DIRECTED},
        {
            "num_hidden_layers": (1, 2),
            "kernel_inputs": (DISTANCE_INPUTS, RELATIVE_INPUTS),
            "kernel_hidden_size": (32, 16),
        },
        is_itnet=True,
    ),
    "near_far": _itnet("ITNet, near and far", integration_mode="near_far", **NEAR_FAR),
    "low_rank": _itnet("ITNet, low rank", integration_mode="low_rank"),
    "interaction_network": Rival(
        "interaction network",
        InteractionNetwork,
        {"intermediate_size": 32},
        {"num_hidden_layers": (1, 2), "fourier_scale": (1.0, 2.0), "num_fourier_features": (16, 32)},
    ),
    "egnn": Rival(
        "EGNN", EGNN, {"intermediate_size": 32}, {"num_hidden_layers": (1, 2), "intermediate_size": (32, 64, 16)}
    ),
    "point_transformer": Rival(
        "Point Transformer",
        SignalPointTransformer,
        {},
        {"num_hidden_layers": (2, 1), "local_neighbors": (16, 32), "fourier_scale": (1.0, 2.0)},
    ),
    "transformer_bias": Rival(
        "transformer with relative bias",
        partial(SignalTransformer, relative_bias=True),
        {},
        {"num_hidden_layers": (2, 3), "num_attention_heads": (4, 8), "fourier_scale": (1.0, 2.0)},
    ),
    "linear_attention": Rival(
        "linear attention",
        SignalLinearAttention,
        {},
        {"num_hidden_layers": (2, 3), "num_attention_heads": (4, 8), "fourier_scale": (1.0, 2.0)},
    ),
    "mlp": Rival(
        "MLP of each particle alone",
        PointwiseMLP,
        {},
        {"num_hidden_layers": (2, 3), "num_attention_heads": (4, 8), "fourier_scale": (1.0, 2.0)},
    ),
}


def problems() -> dict[str, TypedForces]:
    found = TypedForces(
        "particles",
        "Typed particles, trained at n = 32",
        "relative L2 error",
        is_error=True,
        steps=2000,
        tuning_steps=500,
        batch_size=32,
        weight_decay=1e-4,
        shared=PARTICLE_SETTINGS,
        contestants=RIVALS,
        rates=(3e-3, 1e-2, 3e-2),
        parameters=24_000,
        knobs=KNOBS,
        clock="near_far",
        held_out=256,
    )
    return {found.name: found}
