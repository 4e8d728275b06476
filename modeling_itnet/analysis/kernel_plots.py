# SPDX-License-Identifier: Apache-2.0
"""Pictures of learned kernels on texts and point clouds. Those on images are in visualization.py."""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn

from .visualization import Part, add_colorbar, kernel_norms, matplotlib_classes, picture_title


def plot_text_kernel(
    model: nn.Module,
    inputs: dict[str, Tensor],
    tokens: Sequence[str],
    path: str | Path,
    layer: int = 0,
    part: Part = "variation",
) -> None:
    """Draws one layer's kernel over one text: a square map per head, query token i down, key token j across.

    Args:
        model: a text model.
        inputs: forward arguments for one text: ``input_ids [1, n]``, and what goes with it.
        tokens: what is written along the axes, n strings; a tokenizer's marks of spaces and continuations are not.
        path: file to write; its ending chooses the format.
        layer, part: as in :func:`kernel_norms`.
    """
    figure_class, _ = matplotlib_classes()
    norms = kernel_norms(model, inputs, layer, part)  # [1, H, n, n]
    if len(norms) != 1 or norms.shape[-1] != len(tokens):
        raise ValueError(f"`inputs` hold {len(norms)} texts of {norms.shape[-1]} tokens, `tokens` {len(tokens)} names")
    norms, tokens = norms[0].float().cpu(), [readable_token(token) for token in tokens]
    side = max(2.2, 0.16 * len(tokens) + 0.8)
    figure = figure_class(figsize=(side * len(norms) + 0.8, side + 0.7), layout="constrained", dpi=150)
    axes = figure.subplots(1, len(norms), squeeze=False)[0]
    for head, (axis, values) in enumerate(zip(axes, norms, strict=True)):
        heat = axis.imshow(values.numpy(), cmap="magma", vmin=norms.min(), vmax=norms.max())
        axis.set_title(f"head {head + 1}", fontsize=9)
        axis.set_xticks(range(len(tokens)), tokens, rotation=90, fontsize=6)
        axis.set_yticks(range(len(tokens)), tokens if head == 0 else [], fontsize=6)
        axis.set_xlabel("key j", fontsize=8)
    axes[0].set_ylabel("query i", fontsize=8)
    add_colorbar(figure, heat, axes, part, shrink=0.8)
    figure.suptitle(picture_title(model, layer, part, "query token i (row) and key token j"), fontsize=10)
    _save(figure, path)


def plot_cloud_kernel(
    model: nn.Module,
    inputs: dict[str, Tensor],
    path: str | Path,
    queries: Sequence[int] | None = None,
    layer: int = 0,
    part: Part = "variation",
) -> None:
    """Draws one layer's kernel over one point cloud: a picture per query point i, every point j in its colour.

    Norms are averaged over the heads, on one scale for all queries; a ring marks the query.

    Args:
        model: a point cloud model.
        inputs: forward arguments for one cloud: ``points [1, n, 3]``, and what goes with it.
        path: file to write; its ending chooses the format.
        queries: numbers of points; by default the two that are farthest along the last axis.
        layer, part: as in :func:`kernel_norms`.
    """
    figure_class, _ = matplotlib_classes()
    norms = kernel_norms(model, inputs, layer, part).mean(1)[0].float().cpu()  # [n, n]
    points = inputs["points"][0].float().cpu()
    if queries is None:
        queries = [int(points[:, 2].argmin()), int(points[:, 2].argmax())]
    outside = [query for query in queries if not 0 <= query < len(points)]
    if outside:
        raise ValueError(f"query point {outside[0]} is not one of the {len(points)} points")
    maps = norms[list(queries)]
    figure = figure_class(figsize=(3.2 * len(queries) + 0.8, 3.6), layout="constrained", dpi=150)
    axes = figure.subplots(1, len(queries), squeeze=False, subplot_kw={"projection": "3d"})[0]
    for query, values, axis in zip(queries, maps, axes, strict=True):
        limits = {"vmin": maps.min(), "vmax": maps.max()}
        heat = axis.scatter(*points.T.numpy(), c=values.numpy(), cmap="magma", s=6, **limits)
        axis.scatter(*points[query].unsqueeze(1).numpy(), s=80, facecolors="none", edgecolors="#00d0ff", linewidths=2)
        axis.set_title(f"point {query}", fontsize=9)
        axis.set_box_aspect((points.amax(0) - points.amin(0)).clamp(min=1e-12).tolist())  # lengths as they are
        for name, label in zip("xyz", (axis.set_xlabel, axis.set_ylabel, axis.set_zlabel), strict=True):
            label(name, fontsize=8)
        axis.tick_params(labelsize=6)
    add_colorbar(figure, heat, axes, part, shrink=0.7)
    figure.suptitle(picture_title(model, layer, part, "query i (ringed) and every point j"), fontsize=10)
    _save(figure, path)


def readable_token(token: str) -> str:
    """A token as it reads: without the marks of byte-level (Ġ, Ċ), SentencePiece (▁) and WordPiece (##) tokenizers."""
    text = token.replace("Ġ", " ").replace("▁", " ").replace("Ċ", "↵").removeprefix("##").strip()
    return text or "␣"


def _save(figure, path: str | Path) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


__all__ = ["plot_cloud_kernel", "plot_text_kernel"]
