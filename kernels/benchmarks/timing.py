"""Timing on machines that are not quiet: both sides of a ratio run in turn, and the median of many ratios is kept."""

import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from statistics import median

import psutil
import torch


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def interleaved(sides: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Returns seconds of every side in every round, after one round that is not counted."""
    for run in sides.values():
        run()
    times = {name: [] for name in sides}
    for _ in range(rounds):
        for name, run in sides.items():
            times[name].append(seconds(run))
    return times


def median_ratio(numerator: list[float], denominator: list[float]) -> float:
    """Returns the median over the rounds of the ratio within a round: what slows the machine down slows both sides of
    it."""
    return median(a / b for a, b in zip(numerator, denominator, strict=True))


def own_process(module: str, *arguments: str, environment: dict[str, str] | None = None) -> str:
    """Returns the last line that ``module`` of this folder prints in a process of its own."""
    command = [sys.executable, "-m", module, *arguments]
    here = os.path.dirname(os.path.abspath(__file__))
    done = subprocess.run(command, cwd=here, env=os.environ | (environment or {}), stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command[1:])}` failed with code {done.returncode}; see its messages above")
    return done.stdout.splitlines()[-1]


def peak_bytes(module: str, *arguments: str, environment: dict[str, str] | None = None) -> int:
    """Measures how the peak resident memory grows while ``module`` runs its work in a process of its own.

    Freed tensors go back to the system at once there: memory that the C library keeps for later would otherwise hide
    what is allocated next.
    """
    at_once = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    return int(own_process(module, *arguments, environment=at_once | (environment or {})))


class PeakMemory:
    """Largest resident memory inside the block: ``peak``, and ``bytes`` above what was resident on entering it."""

    def __enter__(self) -> "PeakMemory":
        self._process, self._done = psutil.Process(), threading.Event()
        self._start = self.peak = self._process.memory_info().rss
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._done.set()
        self._thread.join()
        self.bytes = self.peak - self._start

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self.peak = max(self.peak, self._process.memory_info().rss)


def machine() -> dict[str, object]:
    """Returns what a reader needs to compare figures."""
    return {
        "processor": platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
