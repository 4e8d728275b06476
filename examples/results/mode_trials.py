"""Trials of mode_accuracy.py: one model, trained once with one learning rate and seed, and its log.

The learning rate of a model is the best of those of its problem by the validation score at the end of training, at one
seed; while the best is the lowest or the highest that was tried, the next one on LADDER is tried too. Test data are
read after training by trials with that rate and other seeds, and by no others.
"""

import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from mode_problems import Problem
from torch import nn
from transformers import get_cosine_schedule_with_warmup

from modeling_itnet import optimizer_param_groups

LADDER = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
TUNING_SEED = 0
SEEDS = (1, 2, 3)
WARM_UP = 0.05  # share of the steps
CURVE = 8  # validation scores in the course of a trial
CLIPPED = 1.0  # largest norm of a gradient


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
    def name(self) -> str:
        end = f"rate-{self.rate:g}" if self.is_tuning else f"seed-{self.seed}"
        return f"{self.problem.name}.{self.model}.{end}"

    def read(self, folder: Path) -> dict | None:
        """The log of this trial, if it is there; one of other steps or rate is an error."""
        path = folder / f"{self.name}.json"
        if not path.is_file():
            return None
        log = json.loads(path.read_text(encoding="utf-8"))
        for name, wanted in (("steps", self.problem.steps), ("learning_rate", self.rate)):
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
        curve, spent = train(model, problem, self.rate, self.seed)
        tests = problem.tests() if not self.is_tuning else {}
        log = {
            "problem": problem.name,
            "model": self.model,
            "settings": {**problem.shared, **problem.contestants[self.model].settings},
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "seed": self.seed,
            "learning_rate": self.rate,
            "weight_decay": problem.weight_decay,
            "steps": problem.steps,
            "batch_size": problem.batch_size,
            "metric": problem.metric,
            "validation": curve,  # [step, score]; the score is None if training diverged
            "test": {name: evaluate(model, problem, batches) for name, batches in tests.items()},
            "training_cpu_seconds": round(spent, 2),
            "cpu_seconds": round(time.process_time() - start, 2),
            "threads": torch.get_num_threads(),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        }
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(log, indent=1, default=str) + "\n"
        (folder / f"{self.name}.json").write_text(text, encoding="utf-8")
        return log


def train(model: nn.Module, problem: Problem, rate: float, seed: int) -> tuple[list[list], float]:
    """AdamW with a warm-up and a cosine: the validation curve, and the CPU seconds of the steps alone."""
    optimizer = torch.optim.AdamW(optimizer_param_groups(model, problem.weight_decay), lr=rate)
    warm_up = round(WARM_UP * problem.steps)
    schedule = get_cosine_schedule_with_warmup(optimizer, warm_up, problem.steps)
    marks = {math.ceil(problem.steps * (part + 1) / CURVE) for part in range(CURVE)}
    curve, spent = [], 0.0
    for step in range(1, problem.steps + 1):
        start = time.process_time()
        model.train()
        optimizer.zero_grad()
        loss = model(**problem.batch(seed, step)).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIPPED)
        optimizer.step()
        schedule.step()
        spent += time.process_time() - start
        if not loss.isfinite():
            return [*curve, [step, None]], spent
        if step in marks:
            curve.append([step, evaluate(model, problem, problem.validation())])
    return curve, spent


@torch.no_grad()
def evaluate(model: nn.Module, problem: Problem, batches: Iterator[dict]) -> float | None:
    """The score of a model, or None where it is no number."""
    score = problem.score(model.eval(), batches)
    return float(f"{score:.6g}") if math.isfinite(score) else None


def tuned(problem: Problem, model: str, folder: Path) -> tuple[float | None, list[Trial]]:
    """The learning rate that logs decide for a model, or None and the trials that are missing for it."""
    rates = problem.rates
    while True:
        trials = [Trial(problem, model, rate, TUNING_SEED) for rate in rates]
        logs = [trial.read(folder) for trial in trials]
        missing = [trial for trial, log in zip(trials, logs, strict=True) if log is None]
        if missing:
            return None, missing
        best = problem.better({log["learning_rate"]: log["validation"][-1][1] for log in logs})
        first, last = LADDER.index(rates[0]), LADDER.index(rates[-1])
        if best == rates[0] and first > 0:
            rates = LADDER[first - 1 : last + 1]
        elif best == rates[-1] and last + 1 < len(LADDER):
            rates = LADDER[first : last + 2]
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
