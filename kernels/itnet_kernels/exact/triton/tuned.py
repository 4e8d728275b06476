"""Phase 1 of Alg. tiled_full: all tiles (B_q, B_k) that fit a device, timed, and the fastest kept for that device.

Winners are JSON, one file per device, ``{"device": ..., "configs": {"forward": {"bfloat16 d64 w128": {...}}}}``.
They are looked for in ``tuned/`` of this package and in the user's cache (``ITNET_TUNED_DIR``, otherwise
``~/.cache/itnet/tuned``), which wins. ``itnet tune`` writes the latter. What has no winner takes the best guess
of configs.py.
"""

import contextlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import torch

from .configs import (
    BACKWARD,
    FAMILIES,
    TILE_SIZES,
    Problem,
    TileFamily,
    shared_memory_bytes,
    suitable_settings,
    tile,
    tile_rows,
)

_PACKAGED = Path(__file__).parent / "tuned"
_REGISTERS = 224  # of 255, for accumulators: the rest are operands, addresses and the tile's own rows
SECONDS_PER_CANDIDATE = 4.0  # mostly the compiler
_FORCED: dict[str, dict[str, int]] = {}


def candidates(family: TileFamily, problem: Problem) -> list[dict[str, int]]:
    """Returns every (B_q, B_k) of Phase 1, with 64 or 128 rows, that fits registers and shared memory.

    The positions of a tile of the backward that is not fused are fixed: B_k alone is chosen there.
    """
    found = []
    if family is BACKWARD:
        sizes = itertools.product(TILE_SIZES, (4, 8), (1, 2, 3))
        found = [{"BK": keys, "num_warps": warps, "num_stages": stages} for keys, warps, stages in sizes]
        return [settings for settings in found if _fits(family, settings, problem)]
    for positions in TILE_SIZES:
        for keys in TILE_SIZES:
            for rows, warps in ((128, 4), (128, 8), (64, 4), (64, 8)):
                for stages in (1, 2, 3):
                    settings = tile(positions, rows, keys, warps, stages)
                    is_tile = positions <= rows <= family.most_units * positions
                    if is_tile and _fits(family, settings, problem):
                        found.append(settings)
    return found


def _fits(family: TileFamily, settings: dict[str, int], problem: Problem) -> bool:
    has_registers = registers(family, settings, problem) <= _REGISTERS
    return has_registers and shared_memory_bytes(family, settings, problem) <= problem.shared_limit


def registers(family: TileFamily, settings: dict[str, int], problem: Problem) -> int:
    """Returns the registers of a thread for the accumulators of a tile."""
    by_dim, by_keys = family.accumulators
    numbers = tile_rows(family, settings, problem) * (by_dim * problem.head_dim + by_keys * settings["BK"])
    return numbers // (32 * settings["num_warps"])


def tuned_directory() -> Path:
    return Path(os.environ.get("ITNET_TUNED_DIR") or Path.home() / ".cache" / "itnet" / "tuned")


def device_name(device: torch.device) -> str:
    """Returns what winners are kept under: the name of the GPU, or "interpreter"."""
    if device.type == "cpu":
        return "interpreter"
    return torch.get_device_module(device).get_device_name(device)


def file_of(device: str) -> str:
    """Turns NVIDIA H200 into nvidia-h200.json."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") + ".json"


def problem_key(dtype: torch.dtype, head_dim: int, width: int) -> str:
    return f"{str(dtype).removeprefix('torch.')} d{head_dim} w{width}"


@cache
def _configs_of(device: str, directory: Path) -> dict[str, dict[str, dict[str, int]]]:
    """Returns the winners of a device by kernel and problem: {} if nobody tuned it."""
    configs = {}
    for folder in (_PACKAGED, directory):
        path = folder / file_of(device)
        if path.is_file():
            for family, winners in _read(path)["configs"].items():
                configs.setdefault(family, {}).update(winners)
    return configs


def _read(path: Path) -> dict:
    """Returns the content of a device's file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        names = {family.name: set(family.configs[0].settings) for family in FAMILIES}
        is_whole = all(
            set(settings) == names[family]
            for family, winners in content["configs"].items()
            for settings in winners.values()
        )
    except (ValueError, KeyError, AttributeError, TypeError):
        is_whole = False
    if not is_whole:
        raise ValueError(f"{path} is no file of `itnet tune` for these kernels: delete it, or tune again")
    return content


def tuned_settings(family: str, device: str, key: str) -> dict[str, int] | None:
    """Returns what was found to be fastest; inside :func:`forced`, what is being timed."""
    return _FORCED.get(family) or _configs_of(device, tuned_directory()).get(family, {}).get(key)


@contextlib.contextmanager
def forced(family: str, settings: dict[str, int]) -> Iterator[None]:
    """Lets launches inside take these settings."""
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
    most: int | None = None,
) -> dict[str, dict[str, int]]:
    """Returns the fastest settings of each family by ``timer``, in seconds, of those that compile and launch.

    ``most`` bounds the candidates of a family: the default comes first, the others are spread over all of them.
    """
    winners = {}
    for family in families:
        times = []
        for settings in chosen_candidates(family, problem, most):
            try:
                times.append((timer(family, settings), settings))
            except Exception as error:  # the compiler and the driver have many ways to say no
                report(f"{family.name} {settings}: {type(error).__name__}")
        if times:
            seconds, winners[family.name] = min(times, key=lambda pair: pair[0])
            report(f"{family.name}: {winners[family.name]}, {1e3 * seconds:.3f} ms, of {len(times)} that ran")
    return winners


def chosen_candidates(family: TileFamily, problem: Problem, most: int | None = None) -> list[dict[str, int]]:
    """Returns at most ``most`` of the candidates, the default first."""
    default = suitable_settings(family, problem)[0]
    others = [settings for settings in candidates(family, problem) if settings != default]
    if most is not None and most <= len(others):
        others = [others[k * len(others) // max(most - 1, 1)] for k in range(most - 1)]
    return [default, *others]


def write(device: str, key: str, winners: dict[str, dict[str, int]], directory: Path) -> Path:
    """Adds winners to the file of a device."""
    path = directory / file_of(device)
    content = {"device": device, "configs": {}}
    if path.is_file():
        content = _read(path)
    for family, settings in winners.items():
        content["configs"].setdefault(family, {})[key] = settings
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    _configs_of.cache_clear()
    return path


def estimated_seconds(families: list[TileFamily], problem: Problem, most: int | None = None) -> float:
    return SECONDS_PER_CANDIDATE * sum(len(chosen_candidates(family, problem, most)) for family in families)
