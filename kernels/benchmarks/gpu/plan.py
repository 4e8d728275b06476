"""Every row that a run fills in, in the order in which it does, and how long that should take."""

import math
from dataclasses import dataclass

from . import models, operators, paper_tables
from .clock import LEAST_ROUNDS, MOST_ROUNDS, SECONDS_PER_TIMING, WARM_UPS, Workload
from .predictions import Predicted, Predictions
from .scope import Scope

#: Of an estimate: the compiler's seconds for a kernel in one dtype and form, kernels that checks and timings compile
#: (counted by hand: 14 kernels, their dtypes, causal and other forms, four tiles of the forward that are tuned), and
#: what building a model takes.
COMPILE_SECONDS, COMPILED_KERNELS, BUILD_SECONDS = 1.5, 110, 1.0
#: Predictions are lower bounds: each takes its slowest limit and nothing else.
SLACK = 2.5


@dataclass
class PlannedRow:
    """A row of a section of the page."""

    section: str  # operators, training steps, decoding, profiling or wallclock
    labels: dict[str, object]
    workload: Workload
    predicted: Predicted | None = None


def rows(scope: Scope, predictions: Predictions | None) -> list[PlannedRow]:
    return [
        *_operators(scope, predictions),
        *_profiling(scope, predictions),
        *_training_steps(scope, predictions),
        *_wallclock(scope, predictions),
        *_decoding(scope),
    ]


def _operators(scope: Scope, predictions: Predictions | None) -> list[PlannedRow]:
    found = []
    for model, size in scope.models.items():
        for n in scope.lengths:
            for mode in (*operators.MODES, operators.ATTENTION):
                shape = operators.shape_of(scope, size.heads, n)
                flops = operators.flops(scope, mode, shape, scope.rank)
                labels = {"model": model, "n": n, "batch": shape.batch, "mode": mode, "flops": flops}
                expected = None if predictions is None else predictions.operator(mode, size.heads, n)
                found.append(PlannedRow("operators", labels, operators.workload(scope, mode, size.heads, n), expected))
    return found


def _profiling(scope: Scope, predictions: Predictions | None) -> list[PlannedRow]:
    heads, n, found = scope.models["B"].heads, scope.text, []
    rank = math.ceil(scope.total_rank / heads)
    for method, tflops, share in paper_tables.PROFILING:
        mode = paper_tables.PROFILING_MODES[method]
        own_rank = rank if mode.startswith("low rank") else None
        flops = operators.flops(scope, mode, operators.shape_of(scope, heads, n), rank)
        labels = {"method": method, "mode": mode, "flops": flops, "paper_tflops": tflops, "paper_share": share}
        expected = None if predictions is None else predictions.operator(mode, heads, n)
        timed = operators.workload(scope, mode, heads, n, own_rank)
        found.append(PlannedRow("profiling", labels, timed, expected))
    return found


def _training_steps(scope: Scope, predictions: Predictions | None) -> list[PlannedRow]:
    found = []
    for modality in ("image", "text"):
        for model in scope.models:
            for mode in (*models.MODES, models.PEER):
                spec = models.spec(scope, modality, mode, model)
                name = models.PEERS[modality] if mode == models.PEER else mode
                n = models.positions_of(scope, modality)
                labels = {"modality": modality, "model": model, "n": n, "batch": scope.batch, "mode": name}
                expected = None if predictions is None else predictions.model(spec)
                found.append(PlannedRow("training steps", labels, models.workload(scope, spec), expected))
    return found


def _wallclock(scope: Scope, predictions: Predictions | None) -> list[PlannedRow]:
    found = []
    for row in paper_tables.WALLCLOCK:
        spec = models.spec(scope, row.modality, row.mode, row.model, is_paper_rank=True)
        labels = {"method": row.method, "benchmark": row.benchmark, "n": models.positions_of(scope, row.modality)}
        labels |= {"batch": scope.batch, "timed": models.PEERS[row.modality] if row.mode == "peer" else row.mode}
        labels |= {"paper_throughput": row.throughput, "paper_peak_gb": row.peak_gb, "paper_relative": row.relative}
        expected = None if predictions is None else predictions.model(spec)
        found.append(PlannedRow("wallclock", labels, models.workload(scope, spec), expected))
    return found


def _decoding(scope: Scope) -> list[PlannedRow]:
    return [
        PlannedRow("decoding", {"mode": name, "context": context}, models.decoding(scope, name, context))
        for name in models.DECODERS
        for context in scope.contexts
    ]


def estimated_seconds(planned: list[PlannedRow]) -> dict[str, float]:
    """Returns seconds of compiling (checks included) and of timing, from the predictions."""
    by_key = {row.workload.key: row for row in planned}
    timing = 0.0
    for row in by_key.values():
        timing += BUILD_SECONDS if row.section != "operators" else 0.1
        if row.predicted is not None:
            timing += _timed_seconds(row.predicted.forward) + _timed_seconds(row.predicted.step)
        else:
            timing += 2 * SECONDS_PER_TIMING
    return {"compiling": COMPILE_SECONDS * COMPILED_KERNELS, "timing": timing}


def _timed_seconds(predicted: float) -> float:
    """Returns the seconds of all rounds of one timing."""
    one = SLACK * predicted
    rounds = min(max(SECONDS_PER_TIMING / max(one, 1e-6), LEAST_ROUNDS), MOST_ROUNDS)
    return (WARM_UPS + rounds) * one
