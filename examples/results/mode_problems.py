"""What mode_accuracy.py trains: two problems that tell integration modes apart, and the models that meet on each.

Models of a problem share data, steps, batch size, optimiser and schedule, and have parameters of the same order; the
learning rate is tuned.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import examples_path  # noqa: F401
import numpy as np
import torch
from common.arguments import DataArguments
from common.data import load_split
from common.peers import InteractionNetwork, PixelMLP, SignalTransformer
from field_models import PointwiseITNet
from torch import Tensor, nn
from trials import Batch, Contestant, Problem
from typed_particles import ForceLaw, TypedParticles, seeded

from modeling_itnet import ITNetForImageClassification, ITNetForSignalRegression
from modeling_itnet.heads.signal import relative_l2

TRAIN, VALIDATION, TEST = 1, 2, 3  # streams of random numbers that no two parts of the data share


@dataclass(frozen=True)
class Particles(Problem):
    """Forces on typed particles, trained at one n and judged at half, the same and four times that n."""

    num_particles: int = 32
    held_out: int = 128  # samples of validation and of every test, fewer at larger n

    @cached_property
    def data(self) -> TypedParticles:
        return TypedParticles.normalised(ForceLaw.draw(), self.num_particles)

    def batch(self, seed: int, step: int) -> Batch:
        return self.data.batch(self.batch_size, self.num_particles, seeded(TRAIN, seed, step))

    def validation(self) -> Iterator[Batch]:
        return self._batches(VALIDATION, self.num_particles)

    def tested_counts(self) -> tuple[int, ...]:
        return self.num_particles // 2, self.num_particles, 4 * self.num_particles

    def tests(self) -> dict[str, Iterator[Batch]]:
        return {f"n = {count}": self._batches(TEST, count) for count in self.tested_counts()}

    def _batches(self, stream: int, num_particles: int) -> Iterator[Batch]:
        """Equal batches of at most as many pairs as in training."""
        size = max(1, self.batch_size * self.num_particles**2 // num_particles**2)
        for index in range(max(1, self.held_out * self.num_particles // (num_particles * size))):
            yield self.data.batch(size, num_particles, seeded(stream, num_particles, index))

    @staticmethod
    def errors(model: nn.Module, batches: Iterator[Batch]) -> Tensor:
        """Relative L2 error of every sample, over all particles."""
        return torch.cat([relative_l2(model(**_inputs(batch)).predictions, batch["labels"]) for batch in batches])

    def score(self, model: nn.Module, batches: Iterator[Batch]) -> float:
        return self.errors(model, batches).mean().item()


@dataclass(frozen=True)
class Images(Problem):
    """Classes of images; the last ``held_out`` training images are for validation."""

    folder: Path = Path("data/cifar10")
    held_out: int = 1000
    evaluated: int = 250  # images per batch of validation and test

    @cached_property
    def train(self) -> tuple[Tensor, Tensor]:
        return self._read("train")

    def batch(self, seed: int, step: int) -> Batch:
        """Random images of the training part, each flipped with probability 1/2."""
        generator = seeded(TRAIN, seed, step)
        images, labels = self.train
        rows = torch.randint(len(images) - self.held_out, (self.batch_size,), generator=generator)
        flipped = torch.rand(self.batch_size, 1, 1, 1, generator=generator) < 0.5
        pixels = self._scaled(images[rows])
        return {"pixel_values": torch.where(flipped, pixels.flip(-1), pixels), "labels": labels[rows]}

    def validation(self) -> Iterator[Batch]:
        images, labels = self.train
        return self._batches(images[-self.held_out :], labels[-self.held_out :])

    def tests(self) -> dict[str, Iterator[Batch]]:
        return {"test": self._batches(*self._read("test"))}

    def _batches(self, images: Tensor, labels: Tensor) -> Iterator[Batch]:
        for pixels, classes in zip(images.split(self.evaluated), labels.split(self.evaluated), strict=True):
            yield {"pixel_values": self._scaled(pixels), "labels": classes}

    def _read(self, split: str) -> tuple[Tensor, Tensor]:
        """Images [N, 3, H, W] as bytes, and classes [N]."""
        rows = load_split(DataArguments(dataset=str(self.folder)), split, None)
        images = np.stack([np.asarray(image.convert("RGB")) for image in rows["image"]])
        return torch.from_numpy(images).movedim(-1, 1).contiguous(), torch.tensor(rows["label"][:])

    @staticmethod
    def _scaled(images: Tensor) -> Tensor:
        return images.float() / 127.5 - 1

    @staticmethod
    def score(model: nn.Module, batches: Iterator[Batch]) -> float:
        """Share of images whose class has the largest logit."""
        hits = [model(**_inputs(batch)).logits.argmax(-1) == batch["labels"] for batch in batches]
        return torch.cat(hits).float().mean().item()


def _inputs(batch: Batch) -> Batch:
    return {name: value for name, value in batch.items() if name != "labels"}


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "embedding_dropout_prob": 0.0, "drop_path_rate": 0.0}
PARTICLE_SETTINGS = {
    "modality": "signal",
    "signal_feature_size": 4,
    "position_dim": 2,
    "num_labels": 2,
    "signal_loss": "relative_l2",
    "hidden_size": 32,
    "num_hidden_layers": 1,  # a force is one sum over pairs
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "num_fourier_features": 16,
    "fourier_scale": 1.0,
    "kernel_init_scale": 1.0,
    "initializer_range": 0.1,
    **NO_DROPOUT,
}
NEAR_FAR = {"integration_mode": "near_far", "factor_form": "matrix", "rank": 4, "factor_hidden_size": 16}


def _exact(width: int) -> Contestant:
    """The full kernel on all pairs, with ``width`` hidden units."""
    settings = {"integration_mode": "exact", "kernel_hidden_size": width}
    return Contestant(f"ITNet, exact, w = {width}", PointwiseITNet, settings)


def _near_far(width: int) -> Contestant:
    """The full kernel on a ball, at whose radius the law has died away, with ``width`` hidden units."""
    settings = {**NEAR_FAR, "near_radius": 0.3, "kernel_hidden_size": width}
    return Contestant(f"ITNet, near and far, w = {width}", PointwiseITNet, settings)


PARTICLE_MODELS = {
    **{f"exact-{width}": _exact(width) for width in (32, 16, 8, 4)},
    **{f"near_far-{width}": _near_far(width) for width in (32, 8)},
    "low_rank": Contestant("ITNet, low rank", PointwiseITNet, {"integration_mode": "low_rank"}),
    "low_rank-query": Contestant(
        "ITNet, low rank, then the query layer of its head",
        ITNetForSignalRegression,
        {"integration_mode": "low_rank", "kernel_hidden_size": 8},
    ),
    "interaction_network": Contestant(
        "interaction network", InteractionNetwork, {"hidden_size": 64, "intermediate_size": 64}
    ),
    "transformer": Contestant("transformer", SignalTransformer, {"num_hidden_layers": 2, "intermediate_size": 128}),
    "transformer-bias": Contestant(
        "transformer with relative bias",
        partial(SignalTransformer, relative_bias=True),
        {"num_hidden_layers": 2, "intermediate_size": 128},
    ),
}
AT_256 = ("exact-8", "near_far-8", "low_rank", "transformer")  # those whose steps are cheap
IMAGE_SETTINGS = {
    "modality": "image",
    "image_size": 32,
    "patch_size": 4,
    "num_labels": 10,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "num_fourier_features": 16,
    "fourier_scale": 1.0,
    "kernel_hidden_size": 8,
    "kernel_init_scale": 1.0,
    "initializer_range": 0.1,
    "pooling": "mean",
    **NO_DROPOUT,
}
IMAGE_MODELS = {
    "exact": Contestant("ITNet, exact, w = 8", ITNetForImageClassification, {"integration_mode": "exact"}),
    "near_far": Contestant(  # its far field is the kernel of the low-rank model: they differ by the near field alone
        "ITNet, near and far, w = 8", ITNetForImageClassification, {"integration_mode": "near_far", "near_size": 9}
    ),
    "low_rank": Contestant("ITNet, low rank", ITNetForImageClassification, {"integration_mode": "low_rank"}),
    "mlp": Contestant("MLP on pixels", PixelMLP),
}


def problems(data: Path) -> dict[str, Problem]:
    """By name. ``data`` is the folder of the data sets."""
    particles = partial(
        Particles,
        metric="relative L2 error",
        is_error=True,
        weight_decay=1e-4,
        shared=PARTICLE_SETTINGS,
        rates=(1e-2, 3e-2, 1e-1),
    )
    found = (
        particles(
            "particles-32",
            "Typed particles, trained at n = 32",
            steps=400,
            batch_size=16,
            contestants=PARTICLE_MODELS,
            num_particles=32,
        ),
        particles(
            "particles-256",
            "Typed particles, trained at n = 256",
            steps=700,  # after 400 no model had learnt the types of keys
            batch_size=2,
            contestants={name: PARTICLE_MODELS[name] for name in AT_256},
            num_particles=256,
            tuned_on="particles-32",
        ),
        Images(
            "cifar10",
            "CIFAR-10, patches of 4 × 4",
            "accuracy",
            is_error=False,
            steps=1200,
            batch_size=32,
            weight_decay=0.05,
            shared=IMAGE_SETTINGS,
            contestants=IMAGE_MODELS,
            rates=(1e-3, 3e-3, 1e-2),
            folder=data / "cifar10",
        ),
    )
    return {problem.name: problem for problem in found}
