"""Equal searches: every model of a problem gets the same number of trials to find its learning rate and its knobs.

A point is a learning rate and a value of every knob. The search is greedy and deterministic, so that a restart finds
its way from the logs of trials that were made before:

1. the learning rates that the problem names, with the first value of every knob;
2. while the best rate is the lowest or the highest that was tried, the next one on the ladder;
3. knob by knob, its other values at the best point so far;
4. the rates beside the best one, with the knobs that were found, unless they are ends of what was tried;
5. what is left of the budget, on random combinations of knobs at the best rate.

The best is that of the lowest loss; a trial that diverged has an infinite one. Steps 2 and 4 keep the winner off the
ends of the rates that were tried, unless it is an end of the ladder or the budget is gone: `at_an_end` tells.
"""

import itertools
import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple


class Point(NamedTuple):
    rate: float
    values: tuple[Any, ...]  # one per knob of its space


@dataclass(frozen=True)
class Space:
    ladder: tuple[float, ...]  # learning rates, rising
    rates: tuple[float, ...]  # neighbours on the ladder, where the search begins
    knobs: dict[str, tuple]  # name -> values, the first of which is where the search begins

    def __post_init__(self):
        first = self.ladder.index(self.rates[0]) if self.rates and self.rates[0] in self.ladder else 0
        if not self.rates or self.ladder[first : first + len(self.rates)] != tuple(self.rates):
            raise ValueError(f"`rates` {self.rates} must be neighbours on the ladder {self.ladder}")
        empty = [name for name, values in self.knobs.items() if not values]
        if empty:
            raise ValueError(f"knob {empty[0]!r} must have at least one value")

    @property
    def start(self) -> tuple:
        return tuple(values[0] for values in self.knobs.values())

    def name(self, point: Point) -> str:
        """The rate, and the knobs that differ from where the search begins: "rate-0.01.scale-2"."""
        changed = [
            f"{name}-{_text(value)}"
            for name, value, first in zip(self.knobs, point.values, self.start, strict=True)
            if value != first
        ]
        return ".".join([f"rate-{point.rate:g}", *changed])

    def settings(self, point: Point) -> dict[str, Any]:
        """Knobs by name."""
        return dict(zip(self.knobs, point.values, strict=True))


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    text = "+".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return re.sub(r"[^\w.+-]", "", text)  # a part of the name of a file


@dataclass(frozen=True)
class Found:
    """What a search found: the best point, and the loss of every point that was tried, in their order."""

    best: Point
    losses: dict[Point, float]

    @property
    def at_an_end(self) -> bool:
        tried = [point.rate for point in self.losses]
        return self.best.rate in (min(tried), max(tried))


def search(space: Space, budget: int, loss: Callable[[Point], float]) -> Found:
    """The best of ``budget`` points; ``loss`` of a point is less for better ones. Fewer if the space has no more."""
    losses: dict[Point, float] = {}

    def look(point: Point) -> None:
        if point not in losses and len(losses) < budget:
            value = loss(point)
            losses[point] = math.inf if value is None or math.isnan(value) else value

    def best() -> Point:
        return min(losses, key=losses.get)

    def tried() -> tuple[int, int]:
        places = [space.ladder.index(point.rate) for point in losses]
        return min(places), max(places)

    for rate in space.rates:
        look(Point(rate, space.start))
    while len(losses) < budget:
        place, (low, high) = space.ladder.index(best().rate), tried()
        if place == low and low > 0:
            look(Point(space.ladder[low - 1], space.start))
        elif place == high and high + 1 < len(space.ladder):
            look(Point(space.ladder[high + 1], space.start))
        else:
            break
    for index, values in enumerate(space.knobs.values()):
        for value in values[1:]:
            point = best()
            look(Point(point.rate, (*point.values[:index], value, *point.values[index + 1 :])))
    for step in (-1, 1):
        point, (low, high) = best(), tried()
        place = space.ladder.index(point.rate) + step
        if low < place < high:
            look(Point(space.ladder[place], point.values))
    rate, draws = best().rate, random.Random(0)
    rest = [Point(rate, values) for values in itertools.product(*space.knobs.values())]
    draws.shuffle(rest)
    for point in rest:
        look(point)
    if math.isinf(losses[best()]):
        raise ValueError(f"none of {len(losses)} trials converged: {', '.join(map(space.name, losses))}")
    return Found(best(), losses)
