"""The protocol of mode_accuracy.py, recall.py and language.py: problems, the models that meet on them, and trials.

A trial is one model, trained once with one learning rate and seed, and its log.

The learning rate of a model is the best of those of its problem by the validation score at the end of training, at one
seed, in as many steps as the problem has for it, or the first at which training ends early; while the best is the
lowest or the highest that was tried, the next one on its ladder is tried too. Test data are read after training by
trials with that rate and other seeds, and by no others.
"""

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn
from transformers import get_cosine_schedule_with_warmup

from modeling_itnet import ITNetConfig, optimizer_param_groups

LADDER = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
TUNING_SEED = 0
SEEDS = (1, 2, 3)
WARM_UP = 0.05  # share of the steps
CLIPPED = 1.0  # largest norm of a gradient
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Contestant:
    """A model: its class, and the settings that make an ITNetConfig, which peers take too."""

    label: str
    build: Callable[[ITNetConfig], nn.Module]
    settings: dict = field(default_factory=dict)
    rates: tuple[float, ...] = field(default=(), kw_only=True)  # to try first, if other than those of the problem


@dataclass(frozen=True)
class Problem:
    """What problems share. Each adds `batch(seed, step)`, `validation()`, `tests()` and `score(model, batches)`:
    batches for training, validation and test, and how predictions are judged."""

    name: str
    title: str
    metric: str
    is_error: bool  # less is better
    steps: int
    batch_size: int
    weight_decay: float
    shared: dict  # settings of all models
    contestants: dict[str, Contestant]
    rates: tuple[float, ...]  # learning rates that every model tries, neighbours on `ladder`
    ladder: tuple[float, ...] = LADDER
    tuned_on: str = ""  # the problem whose learning rates it takes; default: it tunes its own
    tuning_steps: int | None = None  # of the trials that find its learning rates, if other than `steps`
    curve: int = 8  # validation scores in the course of a trial of `steps`
    enough: float | None = None  # a validation score at which training ends before all steps

    def config(self, model: str) -> ITNetConfig:
        return ITNetConfig(**{**self.shared, **self.contestants[model].settings})

    def build(self, model: str) -> nn.Module:
        return self.contestants[model].build(self.config(model))

    def facts(self, model: str) -> dict:
        """What logs say of a model beside what they say of every model."""
        return {}

    def is_enough(self, score: float | None) -> bool:
        if score is None or self.enough is None:
            return False
        return score <= self.enough if self.is_error else score >= self.enough

    def better(self, scores: dict[float, float | None]) -> float:
        """The learning rate of the best score, the first of these. A run that diverged has none."""
        found = {rate: score for rate, score in scores.items() if score is not None}
        if not found:
            raise ValueError(f"`{self.name}`: no learning rate of {', '.join(f'{r:g}' for r in scores)} converged")
        return (min if self.is_error else max)(found, key=found.get)

    def best_rate(self, logs: list[dict]) -> float:
        """The learning rate of the log that ends best; of those that are `enough`, of the one that was first."""
        ends = {log["learning_rate"]: log["validation"][-1] for log in sorted(logs, key=last_step)}
        return self.better(
            {rate: self.enough if self.is_enough(score) else score for rate, (_, score) in ends.items()}
        )


def last_step(log: dict) -> int:
    """The step at which a trial ended."""
    return log["validation"][-1][0]


@dataclass(frozen=True)
class Trial:
    problem: Problem
    model: str
    rate: float
    seed: int

    @property
    def is_tuning(self) -> bool:
        return self.seed == TUNING_SEED

    @property
    def steps(self) -> int:
        return (self.is_tuning and self.problem.tuning_steps) or self.problem.steps

    @property
    def name(self) -> str:
        end = f"rate-{self.rate:g}" if self.is_tuning else f"seed-{self.seed}"
        return f"{self.problem.name}.{self.model}.{end}"

    def read(self, folder: Path) -> dict | None:
        """The log of this trial, if it is there; one of other steps or rate is an error."""
        path = folder / f"{self.name}.json"
        if not path.is_file():
            return None
        log = json.loads(path.read_text(encoding="utf-8"))
        for name, wanted in (("steps", self.steps), ("learning_rate", self.rate)):
            if log[name] != wanted:
                raise ValueError(
                    f"{path} has `{name}` {log[name]:g}, not {wanted:g}: delete it, or name another --logs"
                )
        return log

    def run(self, folder: Path) -> dict:
        """Trains, and writes the log."""
        torch.manual_seed(self.seed)
        model, problem = self.problem.build(self.model), self.problem
        start = time.process_time()
        curve, seconds, spent = train(model, problem, self.steps, self.rate, self.seed)
        log = {
            "problem": problem.name,
            "model": self.model,
            "settings": {**problem.shared, **problem.contestants[self.model].settings},
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "seed": self.seed,
            "learning_rate": self.rate,
            "weight_decay": problem.weight_decay,
            "steps": self.steps,
            "batch_size": problem.batch_size,
            "metric": problem.metric,
            **problem.facts(self.model),
            "validation": curve,  # [step, score]; the score is None if training diverged
            "validation_cpu_seconds": seconds,  # of the steps up to each score
            **self.tested(model),
            "training_cpu_seconds": round(spent, 2),
            "cpu_seconds": round(time.process_time() - start, 2),
            "threads": torch.get_num_threads(),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        }
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(log, indent=1, default=str) + "\n"
        (folder / f"{self.name}.json").write_text(text, encoding="utf-8")
        return log

    def tested(self, model: nn.Module) -> dict:
        """What the log says of test data; trials that tune do not read them."""
        tests = {} if self.is_tuning else self.problem.tests()
        return {"test": {name: evaluate(model, self.problem, batches) for name, batches in tests.items()}}


def train(
    model: nn.Module, problem: Problem, steps: int, rate: float, seed: int
) -> tuple[list[list], list[float], float]:
    """AdamW with a warm-up and a cosine: the validation curve, the CPU seconds of the steps up to each of its scores,
    and of all steps."""
    take_step = training_step(model, problem, steps, rate, seed)
    count = math.ceil(problem.curve * steps / problem.steps)
    marks = {math.ceil(steps * (part + 1) / count) for part in range(count)}
    curve, seconds, spent = [], [], 0.0
    for step in range(1, steps + 1):
        start = time.process_time()
        loss = take_step(step)
        spent += time.process_time() - start
        if not loss.isfinite():
            return [*curve, [step, None]], [*seconds, round(spent, 2)], spent
        if step in marks:
            curve.append([step, evaluate(model, problem, problem.validation())])
            seconds.append(round(spent, 2))
            if problem.is_enough(curve[-1][1]):
                break
    return curve, seconds, spent


def training_step(
    model: nn.Module, problem: Problem, steps: int, rate: float, seed: int
) -> Callable[[int], torch.Tensor]:
    """A function that takes the step of a number, from 1 to ``steps``, and returns the loss before it."""
    optimizer = torch.optim.AdamW(optimizer_param_groups(model, problem.weight_decay), lr=rate)
    schedule = get_cosine_schedule_with_warmup(optimizer, round(WARM_UP * steps), steps)

    def take_step(step: int) -> torch.Tensor:
        model.train()
        optimizer.zero_grad()
        loss = model(**problem.batch(seed, step)).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIPPED)
        optimizer.step()
        schedule.step()
        return loss

    return take_step


@torch.no_grad()
def evaluate(model: nn.Module, problem: Problem, batches: Iterator[dict]) -> float | None:
    """The score of a model, or None where it is no number."""
    score = problem.score(model.eval(), batches)
    return float(f"{score:.6g}") if math.isfinite(score) else None


def tuned(problem: Problem, model: str, folder: Path) -> tuple[float | None, list[Trial]]:
    """The learning rate that logs decide for a model, or None and the trials that are missing for it."""
    rates = problem.contestants[model].rates or problem.rates
    while True:
        trials = [Trial(problem, model, rate, TUNING_SEED) for rate in rates]
        logs = [trial.read(folder) for trial in trials]
        missing = [trial for trial, log in zip(trials, logs, strict=True) if log is None]
        if missing:
            return None, missing
        best = problem.best_rate(logs)
        ladder = problem.ladder
        first, last = ladder.index(rates[0]), ladder.index(rates[-1])
        if best == rates[0] and first > 0:
            rates = ladder[first - 1 : last + 1]
        elif best == rates[-1] and last + 1 < len(ladder):
            rates = ladder[first : last + 2]
        else:
            return best, []


def run_model(problem: Problem, tuner: Problem, model: str, seeds: tuple[int, ...], folder: Path) -> None:
    """All trials of a model that have no log yet: first those that find its rate, on ``tuner``, then the seeds."""
    rate, missing = tuned(tuner, model, folder)
    while missing:
        for trial in missing:
            report(trial, trial.run(folder))
        rate, missing = tuned(tuner, model, folder)
    for trial in (Trial(problem, model, rate, seed) for seed in seeds):
        if trial.read(folder) is None:
            report(trial, trial.run(folder))


def report(trial: Trial, log: dict) -> None:
    scores = {"validation": log["validation"][-1][1], **log["test"]}
    text = ", ".join(f"{name} {value}" for name, value in scores.items())
    print(f"{trial.name}, rate {trial.rate:g}: {text}; {log['cpu_seconds']:.0f} s", flush=True)
