# SPDX-License-Identifier: Apache-2.0
"""Says how a sample is drawn: its positions form parts, which are grids of patches, lines of tokens, or points.

The parts follow from the layout of the domain, so that a new modality needs nothing here.
"""

import base64
from collections.abc import Callable, Mapping
from io import BytesIO
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from ..plots import displayed, readable
from .collect import Sample

# Longest side of the pictures in a page, in pixels.
_PICTURE = 256


def sample_parts(
    sample: Sample, inputs: Mapping[str, Tensor], names: Callable[[list[int]], list[str]] | None
) -> list[dict[str, Any]]:
    """Returns the parts of a sample, in the order of its positions. ``names`` gives the tokens of some ids."""
    if sample.domain.layout is None:
        return [_points(sample, inputs)]
    parts, start = [], 0
    picture = _picture(inputs, sample.row)
    for number, shape in enumerate(sample.domain.layout):
        count = int(torch.Size(shape).numel())
        if len(shape) == 2:
            part = {"kind": "grid", "rows": shape[0], "columns": shape[1], "picture": picture}
        elif len(shape) == 1:
            part = {"kind": "tokens", "labels": _tokens(sample, inputs, number, start, count, names)}
        else:
            part = {"kind": "single", "labels": ["[CLS]"]}
        parts.append(part | {"start": start, "count": count})
        start += count
    return parts


def _points(sample: Sample, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
    """Places points where they are, in up to three dimensions, and nodes by the lengths of the paths between them.

    ``shade`` is the first number of what the model is given at each point, if it is given any.
    """
    positions, neighbors = sample.domain.positions, sample.domain.neighbors
    part: dict[str, Any] = {"kind": "points", "start": 0, "count": sample.count, "edges": []}
    if neighbors is not None:
        ends = [(i, j) for i, row in enumerate(neighbors[0].tolist()) for j in row if j >= 0]
        part["edges"] = sorted({(min(pair), max(pair)) for pair in ends if pair[0] != pair[1]})
        part["places"] = _graph_layout(sample.count, part["edges"])
    else:
        part["places"] = positions[:, :3] if positions.shape[1] > 3 else positions
    for name in ("signal_values", "point_features", "node_types", "node_features"):
        if isinstance(inputs.get(name), Tensor):
            values = inputs[name][sample.row, sample.kept].float().view(sample.count, -1)
            is_binary = bool(((values == 0) | (values == 1)).all() and (values.sum(1) == 1).all())
            is_one_hot = values.shape[1] > 1 and is_binary  # then its number
            part["shade"] = values.argmax(1).float() if is_one_hot else values[:, 0]
            part["shade_name"] = name.replace("_", " ")
            break
    return part


def _graph_layout(count: int, edges: list[tuple[int, int]]) -> Tensor:
    """Returns places [n, 2] whose distances are close to the lengths of the shortest paths (classical scaling).

    Nodes that no path joins are as far from each other as twice the longest path.
    """
    lengths = torch.full((count, count), torch.inf, dtype=torch.float64)
    lengths.fill_diagonal_(0)
    for i, j in edges:
        lengths[i, j] = lengths[j, i] = 1
    for k in range(count):
        lengths = torch.minimum(lengths, lengths[:, k : k + 1] + lengths[k : k + 1])
    finite = lengths[lengths.isfinite()]
    lengths = lengths.where(lengths.isfinite(), 2 * max(float(finite.max()), 1.0))
    squares = lengths.square()
    centred = squares - squares.mean(0) - squares.mean(1, keepdim=True) + squares.mean()
    values, vectors = torch.linalg.eigh(-centred / 2)
    places = vectors[:, -2:].flip(1) * values[-2:].flip(0).clamp(min=0).sqrt()
    return torch.nn.functional.pad(places, (0, 2 - places.shape[1])).float()


def _tokens(sample: Sample, inputs: Mapping[str, Tensor], number: int, start: int, count: int, names) -> list[str]:
    """Returns the tokens of a part of the layout, the ``number``-th, whose positions begin at ``start``."""
    ids = inputs.get("input_ids")
    if ids is None:
        return [str(place) for place in range(count)]
    row = sample.row * len(ids) // sample.num_rows  # several images may share a text
    chosen = ids[row, sample.kept[start : start + count] - sample.starts[number]].tolist()
    return [str(token) for token in chosen] if names is None else [readable(name) for name in names(chosen)]


def _picture(inputs: Mapping[str, Tensor], row: int) -> str | None:
    """Returns the image of a row as the address of a PNG that holds it."""
    pixels = inputs.get("pixel_values")
    if pixels is None:
        return None
    image = displayed(pixels.flatten(0, -4)[row])  # several images of a sample are rows of their own
    picture = Image.fromarray((image * 255).round().byte().numpy())
    picture.thumbnail((_PICTURE, _PICTURE))
    stream = BytesIO()
    picture.save(stream, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()
