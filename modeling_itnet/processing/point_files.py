# SPDX-License-Identifier: Apache-2.0
"""Reads the points of .off and .ply files."""

from pathlib import Path

import numpy as np

_TYPES = {"char": "i1", "uchar": "u1", "short": "i2", "ushort": "u2", "int": "i4", "uint": "u4"}
_TYPES |= {"float": "f4", "double": "f8", "float32": "f4", "float64": "f8"}
_TYPES |= {f"{sign}int{8 * size}": f"{sign or 'i'}{size}" for sign in ("", "u") for size in (1, 2, 4)}
_ORDERS = {"binary_little_endian": "<", "binary_big_endian": ">"}


def read_points(path: str | Path) -> np.ndarray:
    """Reads the vertices [n, 3] of an .off or .ply file (text or binary), as float64, without faces and colours."""
    path = Path(path)
    read = {".off": _read_off, ".ply": _read_ply}.get(path.suffix.lower())
    if read is None:
        raise ValueError(f"{path} has the suffix {path.suffix!r}; points are read from .off, .ply files")
    try:
        points = read(path.read_bytes())
    except (IndexError, KeyError, TypeError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{path} is no readable {path.suffix[1:]} file: {error}") from error
    if len(points) == 0 or not np.isfinite(points).all():
        raise ValueError(f"{path} must hold at least one vertex, all of them finite")
    return points


def _read_off(content: bytes) -> np.ndarray:
    entries = [entry for line in content.decode("ascii").splitlines() for entry in line.split("#")[0].split()]
    if not entries[0].startswith("OFF"):
        raise ValueError("it does not start with OFF")
    # Some files of ModelNet have the first count attached to the header: OFF3514 3546 0.
    numbers = ([entries[0][3:]] if entries[0] != "OFF" else []) + entries[1:]
    count, values = int(numbers[0]), numbers[3:]
    if len(values) < 3 * count:
        raise ValueError(f"{count} vertices are announced, and the file ends before")
    return np.array(values[: 3 * count], dtype=np.float64).reshape(count, 3)


def _read_ply(content: bytes) -> np.ndarray:
    if not content.startswith(b"ply"):
        raise ValueError("it does not start with ply")
    head, separator, body = content.partition(b"end_header")
    if not separator:
        raise ValueError("its header has no end")
    body = body[body.index(b"\n") + 1 :]
    lines = [line.split() for line in head.decode("ascii").splitlines() if line.strip()]
    kind = next((line[1] for line in lines if line[0] == "format"), "")
    if kind != "ascii" and kind not in _ORDERS:
        raise ValueError(f"its format is {kind!r}, not ascii or one of {sorted(_ORDERS)}")
    begin, end = [*(index for index, line in enumerate(lines) if line[0] == "element"), len(lines)][:2]
    if lines[begin][1] != "vertex":
        raise ValueError(f"its first element is {lines[begin][1]!r}, not 'vertex'")
    count = int(lines[begin][2])
    fields = [(line[-1], line[1]) for line in lines[begin:end] if line[0] == "property"]
    columns = [[name for name, _ in fields].index(axis) for axis in "xyz"]
    if kind == "ascii":
        rows = body.decode("ascii").splitlines()[:count]
        if len(rows) < count:
            raise ValueError(f"{count} vertices are announced, and there are {len(rows)} lines")
        return np.array([[row.split()[column] for column in columns] for row in rows], dtype=np.float64).reshape(-1, 3)
    row = np.dtype([(name, _ORDERS[kind] + _TYPES[form]) for name, form in fields])
    table = np.frombuffer(body, dtype=row, count=count)
    return np.stack([table[axis] for axis in "xyz"], axis=1).astype(np.float64)
