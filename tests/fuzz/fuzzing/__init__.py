"""Random cases of everything that computes, each against an oracle in float64. ``tests/fuzz/run.py`` runs them."""

from collections.abc import Callable
from typing import NamedTuple

from . import caches, converters, exact, modes, modules
from .case import Draw, Outcome


class Family(NamedTuple):
    check: Callable[[Draw, Outcome], None]
    share: int  # of every 212 cases


FAMILIES = {
    "operator": Family(exact.operator, 36),
    "near": Family(exact.near, 12),
    "positions": Family(exact.positions, 39),
    "derivatives": Family(exact.derivatives, 16),
    "low_rank": Family(modes.low_rank, 16),
    "sampled": Family(modes.sampled, 20),
    "network": Family(modules.network, 16),
    "layer": Family(modules.layer, 8),
    "invariance": Family(modules.invariance, 13),
    "cache": Family(caches.caches, 12),
    "converters": Family(converters.converters, 20),
    "triton": Family(exact.triton, 4),
}


def run_case(family: str, seed: int) -> Outcome:
    """Case ``seed`` of a family. An exception is an infinite error."""
    draw, outcome = Draw(family, seed), Outcome()
    outcome.choices = draw.choices
    try:
        FAMILIES[family].check(draw, outcome)
    except Exception as error:
        outcome.ratio, outcome.where = float("inf"), f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return outcome
