"""Tile configurations: which ones are tried, which suit a device, and how to pin one (Phase 1 of Alg. tiled_full).

The first configuration that suits is the default. With more than one, ``triton.autotune`` times them once per
(w, d_h, dtypes, flags, size class) and keeps the winner on disk where Triton can; launches too small to be timed take
the default. Which tiles suit which device was found by compiling them (``kernels/benchmarks/inspect_kernels.py
--check``): none spills in its loop, computes anything twice, or has its products serialised. Environment variables:

* ``ITNET_AUTOTUNE=0``: always the default, no timing (so does ``torch.use_deterministic_algorithms``);
* ``ITNET_FORWARD_CONFIG``, ``ITNET_BACKWARD_CONFIG``, ``ITNET_FUSED_BACKWARD_CONFIG``,
  ``ITNET_POSITION_GRADIENT_CONFIG``, ``ITNET_POSITION_WEIGHTS_CONFIG``: this one, e.g.
  ``BP=16,ROWS=128,BK=64,num_warps=4,num_stages=3`` (the backward that is not fused has neither ``BP`` nor ``ROWS``,
  and a tile of the fused one has as many rows as positions).
"""

import inspect
import os
from typing import NamedTuple

import torch

from .gelu import triton
from .sizes import TRITON_HEAD_DIMS

#: (B_q, B_k) of Phase 1: positions of a query tile and keys of a key tile.
TILE_SIZES = (16, 32, 64, 128)


class TileConfig(NamedTuple):
    """One way to tile a kernel, and where it is good.

    BP: positions of a tile; ROWS: its (position, hidden unit) pairs; BK: keys per iteration.
    """

    settings: dict[str, int]
    itemsize: int | None = None  # bytes of an operand's element; None: any. float32 counts three times (3xTF32)
    head_dims: tuple[int, ...] = TRITON_HEAD_DIMS
    devices: tuple[str, ...] | None = None  # kinds of device_kind; None: any


class TileFamily(NamedTuple):
    """The configurations of one kernel, best guess first; the last one is the smallest and has to run anywhere."""

    name: str
    keys: tuple[str, ...]  # arguments of the kernel that have a winner of their own
    configs: tuple[TileConfig, ...]
    matrices: int  # [ROWS, D] operands in shared memory
    accumulators: tuple[int, int]  # float32 accumulators in registers: [ROWS, D] and [ROWS, BK]
    added_to: tuple[str, ...] = ()  # arguments that a launch adds to: timing has to put them back
    most_units: int = 8  # hidden units of a tile, ROWS / BP


class Problem(NamedTuple):
    """What the choice of a configuration depends on."""

    head_dim: int
    itemsize: int  # bytes of an operand's element
    major: int | None  # compute capability of an NVIDIA device
    shared_limit: int  # bytes of shared memory that one program may use


def tile(bp: int, rows: int, bk: int, warps: int, stages: int) -> dict[str, int]:
    return {"BP": bp, "ROWS": rows, "BK": bk, "num_warps": warps, "num_stages": stages}


_FLAGS = ("W", "D", "HAS_BIAS", "IS_CAUSAL", "GELU", "PRECISION", "size")
_UP_TO_64, _128, _NVIDIA = (16, 32, 64), (128,), ("hopper", "blackwell", "ampere")
FORWARD = TileFamily(
    "forward",
    _FLAGS,
    (
        TileConfig(tile(16, 128, 64, 4, 3), 2, _UP_TO_64),
        TileConfig(tile(16, 128, 64, 8, 2), 2, _UP_TO_64),
        TileConfig(tile(16, 128, 64, 8, 2), 2, _128, ("hopper", "blackwell")),
        TileConfig(tile(16, 64, 64, 4, 2), 2),
        TileConfig(tile(16, 128, 64, 8, 2), 4, _UP_TO_64, ("hopper",)),
        TileConfig(tile(16, 128, 32, 8, 2), 4, _UP_TO_64, ("hopper", "blackwell", "other")),
        TileConfig(tile(16, 128, 16, 8, 1), 4, _UP_TO_64, ("ampere",)),
        TileConfig(tile(16, 128, 16, 8, 1), 4, _128, ("hopper", "ampere")),
        TileConfig(tile(16, 64, 32, 8, 1), 4, _128, ("blackwell",)),
        TileConfig(tile(16, 64, 32, 4, 1), 4, _UP_TO_64, ("hopper", "blackwell", "other")),
        TileConfig(tile(16, 64, 32, 4, 1), 2),
    ),
    matrices=1,
    accumulators=(1, 1),
)
# A warp multiplies 16 rows by 8 keys. Where Triton spreads the warps over rows only (BK >= d_h) or keys only, a tile
# with fewer of them is computed several times: hence the number of warps below.
BACKWARD = TileFamily(
    "backward",
    (*_FLAGS, "NEEDS_MEASURE"),
    (
        TileConfig({"BK": 64, "num_warps": 8, "num_stages": 2}, 2, _UP_TO_64, ("hopper",)),
        TileConfig({"BK": 64, "num_warps": 8, "num_stages": 1}, 2, _UP_TO_64, ("hopper", "blackwell")),
        TileConfig({"BK": 32, "num_warps": 8, "num_stages": 2}, 2, _UP_TO_64, ("blackwell",)),
        TileConfig({"BK": 64, "num_warps": 8, "num_stages": 1}, 2, _128, ("hopper", "blackwell", "ampere")),
        TileConfig({"BK": 64, "num_warps": 4, "num_stages": 1}, 2, (16, 32), ("ampere",)),
        TileConfig({"BK": 32, "num_warps": 4, "num_stages": 2}, 2, (64,), ("ampere",)),
        TileConfig({"BK": 32, "num_warps": 4, "num_stages": 1}, 4, (64, 128), ("hopper", "blackwell", "ampere")),
        TileConfig({"BK": 16, "num_warps": 2, "num_stages": 1}, 4, (32,), ("hopper", "blackwell", "ampere")),
        TileConfig({"BK": 32, "num_warps": 2, "num_stages": 1}, 4, (16,), ("hopper", "blackwell", "ampere")),
        TileConfig({"BK": 16, "num_warps": 4, "num_stages": 1}, devices=("other",)),
    ),
    matrices=2,
    accumulators=(2, 2),
)
# Half precision and heads of at most 64 features, as all kernels below.
FUSED_BACKWARD = TileFamily(
    "fused_backward",
    (*_FLAGS, "NEEDS_MEASURE"),
    (
        TileConfig(tile(128, 128, 64, 8, 2), devices=("hopper",)),
        TileConfig(tile(128, 128, 32, 8, 1), devices=("ampere",)),
        TileConfig(tile(64, 64, 32, 4, 1), devices=("ampere", "other")),
    ),
    matrices=2,
    accumulators=(2, 2),
    added_to=("p_dqueries", "p_dkeys", "p_dmeasure", "p_dcontent", "p_dw2"),
    most_units=1,
)
POSITION_GRADIENT = TileFamily(
    "position_gradient",
    tuple(name for name in _FLAGS if name != "HAS_BIAS"),
    (
        TileConfig(tile(32, 64, 128, 8, 2), devices=("hopper",)),
        TileConfig(tile(32, 64, 64, 4, 1), devices=("other",)),
    ),
    matrices=2,
    accumulators=(0, 3),
)
POSITION_WEIGHTS = TileFamily(
    "position_weights",
    (*(name for name in _FLAGS if name != "HAS_BIAS"), "HAS_DISTANCE", "BL"),
    (
        TileConfig(tile(16, 128, 64, 8, 2), devices=("hopper",)),
        TileConfig(tile(16, 128, 32, 8, 1), devices=("ampere",)),
        TileConfig(tile(16, 64, 32, 4, 2), devices=("ampere",)),
        TileConfig(tile(16, 64, 32, 4, 1), devices=("other",)),
    ),
    matrices=2,
    accumulators=(2, 2),
    added_to=("p_dfeatures", "p_ddistance"),
)
FAMILIES = (FORWARD, BACKWARD, FUSED_BACKWARD, POSITION_GRADIENT, POSITION_WEIGHTS)
# Padding of the key axis: every BK divides it.
KEY_MULTIPLE = 128
# Positions of a tile of BACKWARD. Its partial sums are stored per tile, so that the host has to know its shape.
BACKWARD_POSITIONS = 16


def device_kind(major: int | None) -> str:
    """Names the matrix instructions of a device: of warp groups, of tensor memory, of warps, or another maker's."""
    return {None: "other", 9: "hopper", 10: "blackwell", 11: "blackwell"}.get(major, "ampere")


def backward_units(head_dim: int, itemsize: int, major: int | None) -> int:
    """Returns the hidden units of a backward tile, whose accumulators [16 * units, d_h] must fit into registers."""
    if is_interpreted():
        return 8
    kind = device_kind(major)
    if itemsize == 4:
        return 1 if head_dim > 64 else 2
    if head_dim > 64:
        return 2 if kind == "hopper" else 4
    return 4 if kind == "ampere" else 8


def tile_rows(family: TileFamily, settings: dict[str, int], problem: Problem) -> int:
    """Returns the rows (position, hidden unit) of a program's tile."""
    if family is not BACKWARD:
        return settings["ROWS"]
    return BACKWARD_POSITIONS * backward_units(problem.head_dim, problem.itemsize, problem.major)


def shared_memory_bytes(family: TileFamily, settings: dict[str, int], problem: Problem) -> int:
    """Estimates a program's shared memory from above: key tiles per stage, operands, pair tiles, W2 of the tile."""
    rows, keys, dim = tile_rows(family, settings, problem), settings["BK"], problem.head_dim
    key_tiles = (2 if family is BACKWARD else 1) * settings["num_stages"] * keys * dim  # keys, and values
    pair_tiles = (2 * family.matrices - 1) * rows * keys
    elements = key_tiles + family.matrices * rows * dim + pair_tiles
    if family in (FUSED_BACKWARD, POSITION_GRADIENT, POSITION_WEIGHTS):
        elements += rows // settings["BP"] * dim * dim
    return 2 * elements if problem.itemsize == 2 else 5 * elements  # 3xTF32 keeps parts of float32 operands as well


def suitable_settings(family: TileFamily, problem: Problem) -> list[dict[str, int]]:
    """Returns the settings that are meant for a problem and fit its shared memory, best guess first.

    If there are none, it is the smallest configuration.
    """
    suitable = [
        config.settings
        for config in family.configs
        if config.itemsize in (None, problem.itemsize)
        and problem.head_dim in config.head_dims
        and (config.devices is None or device_kind(problem.major) in config.devices)
        and shared_memory_bytes(family, config.settings, problem) <= problem.shared_limit
    ]
    return suitable or [family.configs[-1].settings]


# Elements (pairs times hidden units) of a launch that is worth timing: some 10 microseconds of a large GPU.
_LEAST_TIMED = 2**24


def size_class(elements: int) -> int:
    """Says which launches share a winner: 0 for those too small to be timed, then one class per factor of 16."""
    return 0 if elements < _LEAST_TIMED else 1 + ((elements // _LEAST_TIMED).bit_length() - 1) // 4


def is_interpreted() -> bool:
    """Says whether Triton runs kernels in Python, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def pinned_settings(family: TileFamily) -> dict[str, int] | None:
    """Returns the configuration that the environment asks for."""
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
    """Applies ``triton.autotune`` to what suits the device. A configuration that was pinned or tuned is not timed."""
    pinned = pinned_settings(family)
    if pinned is not None:
        return triton.autotune([_triton_config(pinned)], key=[])
    distinct = list({tuple(config.settings.items()): config.settings for config in family.configs}.values())
    distinct *= 2 if len(distinct) == 1 else 1  # Triton asks nobody about a single one
    configs = [_triton_config(settings) for settings in distinct]
    prune = {"early_config_prune": lambda configs, args, **kwargs: _prune(family, configs, args | kwargs)}
    options = {"cache_results": True} if "cache_results" in inspect.signature(triton.autotune).parameters else {}
    options |= {"restore_value": list(family.added_to)} if family.added_to else {}
    return triton.autotune(configs, key=list(family.keys), prune_configs_by=prune, **options)


def _triton_config(settings: dict[str, int]) -> "triton.Config":
    meta = {name: value for name, value in settings.items() if not name.startswith("num_")}
    return triton.Config(meta, num_warps=settings["num_warps"], num_stages=settings["num_stages"])


def _settings(config: "triton.Config") -> dict[str, int]:
    return config.kwargs | {"num_warps": config.num_warps, "num_stages": config.num_stages}


def _prune(family: TileFamily, configs: list, arguments: dict) -> list:
    """Returns what is timed: what suits the device. The winner of ``itnet tune``, or the best guess, stands alone."""
    from .tuned import device_name, problem_key, tuned_settings  # which reads this module's tiles

    keys = arguments["p_keys"]
    key = problem_key(keys.dtype, arguments["D"], arguments["W"])
    tuned = tuned_settings(family.name, device_name(keys.device), key)
    if tuned is not None and not torch.are_deterministic_algorithms_enabled():
        return [_triton_config(tuned)]
    if is_interpreted():
        return configs[:1]
    target = triton.runtime.driver.active.get_current_target()
    device = triton.runtime.driver.active.utils.get_device_properties(keys.device.index or 0)
    major = target.arch // 10 if target.backend == "cuda" else None
    problem = Problem(arguments["D"], keys.element_size(), major, shared_limit=device["max_shared_mem"])
    suitable = suitable_settings(family, problem)
    is_timed = os.environ.get("ITNET_AUTOTUNE", "1") != "0" and arguments["size"] > 0
    if not is_timed or torch.are_deterministic_algorithms_enabled():
        suitable = suitable[:1]
    by_settings = {tuple(_settings(config).items()): config for config in configs}
    return [by_settings[tuple(settings.items())] for settings in suitable]
