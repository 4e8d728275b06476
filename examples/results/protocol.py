"""The protocol of evidence.py: equal searches, equal parameters, equal training times, and test data read once.

- Every model of a problem is built with as many parameters as all others: its width and then the width of its
  feed-forward networks are fitted (:meth:`Searched.config`).
- Every model has the same number of search trials (search.py), of a quarter of the steps, at one seed, judged by
  validation rows. An ablation of a model takes the point that the model's own search found.
- With the point that won, it is trained for five other seeds, in as many steps as all others, then read on test data.
- Rows of equal time: the same point and seeds, in as many steps as fit into the CPU time that one model of the problem
  (`clock`) took for its own rows.
- Every trial is a log, with parameters, FLOPs of a training step, CPU seconds, and the error of every test sample.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import examples_path  # noqa: F401
import torch
from common.peers.causal_lm import count_parameters, nearest_size
from search import Found, Point, Space, search
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from trials import LADDER, TUNING_SEED, Batch, Contestant, Problem, Trial, report

import itnet_kernels.exact.flops  # noqa: F401
from modeling_itnet import ITNetConfig, optimizer_param_groups

SEEDS = (1, 2, 3, 4, 5)
LONGEST = 8  # rows of equal time have at most so many times the steps of the others
SCALE, DECAY = "scale", "weight_decay"  # knobs that are no settings of a model


@dataclass(frozen=True)
class Rival(Contestant):
    """A model of a searched problem, with the knobs that it has beside those of all models."""

    knobs: dict[str, tuple] = field(default_factory=dict)
    is_itnet: bool = False
    tuned_as: str = ""  # the model whose search and settings it takes: it is an ablation, `settings` are what changes


@dataclass(frozen=True)
class Searched(Problem):
    """A problem under this protocol. Each adds `errors(model, batches)`: [samples], what its score is the mean of."""

    parameters: int = 0  # of every model, as near as widths allow
    knobs: dict[str, tuple] = field(default_factory=dict)  # of all models; the first value is where searches begin
    budget: int = 12  # search trials of every model
    seeds: tuple[int, ...] = SEEDS
    timed_seeds: tuple[int, ...] = SEEDS[:3]
    clock: str = ""  # the model whose training time rows of equal time have
    on_request: bool = False  # left out unless it is named
    base: "Searched | None" = None  # the problem whose searches it takes, with logs in `base_logs`
    base_logs: Path | None = None
    scale: float = 1.0  # factor of the weight matrices that a model starts with

    def is_timed(self, model: str) -> bool:
        """Whether a model has rows of equal time of its own: the clock has its rows of equal steps, ablations none."""
        return bool(self.clock) and model != self.clock and not self.contestants[model].tuned_as

    def space(self, model: str) -> Space:
        return Space(LADDER, self.rates, {**self.knobs, **self.contestants[model].knobs})

    def at(self, model: str, point: Point) -> "Searched":
        """The problem with the settings of a point for one of its models."""
        rival = self.contestants[model]
        leader = rival.tuned_as or model
        settings = self.space(leader).settings(point)
        own = {"scale": settings.pop(SCALE, self.scale), "weight_decay": settings.pop(DECAY, self.weight_decay)}
        settings = {**self.contestants[leader].settings, **settings}
        rival = replace(rival, settings={**settings, **rival.settings} if rival.tuned_as else settings)
        return replace(self, **own, contestants={**self.contestants, model: rival})

    def config(self, model: str) -> ITNetConfig:
        rival = self.contestants[model]
        settings = {**self.shared, **rival.settings}
        return fitted(rival.build, tuple(sorted(settings.items())), self.parameters)

    def build(self, model: str) -> nn.Module:
        return scaled(super().build(model), self.scale)

    def facts(self, model: str) -> dict:
        config = self.config(model)
        return {
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "scale": self.scale,
            "training_flops": training_flops(self.build(model), self.batch(0, 1)),
        }

    def score(self, model: nn.Module, batches: Iterator[Batch]) -> float:
        return self.errors(model, batches).mean().item()

    def observed(self, model: nn.Module) -> dict:
        """What logs of rows say of a trained model beside its errors."""
        return {}

    def trivial(self) -> dict[str, dict[str, Tensor]]:
        """Errors [samples] of predictions that need no model, by name and test."""
        return {}


@cache
def fitted(build: Callable[[ITNetConfig], nn.Module], settings: tuple, parameters: int) -> ITNetConfig:
    """Settings with the widths that make a model of nearly so many parameters; unchanged if that number is 0.

    The width is fitted first, in steps of two per head, with feed-forward networks in proportion, then these alone.
    """
    settings = dict(settings)
    if not parameters:
        return ITNetConfig(**settings)
    ratio = settings["intermediate_size"] / settings["hidden_size"]

    def sized(width: int, inner: int) -> ITNetConfig:
        return ITNetConfig(**{**settings, "hidden_size": width, "intermediate_size": inner})

    def count(width: int, inner: int) -> int:
        return count_parameters(build, sized(width, inner))

    width = nearest_size(lambda w: count(w, round(ratio * w)), parameters, 2 * settings["num_attention_heads"])
    return sized(width, nearest_size(lambda inner: count(width, inner), parameters, 4))


@torch.no_grad()
def scaled(model: nn.Module, factor: float) -> nn.Module:
    """The model with its weight matrices, those that decay, times a factor."""
    for parameter in optimizer_param_groups(model, 0.0)[0]["params"]:
        parameter.mul_(factor)
    return model


def training_flops(model: nn.Module, batch: Batch) -> int:
    """Of a forward and a backward, two per multiply-add of matrix products.

    PyTorch's counter knows ITNet's sums over pairs by the formulas of itnet_kernels.exact.flops.
    """
    with FlopCounterMode(display=False) as counter:
        model.train()(**batch).loss.backward()
    return counter.get_total_flops()


@dataclass(frozen=True)
class Entry(Trial):
    """A trial at a point: of the search (the tuning seed), or of the rows of equal steps or of equal time."""

    point: Point | None = None
    timed: int | None = None  # steps of a row of equal time

    @classmethod
    def of(cls, problem: Searched, model: str, point: Point, seed: int, timed: int | None = None) -> "Entry":
        return cls(problem.at(model, point), model, point.rate, seed, point, timed)

    @property
    def steps(self) -> int:
        return super().steps if self.timed is None else self.timed

    @property
    def name(self) -> str:
        if self.is_tuning:
            end = self.problem.space(self.model).name(self.point)
        else:
            end = f"{'seed' if self.timed is None else 'time'}-{self.seed}"
        return f"{self.problem.name}.{self.model}.{end}"

    def read(self, folder: Path) -> dict | None:
        """The log, if it is there; one of other settings is an error."""
        log = super().read(folder)
        if log is not None:
            settings = {**self.problem.shared, **self.problem.contestants[self.model].settings}
            wanted = json.loads(json.dumps(settings, default=str))
            wanted |= {"scale": self.problem.scale, DECAY: self.problem.weight_decay}
            found = {**log["settings"], "scale": log["scale"], DECAY: log[DECAY]}
            differing = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
            if differing:
                name = differing[0]
                raise ValueError(
                    f"{folder / self.name}.json has `{name}` {found.get(name)}, not {wanted.get(name)}: delete it, or "
                    "name another --logs"
                )
        return log

    def tested(self, model: nn.Module) -> dict:
        """Mean errors of every test, and those of its samples."""
        if self.is_tuning:
            return {"test": {}, "test_errors": {}}
        with torch.no_grad():
            errors = {
                name: self.problem.errors(model.eval(), batches).double()
                for name, batches in self.problem.tests().items()
            }
        kept = {name: values if values.isfinite().all() else None for name, values in errors.items()}
        return {
            "test": {n: None if v is None else float(f"{v.mean().item():.6g}") for n, v in kept.items()},
            "test_errors": {n: None if v is None else rounded(v) for n, v in kept.items()},
            **self.problem.observed(model),
        }


def rounded(values: Tensor) -> list[float]:
    return [float(f"{value:.4g}") for value in values.tolist()]


class Missing(Exception):
    """A log that is not there."""


def made(entry: Entry, folder: Path, may_run: bool = True) -> dict:
    """The log of a trial, which runs if there is none."""
    log = entry.read(folder)
    if log is None and not may_run:
        raise Missing(entry.name)
    if log is None:
        log = entry.run(folder)
        report(entry, log)
    return log


def searched(problem: Searched, model: str, folder: Path, may_run: bool = True) -> Found:
    """The search of a model, or of the one whose ablation it is."""
    model = problem.contestants[model].tuned_as or model
    if problem.base is not None:
        return searched(problem.base, model, problem.base_logs, may_run=False)

    def loss(point: Point) -> float | None:
        score = made(Entry.of(problem, model, point, TUNING_SEED), folder, may_run)["validation"][-1][1]
        return score if score is None or problem.is_error else -score

    return search(problem.space(model), problem.budget, loss)


def run_rows(problem: Searched, model: str, folder: Path, seeds: tuple[int, ...]) -> None:
    """The search of a model and its rows of equal steps, as far as they have no logs."""
    point = searched(problem, model, folder).best
    for seed in seeds:
        made(Entry.of(problem, model, point, seed), folder)


def run_timed_rows(problem: Searched, model: str, folder: Path, seeds: tuple[int, ...]) -> None:
    """The rows of equal time, of as many steps as rows of equal steps and those of the clock decide."""
    point = searched(problem, model, folder).best
    for seed in seeds:
        path = folder / f"{Entry.of(problem, model, point, seed, 1).name}.json"
        if not path.is_file():
            made(Entry.of(problem, model, point, seed, timed_steps(problem, model, folder)), folder)


def timed_steps(problem: Searched, model: str, folder: Path) -> int:
    """How many steps of a model take as long as all steps of the clock took."""
    clock = seconds_per_step(problem, problem.clock, folder) * problem.steps
    steps = round(clock / seconds_per_step(problem, model, folder))
    return max(1, min(steps, LONGEST * problem.steps))


def seconds_per_step(problem: Searched, model: str, folder: Path) -> float:
    """CPU seconds, by the median of its rows of equal steps."""
    logs = [
        json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(folder.glob(f"{problem.name}.{model}.seed-*.json"))
    ]
    times = sorted(log["training_cpu_seconds"] / log["validation"][-1][0] for log in logs)
    if not times:
        raise Missing(f"{problem.name}.{model}.seed-*")
    return times[len(times) // 2]


def run_trivial(problem: Searched, folder: Path) -> None:
    """Baselines that need no training, as a log."""
    start = time.process_time()
    found = problem.trivial()
    log = {
        "problem": problem.name,
        "test": {
            label: {n: float(f"{v.mean().item():.6g}") for n, v in tests.items()} for label, tests in found.items()
        },
        "test_errors": {label: {n: rounded(v) for n, v in tests.items()} for label, tests in found.items()},
        "cpu_seconds": round(time.process_time() - start, 2),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{problem.name}.trivial.json").write_text(json.dumps(log, indent=1) + "\n", encoding="utf-8")
    print(f"{problem.name}: " + "; ".join(f"{label} {tests}" for label, tests in log["test"].items()))
