"""Tile configurations: which ones are tried, which fit a device, and how to pin one (Phase 1 of Alg. tiled_full).

The first configuration that fits is the default. With more than one, ``triton.autotune`` times them once per
(w, d_h, dtypes, flags), never per length, and keeps the winner on disk where Triton can. Environment variables:

* ``ITNET_AUTOTUNE=0``: always the default, no timing (so does ``torch.use_deterministic_algorithms``);
* ``ITNET_FORWARD_CONFIG``, ``ITNET_BACKWARD_CONFIG``: this one, e.g. ``ROWS=128,BK=64,num_warps=4,num_stages=3``
  (the backward has no ``ROWS``).
"""

import inspect
import os
from typing import NamedTuple

import torch

try:
    import triton
except ImportError as error:
    raise ImportError('the triton backend needs the triton package: pip install "itnet[triton]"') from error


class TileConfig(NamedTuple):
    """One way to tile a kernel. ROWS: (position, hidden unit) pairs of a program; BK: keys per iteration."""

    settings: dict[str, int]
    majors: tuple[int, ...] | None = None  # compute capabilities on which it does not spill; None: any device
    float32: bool = True  # whether it leaves registers for float32 operands, which count three times (3xTF32)


class TileFamily(NamedTuple):
    """The configurations of one kernel, best guess first; the last one is the smallest and has to run anywhere."""

    name: str
    keys: tuple[str, ...]  # constants of the kernel that have a winner of their own
    configs: tuple[TileConfig, ...]
    matrices: int  # [ROWS, D] operands in shared memory, and as many accumulators in registers


class Problem(NamedTuple):
    """What decides which configurations fit."""

    head_dim: int
    itemsize: int  # bytes of an operand's element
    major: int | None  # compute capability of an NVIDIA device
    shared_limit: int  # bytes of shared memory that one program may use


_FLAGS = ("W", "D", "HAS_BIAS", "UNIFORM", "IS_CAUSAL", "GELU", "PRECISION")
FORWARD = TileFamily(
    "forward",
    _FLAGS,
    (
        TileConfig({"ROWS": 128, "BK": 64, "num_warps": 4, "num_stages": 3}, float32=False),
        TileConfig({"ROWS": 128, "BK": 64, "num_warps": 8, "num_stages": 2}),
        TileConfig({"ROWS": 64, "BK": 64, "num_warps": 4, "num_stages": 2}),
        TileConfig({"ROWS": 64, "BK": 32, "num_warps": 4, "num_stages": 1}),
    ),
    matrices=1,
)
BACKWARD = TileFamily(
    "backward",
    (*_FLAGS, "NEEDS_MEASURE"),
    (
        TileConfig({"BK": 64, "num_warps": 8, "num_stages": 2}, majors=(9,), float32=False),
        TileConfig({"BK": 64, "num_warps": 8, "num_stages": 1}, majors=(9, 10), float32=False),
        TileConfig({"BK": 32, "num_warps": 8, "num_stages": 2}),
        TileConfig({"BK": 16, "num_warps": 4, "num_stages": 1}),
    ),
    matrices=2,
)
# Padding of the key axis: every BK divides it.
KEY_MULTIPLE = 128
# Positions of a backward tile. Partial sums are stored per tile, so that the host has to know its shape.
BACKWARD_POSITIONS = 16


def backward_units(head_dim: int, itemsize: int) -> int:
    """Hidden units of a backward tile: accumulators and operands [16 * units, d_h] must fit into the registers."""
    units = 4 if head_dim > 64 else 8
    return units if itemsize == 2 or is_interpreted() else units // 4


def tile_rows(family: TileFamily, settings: dict[str, int], head_dim: int, itemsize: int) -> int:
    """Rows (position, hidden unit) of a program's tile."""
    return settings["ROWS"] if family is FORWARD else BACKWARD_POSITIONS * backward_units(head_dim, itemsize)


def shared_memory_bytes(family: TileFamily, settings: dict[str, int], problem: Problem) -> int:
    """Upper estimate of a program's shared memory: key and value tiles per stage, operands, pair tiles."""
    rows = tile_rows(family, settings, problem.head_dim, problem.itemsize)
    key_tiles = 2 * settings["num_stages"] * settings["BK"] * problem.head_dim
    pair_tiles = (2 * family.matrices - 1) * rows * settings["BK"]
    elements = key_tiles + family.matrices * rows * problem.head_dim + pair_tiles
    return 2 * elements if problem.itemsize == 2 else 5 * elements  # 3xTF32 keeps parts of float32 operands as well


def fits(family: TileFamily, config: TileConfig, problem: Problem) -> bool:
    """Whether shared memory and registers suffice: accumulators and pair tiles may take 160 registers of a thread."""
    settings = config.settings
    rows = tile_rows(family, settings, problem.head_dim, problem.itemsize)
    accumulated = rows * family.matrices * (problem.head_dim + settings["BK"])
    return (
        shared_memory_bytes(family, settings, problem) <= problem.shared_limit
        and accumulated <= 160 * 32 * settings["num_warps"]
        and (config.majors is None or problem.major in config.majors)
        and (config.float32 or problem.itemsize == 2)
    )


def fitting_settings(family: TileFamily, problem: Problem) -> list[dict[str, int]]:
    """Settings of the configurations that fit, best guess first; the smallest if none does."""
    fitting = [config.settings for config in family.configs if fits(family, config, problem)]
    return fitting or [family.configs[-1].settings]


def is_interpreted() -> bool:
    """Whether Triton runs kernels in Python, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def pinned_settings(family: TileFamily) -> dict[str, int] | None:
    """What the environment asks for."""
    variable = f"ITNET_{family.name.upper()}_CONFIG"
    text = os.environ.get(variable)
    if not text:
        return None
    names = set(family.configs[0].settings)
    try:
        settings = {name.strip(): int(value) for name, value in (item.split("=") for item in text.split(","))}
    except ValueError:
        settings = {}
    if set(settings) != names:
        raise ValueError(f"`{variable}` ({text!r}) must give {sorted(names)} as NAME=INTEGER, separated by commas")
    return settings


def autotune(family: TileFamily):
    """``triton.autotune`` over what fits the device. A pinned configuration, or the interpreter's, is not timed."""
    pinned = pinned_settings(family)
    if pinned is None and is_interpreted():
        pinned = family.configs[0].settings
    if pinned is not None:
        return triton.autotune([_triton_config(pinned)], key=[])
    configs = [_triton_config(config.settings) for config in family.configs]
    prune = {"early_config_prune": lambda configs, args, **kwargs: _prune(family, configs, args | kwargs)}
    options = {"cache_results": True} if "cache_results" in inspect.signature(triton.autotune).parameters else {}
    return triton.autotune(configs, key=list(family.keys), prune_configs_by=prune, **options)


def _triton_config(settings: dict[str, int]) -> "triton.Config":
    meta = {name: value for name, value in settings.items() if not name.startswith("num_")}
    return triton.Config(meta, num_warps=settings["num_warps"], num_stages=settings["num_stages"])


def _prune(family: TileFamily, configs: list, arguments: dict) -> list:
    """What is timed: the configurations that fit the device, or only the best guess."""
    keys = arguments["p_keys"]
    target = triton.runtime.driver.active.get_current_target()
    device = triton.runtime.driver.active.utils.get_device_properties(keys.device.index or 0)
    major = target.arch // 10 if target.backend == "cuda" else None
    problem = Problem(arguments["D"], keys.element_size(), major, shared_limit=device["max_shared_mem"])
    fitting = fitting_settings(family, problem)
    if os.environ.get("ITNET_AUTOTUNE", "1") == "0" or torch.are_deterministic_algorithms_enabled():
        fitting = fitting[:1]
    settings = [config.kwargs | {"num_warps": config.num_warps, "num_stages": config.num_stages} for config in configs]
    return [config for config, plain in zip(configs, settings, strict=True) if plain in fitting]
