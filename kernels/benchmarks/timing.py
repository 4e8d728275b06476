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
    """Seconds of every side in every round, after one round that is not counted."""
    for run in sides.values():
        run()
    times = {name: [] for name in sides}
    for _ in range(rounds):
        for name, run in sides.items():
            times[name].append(seconds(run))
    return times


def median_ratio(numerator: list[float], denominator: list[float]) -> float:
    """Median over the rounds of the ratio within a round: what slows the machine down slows both sides of it."""
    return median(a / b for a, b in zip(numerator, denominator, strict=True))


def peak_bytes(module: str, *arguments: str) -> int:
    """Growth of the peak resident memory while ``module`` runs its work in a process of its own.

    Freed tensors go back to the system at once there: memory that the C library keeps for later would otherwise hide
    what is allocated next.
    """
    command = [sys.executable, "-m", module, *arguments]
    here = os.path.dirname(os.path.abspath(__file__))
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    out = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, check=True)
    return int(out.stdout.split()[-1])


class PeakMemory:
    """Largest resident memory inside the block, above what was resident on entering it, in ``bytes``."""

    def __enter__(self) -> "PeakMemory":
        self._process, self._done = psutil.Process(), threading.Event()
        self._start = self._peak = self._process.memory_info().rss
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._done.set()
        self._thread.join()
        self.bytes = self._peak - self._start

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self._peak = max(self._peak, self._process.memory_info().rss)


def machine() -> dict[str, object]:
    """What a reader needs to compare figures."""
    return {
        "processor": platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
