"""Times and memory of a device: events on a GPU (CUDA and ROCm), the host's clock in the interpreter."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import torch

#: Device time that a timing may take beyond its least number of rounds.
SECONDS_PER_TIMING = 0.4
LEAST_ROUNDS, MOST_ROUNDS, WARM_UPS = 3, 20, 2


class Runs(NamedTuple):
    """What is timed of a workload."""

    forward: Callable[[], object]
    step: Callable[[], object] | None = None  # with the backward, and with the optimiser of a model
    per_run: int = 1  # tokens that a run decodes


@dataclass
class Workload:
    """Something to time, built when its turn comes. Equal keys are the same workload, timed once."""

    key: tuple
    build: Callable[[], Runs]


@dataclass
class Clock:
    """Times workloads until its time is up."""

    device: torch.device
    seconds: float  # that all timings may take
    known: dict[tuple, dict] = field(default_factory=dict)

    def __post_init__(self):
        self.is_gpu = self.device.type == "cuda"
        self.start = time.perf_counter()

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.start

    def measure(self, workload: Workload) -> dict:
        """Returns milliseconds of forward and step and the peak memory; or why there are none."""
        if workload.key not in self.known:
            if self.elapsed > self.seconds:
                return {"failure": "not measured: time was up"}  # and not known: nobody tried
            self.known[workload.key] = self._measure(workload)
        return self.known[workload.key]

    def _measure(self, workload: Workload) -> dict:
        try:
            runs = workload.build()
            before = self._reset_peak()
            found = {"forward_ms": self._milliseconds(runs.forward) / runs.per_run}
            if runs.step is not None:
                found["step_ms"] = self._milliseconds(runs.step) / runs.per_run
            return found | ({"peak_mb": self._peak(before)} if self.is_gpu else {})
        except torch.OutOfMemoryError:
            return {"failure": "out of memory"}
        except Exception as error:  # one workload that fails leaves the others their figures
            return {"failure": f"{type(error).__name__}: {error}"[:300]}
        finally:
            runs = None
            if self.is_gpu:  # what one workload leaves behind is not to count for the next
                gc.collect()
                torch.cuda.empty_cache()

    def _milliseconds(self, run: Callable[[], object]) -> float:
        """Returns the median, after runs that compile and tune; without these in the interpreter, which does
        neither."""
        if not self.is_gpu:
            return self._once(run)
        for _ in range(WARM_UPS):
            last = self._once(run)
        rounds = int(1e3 * SECONDS_PER_TIMING / max(last, 1e-3))
        return median(self._once(run) for _ in range(min(max(rounds, LEAST_ROUNDS), MOST_ROUNDS)))

    def _once(self, run: Callable[[], object]) -> float:
        if not self.is_gpu:
            start = time.perf_counter()
            run()
            return 1e3 * (time.perf_counter() - start)
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop)

    def _reset_peak(self) -> int:
        if not self.is_gpu:
            return 0
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def _peak(self, before: int) -> float:
        """Returns megabytes beyond the weights and inputs that were there."""
        return (torch.cuda.max_memory_allocated() - before) / 2**20
