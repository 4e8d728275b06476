"""One random case: where its numbers come from, what was compared, and how far apart that may be."""

import random
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .oracle import EXACT, Rounding

DOUBLE = torch.finfo(torch.float64).eps
# Size of the random errors that measure conditioning; small enough to be linear, large enough to stand out in float64.
_PROBE = 2.0**-30
_PROBES = 3
# An algorithm may round this many times as much as the probes' standard deviation of one rounding per operation.
MARGIN = 50


class Draw:
    """Random choices and numbers of one case; the choices are kept to describe it."""

    def __init__(self, family: str, seed: int):
        key = f"{family}-{seed}"
        self.random = random.Random(key)
        self.generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
        self.choices: dict[str, object] = {}

    def choice(self, name: str, options: Iterable):
        value = self.random.choice(list(options))
        self.choices[name] = value
        return value

    def integer(self, name: str, low: int, high: int) -> int:
        return self.choice(name, range(low, high + 1))

    def chance(self, name: str, probability: float) -> bool:
        self.choices[name] = value = self.random.random() < probability
        return value

    def subset(self, name: str, options: Iterable) -> tuple:
        value = tuple(option for option in options if self.random.random() < 0.6)
        self.choices[name] = value
        return value

    def power(self, name: str, low: float, high: float) -> float:
        """10 to a power between the two."""
        self.choices[name] = value = float(f"{10 ** self.random.uniform(low, high):.3g}")
        return value

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def permutation(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self.generator)


@dataclass
class Outcome:
    """Largest error of a case in units of what is allowed, and where it is."""

    ratio: float = 0.0
    where: str = ""
    comparisons: int = 0
    choices: dict = field(default_factory=dict)

    def compare_stored(self, name: str, actual: Tensor, expected: "Allowed", times: int = 1) -> None:
        """A result against the oracle's; what its dtype cannot hold is not compared."""
        if expected.fits(actual.dtype):
            self.compare(name, actual, expected.exact, expected.stored(actual.dtype, times))

    def compare(self, name: str, actual: Tensor, expected: Tensor, tolerance: float) -> None:
        """Largest difference of two tensors against ``tolerance``; anything that is not finite is wrong."""
        self.comparisons += 1
        if actual.shape != expected.shape:
            ratio = float("inf")
        elif actual.numel() == 0:
            ratio = 0.0
        else:
            error = float((actual.detach().double() - expected.detach().double()).abs().max())
            ratio = error / tolerance if tolerance > 0 else (0.0 if error == 0 else float("inf"))
            ratio = ratio if ratio == ratio else float("inf")
        if ratio > self.ratio or not self.where:
            self.ratio, self.where = ratio, name


class Allowed(NamedTuple):
    """A result in float64 and how far from it an implementation may come."""

    exact: Tensor
    computed: float  # by the precision of the arithmetic
    size: float  # of the terms that the result is a sum of, which may cancel in it

    def stored(self, dtype: torch.dtype, times: int = 1) -> float:
        """With the rounding of storing ``times`` terms of the result in ``dtype``."""
        info = torch.finfo(dtype)
        return self.computed + times * (info.eps * max(self.size, largest(self.exact)) + info.tiny * info.eps)

    def fits(self, dtype: torch.dtype) -> bool:
        return 4 * max(self.size, largest(self.exact)) < torch.finfo(dtype).max


def allowed(
    evaluate: Callable[[Rounding], dict[str, Tensor]],
    eps: float,
    position_eps: float = DOUBLE,
    margin: float = MARGIN,
) -> dict[str, Allowed]:
    """What ``evaluate`` gives without rounding, and how far from it arithmetic of precision ``eps`` may come.

    Conditioning is measured: the same mathematics with random errors, scaled to ``eps``.
    """
    exact = evaluate(EXACT)
    scale = eps / _PROBE
    spread = dict.fromkeys(exact, 0.0)
    for seed in range(_PROBES):
        for name, value in evaluate(Rounding(_PROBE, position_eps / scale, seed)).items():
            spread[name] = max(spread[name], largest(value - exact[name]))
    floor = 0.1 * max(eps, 8 * DOUBLE)  # the oracle rounds too
    return {
        name: Allowed(value, margin * (spread[name] * scale + floor * largest(value)), spread[name] / _PROBE)
        for name, value in exact.items()
    }


def largest(tensor: Tensor) -> float:
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0
