"""How long a grid takes, before it is run: a few steps of every model are timed."""

import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from protocol import Entry, Missing, Searched, searched
from search import Point
from torch import nn
from trials import Batch


class Estimate(NamedTuple):
    """CPU seconds of one model of a problem."""

    parameters: int
    step: float  # of a training step
    validation: float  # of one pass over validation data
    test: float  # of one pass over all tests
    search: float  # of the trials of its search
    rows: float  # of its rows of equal steps
    timed: float  # of its rows of equal time, if the clock has the step that is given


def estimate(problem: Searched, model: str, clock: float | None = None, steps: int = 2) -> Estimate:
    """By timing ``steps`` steps after a first one, and one batch of every kind that is evaluated."""
    rival = problem.contestants[model]
    space = problem.space(rival.tuned_as or model)
    problem = problem.at(model, Point(problem.rates[0], space.start))
    built = problem.build(model)
    times = [_timed(lambda number=number: _step(built, problem, number)) for number in range(1 + steps)]
    step = min(times[1:])
    validation = _evaluated(built, problem.validation())
    test = sum(_evaluated(built, batches) for batches in problem.tests().values())
    short = problem.tuning_steps or problem.steps
    looks = max(1, round(problem.curve * short / problem.steps))
    trials = 0 if rival.tuned_as or problem.base else problem.budget
    one = problem.steps * step + problem.curve * validation + test
    given = problem.steps * (clock or step) + problem.curve * validation + test
    timed = len(problem.timed_seeds) * given if problem.is_timed(model) else 0.0
    count = sum(parameter.numel() for parameter in built.parameters())
    return Estimate(
        count, step, validation, test, trials * (short * step + looks * validation), len(problem.seeds) * one, timed
    )


def _timed(work) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def _step(model: nn.Module, problem: Searched, number: int) -> None:
    model.train()
    model.zero_grad()
    model(**problem.batch(0, number)).loss.backward()


@torch.no_grad()
def _evaluated(model: nn.Module, batches: Iterator[Batch]) -> float:
    """The first batch, times the number of batches."""
    first = list(islice(batches, 1))
    inputs = {name: values for name, values in first[0].items() if name != "labels"}
    seconds = _timed(lambda: model.eval()(**inputs))
    return seconds * (1 + sum(1 for _ in batches))


def remaining(problem: Searched, model: str, folder: Path) -> float:
    """The share of a model's rows of equal steps that have no log."""
    try:
        point = searched(problem, model, folder, may_run=False).best
    except Missing:
        return 1.0
    left = [seed for seed in problem.seeds if Entry.of(problem, model, point, seed).read(folder) is None]
    return len(left) / len(problem.seeds)


def plan(pairs: list[tuple[Searched, str]], folder: Path) -> list[list[str]]:
    """A table: a line per problem and model, and one of sums."""
    table = [
        ["problem", "model", "parameters", "ms a step", "search, min", "equal steps, min", "equal time, min", "left"]
    ]
    total, clocks = 0.0, {}
    for problem, model in pairs:
        if problem.clock and problem.name not in clocks:
            clocks[problem.name] = estimate(problem, problem.clock).step
        found = estimate(problem, model, clocks.get(problem.name))
        total += found.search + found.rows + found.timed
        minutes = [f"{seconds / 60:.1f}" for seconds in (found.search, found.rows, found.timed)]
        left = f"{100 * remaining(problem, model, folder):.0f} %"
        table.append([problem.name, model, f"{found.parameters:,}", f"{1e3 * found.step:.0f}", *minutes, left])
        print("  ".join(table[-1]), flush=True)
    table.append(["all", "", "", "", "", "", f"{total / 3600:.1f} hours of one core in all", ""])
    return table
