# SPDX-License-Identifier: Apache-2.0
"""Draws learned kernels over an image, a text or a point cloud, and draws a diagnosis. This needs matplotlib.

The kernels are drawn as :func:`kernel_norms` of one ``layer`` and ``part``. ``path`` is the file to write: its ending
chooses the format, and missing folders are made.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from ..integration.choice import requested_mode
from .kernels import Part, kernel_norms

if TYPE_CHECKING:
    from .diagnosis import KernelDiagnosis

Query = tuple[int, int] | Literal["cls"]

_NORMS = {"full": "‖K_ij‖", "learned": "‖K_ij − b2‖", "variation": "‖K_ij − mean_j K_ij‖"}
# Why a figure of a diagnosis may be missing.
_NEEDS = {"content": "needs several samples\non one domain", "convolution": "no displacement\noccurs twice"}


def plot_image_kernel(
    model: nn.Module,
    pixel_values: Tensor,
    path: str | Path,
    queries: Sequence[Query] | None = None,
    layer: int = 0,
    part: Part = "variation",
) -> None:
    """Draws one layer's kernel over one image: a column per query i, a heat map over the key patches j.

    The upper picture is the image, ``pixel_values`` ``[C, height, width]`` or ``[1, C, height, width]``, stretched to
    the full range of grey or colour, with query patch i framed; the map below shows the mean of the heads' norms at
    every patch j, on one scale for all queries. [CLS] is not on the map as a key; with several patch sizes, queries
    and keys are those of the first grid. ``queries`` are (row, column) of patches, counted from 0 at the upper left,
    or "cls"; by default, four patches around the centre.

    A classifier that reads [CLS] makes no use of what the last layer computes at the patches: there, look at the query
    "cls", or at an earlier layer.
    """
    pixel_values = pixel_values if pixel_values.dim() == 4 else pixel_values.unsqueeze(0)
    if pixel_values.dim() != 4 or len(pixel_values) != 1:
        raise ValueError(f"`pixel_values` {list(pixel_values.shape)} must be one image: [C, height, width]")
    size, has_cls = model.config.patch_sizes[0], model.config.pooling == "cls"
    rows, columns = pixel_values.shape[2] // size, pixel_values.shape[3] // size
    if queries is None:
        top, left = rows // 4, columns // 4
        queries = [(row, column) for row in (top, rows - 1 - top) for column in (left, columns - 1 - left)]
    indices = [_position(query, rows, columns, has_cls) for query in queries]
    figure = _figure(2.1 * len(queries) + 0.9, 4.9)
    from matplotlib.patches import Rectangle

    norms = kernel_norms(model, {"pixel_values": pixel_values}, layer, part)[0].mean(0)  # [n, n]
    maps = norms[indices, int(has_cls) :][:, : rows * columns].float().cpu().view(-1, rows, columns)
    image, extent = displayed(pixel_values[0]), (0, columns, rows, 0)
    axes = figure.subplots(2, len(queries), squeeze=False)
    for query, values, (above, below) in zip(queries, maps, axes.T, strict=True):
        above.set_title("[CLS]" if query == "cls" else f"patch ({query[0]}, {query[1]})", fontsize=9)
        above.imshow(image.numpy(), cmap="gray", extent=extent)
        heat = below.imshow(values.numpy(), **_scale(maps), extent=extent)
        for axis in (above, below):
            axis.set_axis_off()
            if query != "cls":
                axis.add_patch(Rectangle(query[::-1], 1, 1, fill=False, edgecolor="#00d0ff", linewidth=2))
    _finish(figure, heat, axes[1], "query i (framed) and every patch j", model, layer, part, path)


def plot_text_kernel(
    model: nn.Module,
    inputs: dict[str, Tensor],
    tokens: Sequence[str],
    path: str | Path,
    layer: int = 0,
    part: Part = "variation",
) -> None:
    """Draws one layer's kernel over one text: a square map per head, query token i down, key token j across.

    ``inputs`` are forward arguments for one text, ``input_ids [1, n]`` and what goes with it; the n ``tokens`` are
    written along the axes, without a tokenizer's marks of spaces and continuations.
    """
    norms = kernel_norms(model, inputs, layer, part)  # [1, H, n, n]
    if len(norms) != 1 or norms.shape[-1] != len(tokens):
        raise ValueError(f"`tokens` holds {len(tokens)} names for {len(norms)} texts of {norms.shape[-1]} tokens")
    norms, tokens = norms[0].float().cpu(), [readable(token) for token in tokens]
    side = max(2.2, 0.16 * len(tokens) + 0.8)
    figure = _figure(side * len(norms) + 0.8, side + 0.7)
    axes = figure.subplots(1, len(norms), squeeze=False)[0]
    for head, (axis, values) in enumerate(zip(axes, norms, strict=True)):
        heat = axis.imshow(values.numpy(), **_scale(norms))
        axis.set_title(f"head {head + 1}", fontsize=9)
        axis.set_xticks(range(len(tokens)), tokens, rotation=90, fontsize=6)
        axis.set_yticks(range(len(tokens)), tokens if head == 0 else [], fontsize=6)
        axis.set_xlabel("key j", fontsize=8)
    axes[0].set_ylabel("query i", fontsize=8)
    _finish(figure, heat, axes, "query token i (row) and key token j", model, layer, part, path)


def plot_cloud_kernel(
    model: nn.Module,
    inputs: dict[str, Tensor],
    path: str | Path,
    queries: Sequence[int] | None = None,
    layer: int = 0,
    part: Part = "variation",
) -> None:
    """Draws one layer's kernel over one point cloud: a picture per query point i, every point j in its colour.

    Norms are averaged over the heads, on one scale for all queries; a ring marks the query. ``inputs`` are forward
    arguments for one cloud, ``points [1, n, 3]`` and what goes with it; ``queries`` are numbers of points, by default
    of the two that are farthest along the last axis.
    """
    points = inputs["points"][0].float().cpu()
    if queries is None:
        queries = [int(points[:, 2].argmin()), int(points[:, 2].argmax())]
    for query in queries:
        if not 0 <= query < len(points):
            raise ValueError(f"query point {query} is not one of the {len(points)} points")
    figure = _figure(3.2 * len(queries) + 0.8, 3.6)
    maps = kernel_norms(model, inputs, layer, part)[0].mean(0)[list(queries)].float().cpu()  # [queries, n]
    axes = figure.subplots(1, len(queries), squeeze=False, subplot_kw={"projection": "3d"})[0]
    for query, values, axis in zip(queries, maps, axes, strict=True):
        heat = axis.scatter(*points.T.numpy(), c=values.numpy(), s=6, **_scale(maps))
        axis.scatter(*points[query].unsqueeze(1).numpy(), s=80, facecolors="none", edgecolors="#00d0ff", linewidths=2)
        axis.set_title(f"point {query}", fontsize=9)
        axis.set_box_aspect((points.amax(0) - points.amin(0)).clamp(min=1e-12).tolist())  # lengths as they are
        axis.set(xlabel="x", ylabel="y", zlabel="z")
        axis.tick_params(labelsize=6)
    _finish(figure, heat, axes, "query i (ringed) and every point j", model, layer, part, path)


def plot_diagnosis(diagnosis: "KernelDiagnosis", path: str | Path) -> None:
    """Draws a map of each figure over layers and heads, and the distance profiles of every layer."""
    names, layers = diagnosis.figure_names, 1 + max(head.layer for head in diagnosis.heads)
    heads = len(diagnosis.heads) // layers
    figure = _figure(2.6 * len(names), 6.0)
    figure.suptitle(f"Kernels of {layers} layers of {heads} heads: figures per head, and |K| by distance")
    maps, curves = figure.subfigures(2, 1)
    for axis, name in zip(maps.subplots(1, len(names)), names, strict=True):
        values = torch.tensor([getattr(head, name) for head in diagnosis.heads]).view(layers, heads)
        axis.set_title(name, fontsize=10)
        axis.set_xticks(range(heads), range(1, heads + 1), fontsize=8)
        axis.set_yticks(range(layers), range(1, layers + 1), fontsize=8)
        axis.set(xlabel="head", ylabel="layer")
        _draw_map(figure, axis, name, values)
    bins = len(diagnosis.heads[0].profile)
    distances = (torch.arange(bins) + 0.5) * diagnosis.largest_distance / bins
    axes = curves.subplots(1, layers, sharey=True, squeeze=False)[0]
    axes[0].set_ylabel("|K|, relative to all pairs")
    for layer, axis in enumerate(axes):
        for head in diagnosis.heads[layer * heads : (layer + 1) * heads]:
            axis.plot(distances.numpy(), head.profile, marker=".", label=f"head {head.head + 1}")
        axis.set_title(f"layer {layer + 1}", fontsize=10)
        axis.set_xlabel("distance")
        axis.tick_params(labelsize=8)
    axis.legend(fontsize=8)
    _save(figure, path)


def _draw_map(figure, axis, name: str, values: Tensor) -> None:
    """Draws one figure over layers and heads [L, H], with its numbers where they fit, or says that it is undefined."""
    known = values[values.isfinite()]
    if not len(known):
        axis.set(xlim=(-0.5, values.shape[1] - 0.5), ylim=(values.shape[0] - 0.5, -0.5))
        text = f"not defined:\n{_NEEDS.get(name, 'no pairs')}"
        axis.text(0.5, 0.5, text, ha="center", va="center", fontsize=8, transform=axis.transAxes)
        return
    colours, low, high = ("coolwarm", -1, 1) if name == "causality" else ("viridis", 0, 1)
    if name == "entropy":  # close to 1 in most kernels
        low, high = float(known.min()) - 1e-3, float(known.max()) + 1e-3
    image = axis.imshow(values.numpy(), cmap=colours, vmin=low, vmax=high, aspect="auto")
    figure.colorbar(image, ax=axis, shrink=0.8).ax.tick_params(labelsize=8)
    for row, column in values.isfinite().nonzero().tolist() if values.numel() <= 48 else ():
        value = float(values[row, column])
        colour = "white" if colours == "viridis" and image.norm(value) < 0.5 else "black"
        axis.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=7, color=colour)


def readable(token: str) -> str:
    """Returns a token without the marks of byte-level (Ġ, Ċ), SentencePiece (▁) and WordPiece (##) tokenizers."""
    return token.replace("Ġ", " ").replace("▁", " ").replace("Ċ", "↵").removeprefix("##").strip() or "␣"


def _position(query: Query, rows: int, columns: int, has_cls: bool) -> int:
    """Returns the index of a query among the positions of the model: [CLS], then the patches row by row."""
    if query == "cls":
        if not has_cls:
            raise ValueError("query 'cls' needs a model with `pooling` 'cls'; this one has no [CLS] position")
        return 0
    row, column = query
    if not (0 <= row < rows and 0 <= column < columns):
        raise ValueError(f"query patch ({row}, {column}) is not on the grid of {rows} x {columns} patches")
    return int(has_cls) + row * columns + column


def displayed(image: Tensor) -> Tensor:
    """Turns [C, height, width] of any range into what imshow takes: colour for three channels, else their mean."""
    image = image.detach().float().cpu()
    image = (image - image.min()) / (image.max() - image.min()).clamp(min=1e-12)
    return image.permute(1, 2, 0) if len(image) == 3 else image.mean(0)


def _scale(norms: Tensor) -> dict:
    """Returns one scale of colours for all maps of a figure."""
    return {"cmap": "magma", "vmin": norms.min(), "vmax": norms.max()}


def _figure(width: float, height: float):
    """Returns a figure that was made without pyplot: it needs no display and leaves the user's backend alone."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Drawing kernels needs matplotlib: pip install matplotlib") from error
    return Figure(figsize=(width, height), layout="constrained", dpi=150)


def _finish(figure, heat, axes, pair: str, model: nn.Module, layer: int, part: Part, path: str | Path) -> None:
    """Adds the title and a scale with plain numbers (matplotlib would write 4.01 as 0.01 and "+4" apart); saves."""
    count = model.config.num_hidden_layers
    kind = ", near field" if requested_mode(model.config) == "near_far" else ""
    figure.suptitle(f"Layer {layer % count + 1} of {count}{kind}: {_NORMS[part]} for {pair}", fontsize=10)
    bar = figure.colorbar(heat, ax=axes, shrink=0.8)
    bar.formatter.set_useOffset(False)
    bar.set_label(_NORMS[part], fontsize=9)
    bar.ax.tick_params(labelsize=8)
    _save(figure, path)


def _save(figure, path: str | Path) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
