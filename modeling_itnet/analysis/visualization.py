# SPDX-License-Identifier: Apache-2.0
"""Looking at learned kernels: how strongly a layer couples each pair of positions of a given input."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from itnet_kernels import kernel_matrices

from ..integration.capture import operator_inputs
from ..operator import find_operators

Part = Literal["full", "learned", "variation"]
Query = tuple[int, int] | Literal["cls"]

_NORMS = {"full": "‖K_ij‖", "learned": "‖K_ij − b2‖", "variation": "‖K_ij − mean_j K_ij‖"}
# Elements of the matrices K_ij that are in memory at a time: 64 MB in float32.
_CHUNK_ELEMENTS = 2**24


@torch.no_grad()
def kernel_norms(model: nn.Module, inputs: dict[str, Tensor], layer: int = -1, part: Part = "full") -> Tensor:
    r"""Frobenius norms of the kernel of one layer, for every head and every pair of positions of ``inputs``.

    The kernel depends on the features at both ends, so it is evaluated at what the layer really sees: the model runs
    on ``inputs`` in evaluation mode, and K_ij = reshape(W2 GELU(W1 z_ij + b1) + b2) is formed from the operator's
    normalised input. With omega the measure, the norm is that of

    - ``"full"``: K_ij itself. b2, which starts as the identity, is part of it and may outweigh what differs from pair
      to pair: an identity kernel has norm sqrt(d_h) everywhere.
    - ``"learned"``: K_ij - b2 = W2 GELU(.), what the pair's positions and features add to the constant kernel.
    - ``"variation"``: K_ij - sum_j omega_j K_ij. What is left is how query i tells its keys apart; it vanishes if the
      layer takes a plain mean.

    Args:
        model: an ITNetModel, or any model that contains one (a task head, a PEFT or data-parallel wrapper).
        inputs: keyword arguments of the model's forward, on the model's device.
        layer: index of the layer; negative counts from the last.
        part: see above.

    Returns:
        ``[B, H, n, n]``, indexed by sample, head, query i, key j; float32 at least. The image models' [CLS] is
        position 0. 0 where query i does not see key j: padding, and the future in a causal model. A graph's edge gate
        is not part of it.
    """
    if part not in ("full", "learned", "variation"):
        raise ValueError(f"`part` ({part!r}) must be 'full', 'learned' or 'variation'")
    operators = find_operators(model)
    if not -len(operators) <= layer < len(operators):
        raise ValueError(f"`layer` ({layer}) is out of range: the model has {len(operators)} ITNet layers")
    operator = operators[layer]
    if operator.kernel is None:
        raise ValueError(f"layer {layer} is low-rank: it has factors instead of a kernel, and no K_ij to look at")
    features, positions, measure, frequencies = operator_inputs(model, inputs)[layer]
    heads = features.unflatten(-1, (operator.num_heads, -1))  # [B, n, H, d_h]
    positions = positions if positions.dim() == 3 else positions.unsqueeze(0)
    weights = operator.kernel(frequencies)
    if part == "learned":
        weights = weights._replace(b2=torch.zeros_like(weights.b2))
    omega = pair_measure(measure, operator.is_causal)  # [B, n, n]

    batch, count, num_heads, head_dim = heads.shape
    chunk = max(1, _CHUNK_ELEMENTS // (batch * count * num_heads * head_dim**2))
    norms = []
    for start in range(0, count, chunk):
        rows = slice(start, start + chunk)
        matrices = kernel_matrices(heads[:, rows], heads, positions[:, rows], positions, weights)
        if part == "variation":
            mean = torch.einsum("bij,bijhac->bihac", omega[:, rows].to(matrices.dtype), matrices)
            matrices = matrices - mean.unsqueeze(2)
        norms.append(torch.linalg.matrix_norm(matrices))  # [B, t, n, H]
    return (torch.cat(norms, dim=1) * (omega > 0).unsqueeze(-1)).permute(0, 3, 1, 2)


def plot_image_kernel(
    model: nn.Module,
    pixel_values: Tensor,
    path: str | Path,
    queries: Sequence[Query] | None = None,
    layer: int = 0,
    part: Part = "variation",
    title: str | None = None,
) -> None:
    """Draws one layer's kernel over one image: a column per query i, a heat map over the key patches j.

    The upper picture is the image with query patch i framed; the map below shows :func:`kernel_norms` of ``part``,
    averaged over the heads, at every patch j of the image's grid, on one scale for all queries. Pixel values are
    stretched to the full range of grey or colour. [CLS] is not on the map as a key; with several patch sizes, queries
    and keys are those of the first grid. Needs matplotlib (``pip install matplotlib``).

    A classifier that reads [CLS] makes no use of what the last layer computes at the patches: there, look at the query
    "cls", or at an earlier layer.

    Args:
        model: an image model, such as ITNetForImageClassification.
        pixel_values: one image, ``[C, height, width]`` or ``[1, C, height, width]``, as the model takes it.
        path: file to write; its ending chooses the format. Missing folders are made.
        queries: (row, column) of patches, counted from 0 at the upper left, or "cls". By default, four patches around
            the centre.
        layer, part: as in :func:`kernel_norms`.
        title: a line above the figure; says what is drawn if not given.
    """
    figure_class, rectangle_class = matplotlib_classes()
    pixel_values = pixel_values if pixel_values.dim() == 4 else pixel_values.unsqueeze(0)
    if pixel_values.dim() != 4 or len(pixel_values) != 1:
        raise ValueError(f"`pixel_values` {list(pixel_values.shape)} must be one image: [C, height, width]")
    size = model.config.patch_sizes[0]
    rows, columns = pixel_values.shape[2] // size, pixel_values.shape[3] // size
    if queries is None:
        top, left = rows // 4, columns // 4
        queries = [(row, column) for row in (top, rows - 1 - top) for column in (left, columns - 1 - left)]
    has_cls = model.config.pooling == "cls"
    indices = [_position(query, rows, columns, has_cls) for query in queries]

    norms = kernel_norms(model, {"pixel_values": pixel_values}, layer, part)[0].mean(0)  # [n, n]
    maps = norms[indices, int(has_cls) :][:, : rows * columns].float().cpu().view(-1, rows, columns)
    image, extent = _displayed(pixel_values[0]), (0, columns, rows, 0)
    figure = figure_class(figsize=(2.1 * len(queries) + 0.9, 4.9), layout="constrained", dpi=150)
    axes = figure.subplots(2, len(queries), squeeze=False)
    for query, values, (above, below) in zip(queries, maps, axes.T, strict=True):
        above.set_title("[CLS]" if query == "cls" else f"patch ({query[0]}, {query[1]})", fontsize=9)
        above.imshow(image.numpy(), cmap="gray", extent=extent)
        heat = below.imshow(values.numpy(), cmap="magma", vmin=maps.min(), vmax=maps.max(), extent=extent)
        for axis in (above, below):
            axis.set_axis_off()
            if query != "cls":
                corner = (query[1], query[0])
                axis.add_patch(rectangle_class(corner, 1, 1, fill=False, edgecolor="#00d0ff", linewidth=2))
    add_colorbar(figure, heat, axes[1], part, shrink=0.9)
    figure.suptitle(title or picture_title(model, layer, part, "query i (framed) and every patch j"), fontsize=10)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _position(query: Query, rows: int, columns: int, has_cls: bool) -> int:
    """Index of a query among the positions of the model: [CLS] first, then the patches row by row."""
    if query == "cls":
        if not has_cls:
            raise ValueError("query 'cls' needs a model with `pooling` 'cls'; this one has no [CLS] position")
        return 0
    row, column = query
    if not (0 <= row < rows and 0 <= column < columns):
        raise ValueError(f"query patch ({row}, {column}) is not on the grid of {rows} x {columns} patches")
    return int(has_cls) + row * columns + column


def pair_measure(measure: Tensor, is_causal: bool) -> Tensor:
    """omega_ij [B, n, n]: omega_j, normalised over the keys that query i sees."""
    omega = measure.unsqueeze(1).expand(-1, measure.shape[1], -1)
    if is_causal:
        omega = omega.tril()
    return omega / omega.sum(-1, keepdim=True).clamp(min=torch.finfo(omega.dtype).tiny)


def _displayed(image: Tensor) -> Tensor:
    """[C, height, width] of any range -> what imshow takes: colour for three channels, otherwise their mean."""
    image = image.detach().float().cpu()
    image = (image - image.min()) / (image.max() - image.min()).clamp(min=1e-12)
    return image.permute(1, 2, 0) if len(image) == 3 else image.mean(0)


def picture_title(model: nn.Module, layer: int, part: Part, pair: str) -> str:
    """What a picture shows, for which query and which keys."""
    number = layer % model.config.num_hidden_layers + 1
    return f"Layer {number} of {model.config.num_hidden_layers}: {_NORMS[part]} for {pair}"


def add_colorbar(figure, heat, axes, part: Part, shrink: float) -> None:
    """A scale with plain numbers: matplotlib would write 4.01 as 0.01 and "+4" apart from it."""
    bar = figure.colorbar(heat, ax=axes, shrink=shrink)
    bar.formatter.set_useOffset(False)
    bar.set_label(_NORMS[part], fontsize=9)
    bar.ax.tick_params(labelsize=8)


def matplotlib_classes() -> tuple[type, type]:
    """Figure and Rectangle. Figures made without pyplot need no display and leave the user's backend alone."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError as error:
        raise ImportError("Drawing kernels needs matplotlib: pip install matplotlib") from error
    return Figure, Rectangle


__all__ = ["kernel_norms", "plot_image_kernel"]
