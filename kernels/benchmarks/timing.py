"""Timing on machines that are not quiet: both sides of a ratio run in turn, and the median of many ratios is kept."""

import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median

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
    """Growth of the peak resident memory while ``module`` runs its work in a process of its own."""
    command = [sys.executable, "-m", module, *arguments]
    here = os.path.dirname(os.path.abspath(__file__))
    out = subprocess.run(command, cwd=here, capture_output=True, text=True, check=True)
    return int(out.stdout.split()[-1])


def resident_peak() -> int:
    """Largest resident memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def machine() -> dict[str, object]:
    """What a reader needs to compare figures."""
    return {
        "processor": platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
