"""Phase 1 of Alg. tiled_full: all tiles (B_q, B_k) that fit a device, timed, and the fastest kept for that device.

Winners are JSON, one file per device, ``{"device": ..., "configs": {"forward": {"bfloat16 d64 w128": {...}}}}``.
They are looked for in ``tuned/`` of this package and in the user's cache (``ITNET_TUNED_DIR``, otherwise
``~/.cache/itnet/tuned``), which wins. ``itnet tune`` writes the latter. What has no winner takes the best guess
of configs.py.
"""

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import torch

from .configs import LARGEST_UNITS, TILE_SIZES, Problem, TileFamily, shared_memory_bytes, tile

_PACKAGED = Path(__file__).parent / "tuned"
_REGISTERS = 224  # of 255, for accumulators: the rest are operands, addresses and the tile's own rows
SECONDS_PER_CANDIDATE = 4.0  # mostly the compiler
_FORCED: dict[str, dict[str, int]] = {}


def candidates(family: TileFamily, problem: Problem) -> list[dict[str, int]]:
    """Every (B_q, B_k) of Phase 1, with 64 or 128 rows, that fits registers and shared memory."""
    found = []
    for positions in TILE_SIZES:
        for keys in TILE_SIZES:
            for rows, warps in ((128, 4), (128, 8), (64, 4), (64, 8)):
                for stages in (1, 2, 3):
                    settings = tile(positions, rows, keys, warps, stages)
                    fits = positions <= rows <= LARGEST_UNITS * positions
                    fits = fits and registers(family, settings, problem) <= _REGISTERS
                    if fits and shared_memory_bytes(family, settings, problem) <= problem.shared_limit:
                        found.append(settings)
    return found


def registers(family: TileFamily, settings: dict[str, int], problem: Problem) -> int:
    """Those of a thread for the accumulators of a tile."""
    by_dim, by_keys = family.accumulators
    numbers = settings["ROWS"] * (by_dim * problem.head_dim + by_keys * settings["BK"])
    return numbers // (32 * settings["num_warps"])


def tuned_directory() -> Path:
    return Path(os.environ.get("ITNET_TUNED_DIR") or Path.home() / ".cache" / "itnet" / "tuned")


def file_of(device: str) -> str:
    """NVIDIA H200 -> nvidia-h200.json"""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") + ".json"


def problem_key(dtype: torch.dtype, head_dim: int, width: int) -> str:
    return f"{str(dtype).removeprefix('torch.')} d{head_dim} w{width}"


@cache
def _configs_of(device: str, directory: Path) -> dict[str, dict[str, dict[str, int]]]:
    """The winners of a device by kernel and problem: {} if nobody tuned it."""
    configs = {}
    for folder in (_PACKAGED, directory):
        path = folder / file_of(device)
        if path.is_file():
            for family, winners in json.loads(path.read_text(encoding="utf-8"))["configs"].items():
                configs.setdefault(family, {}).update(winners)
    return configs


def tuned_settings(family: str, device: str, key: str) -> dict[str, int] | None:
    """What was found to be fastest; inside :func:`forced`, what is being timed."""
    return _FORCED.get(family) or _configs_of(device, tuned_directory()).get(family, {}).get(key)


@contextlib.contextmanager
def forced(family: str, settings: dict[str, int]) -> Iterator[None]:
    """Launches inside take these settings."""
    _FORCED[family] = settings
    try:
        yield
    finally:
        del _FORCED[family]


def tune(
    families: list[TileFamily],
    problem: Problem,
    timer: Callable[[TileFamily, dict[str, int]], float],
    report: Callable[[str], object] = print,
) -> dict[str, dict[str, int]]:
    """The fastest settings of each family by ``timer``, in seconds; what does not compile or launch is left out."""
    winners = {}
    for family in families:
        times = []
        for settings in candidates(family, problem):
            try:
                times.append((timer(family, settings), settings))
            except Exception as error:  # the compiler and the driver have many ways to say no
                report(f"{family.name} {settings}: {type(error).__name__}")
        if times:
            seconds, winners[family.name] = min(times, key=lambda pair: pair[0])
            report(f"{family.name}: {winners[family.name]}, {1e3 * seconds:.3f} ms, of {len(times)} that ran")
    return winners


def write(device: str, key: str, winners: dict[str, dict[str, int]], directory: Path) -> Path:
    """Adds winners to the file of a device."""
    path = directory / file_of(device)
    content = {"device": device, "configs": {}}
    if path.is_file():
        content = json.loads(path.read_text(encoding="utf-8"))
    for family, settings in winners.items():
        content["configs"].setdefault(family, {})[key] = settings
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    _configs_of.cache_clear()
    return path


def estimated_seconds(families: list[TileFamily], problem: Problem) -> float:
    return SECONDS_PER_CANDIDATE * sum(len(candidates(family, problem)) for family in families)
