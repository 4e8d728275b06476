"""Tiles of the list kernels: KC hidden units of a query times BK keys, by device, dtype and head size.

Found by compiling them (``kernels/benchmarks/inspect_modes.py --check``): none spills in its loop or has its products
serialised, and all fit the shared memory. Lists are short, so that nothing is tuned.
"""

from typing import NamedTuple

from ...exact.triton.configs import device_kind, is_interpreted


class ListTile(NamedTuple):
    """The tile of a program."""

    units: int  # KC, at most
    keys: int  # BK; divides 64
    num_warps: int
    num_stages: int


# By kernel, bytes of an operand's element, and whether the head size is 128.
_TILES = {
    ("forward", 2, False): ListTile(128, 64, 4, 2),
    ("forward", 2, True): ListTile(128, 64, 8, 2),
    ("forward", 4, False): ListTile(64, 32, 4, 1),
    ("forward", 4, True): ListTile(32, 32, 8, 1),
    ("backward", 2, False): ListTile(128, 64, 8, 1),
    ("backward", 2, True): ListTile(64, 64, 8, 1),
    ("backward", 4, False): ListTile(32, 16, 4, 1),
    ("backward", 4, True): ListTile(16, 16, 4, 1),
}
# Where these spill or do not fit.
_SMALLER = {
    ("forward", 2, False): {"ampere": ListTile(64, 64, 4, 2)},
    ("forward", 2, True): {"ampere": ListTile(64, 64, 8, 2), "other": ListTile(64, 64, 4, 2)},
    ("forward", 4, False): {"ampere": ListTile(32, 32, 4, 1)},
    ("backward", 2, False): {"ampere": ListTile(64, 32, 4, 1), "other": ListTile(64, 32, 4, 1)},
    ("backward", 2, True): {
        "hopper": ListTile(64, 32, 8, 1),
        "ampere": ListTile(64, 32, 8, 1),
        "other": ListTile(32, 32, 4, 1),
    },
}


def list_tile(kernel: str, head_dim: int, itemsize: int, major: int | None) -> ListTile:
    """Returns the tile of "forward" or "backward" on an NVIDIA device of this capability, or on another device."""
    key = kernel, itemsize, head_dim > 64
    if is_interpreted():  # small, so that short lists have several tiles
        return ListTile(32, 16, 4, 1)
    return _SMALLER.get(key, {}).get(device_kind(major), _TILES[key])


def power_of_two(size: int) -> int:
    """Returns the smallest power of two from 16 on that holds ``size``: what a matrix product needs."""
    return max(16, 1 << (size - 1).bit_length())
