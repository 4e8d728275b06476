# SPDX-License-Identifier: Apache-2.0
"""``itnet plot-kernel`` draws what a learned kernel looks like on an input."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from torch import Tensor
from typer import Argument, Option, echo

from configuration_itnet import MODALITIES, find_modality

from ..analysis.plots import plot_cloud_kernel, plot_image_kernel, plot_text_kernel
from ..modalities import load
from . import commands
from .inputs import is_text, load_model, process, read_inputs, read_tokenizer


@commands.command()
def plot_kernel(
    checkpoint: Annotated[Path, Argument(help="Folder with a model that has exact kernels.")],
    source: Annotated[
        str, Argument(help="An image file, a text (or a file with one), or a cloud (.npy, .xyz, .off, ...).")
    ],
    output: Annotated[Path, Option("--output", "-o", help="Picture to write.")] = Path("kernel.png"),
    layer: Annotated[int, Option(help="Number of the layer, from 0; negative numbers count from the last.")] = 0,
    part: Annotated[str, Option(help="What to draw the norm of: full, learned or variation.")] = "variation",
    query: Annotated[
        list[str], Option(help="What to look from: row,column or cls (image), a number (cloud); may be repeated.")
    ] = (),
) -> None:
    model = load_model(checkpoint)
    row = find_modality(model.config.modality)
    if row.plot is None:
        names = ", ".join(other.name for other in MODALITIES.values() if other.plot is not None)
        raise ValueError(f"there is no picture for `modality` ({row.name!r}); only {names} have one")
    load(row.plot)(model, checkpoint, source, query, path=output, layer=layer, part=part)
    echo(str(output))


def plot_image(model, checkpoint: Path, source: str, query: list[str], **picture) -> None:
    queries = _queries(query, _patch, "row,column of a patch, or cls")
    plot_image_kernel(model, _read(model, checkpoint, source)["pixel_values"], queries=queries, **picture)


def plot_text(model, checkpoint: Path, source: str, query: list[str], **picture) -> None:
    if query:
        raise ValueError("`--query` does not go with a text: its picture shows every token")
    tokenizer, is_literal = read_tokenizer(checkpoint), is_text(source)
    inputs = process(tokenizer, model.config, [source]) if is_literal else _read(model, checkpoint, source)
    tokens = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0].tolist())
    plot_text_kernel(model, inputs, tokens, **picture)


def plot_cloud(model, checkpoint: Path, source: str, query: list[str], **picture) -> None:
    queries = _queries(query, int, "the number of a point")
    plot_cloud_kernel(model, _read(model, checkpoint, source), queries=queries, **picture)


def _read(model, checkpoint: Path, source: str) -> dict[str, Tensor]:
    return read_inputs(checkpoint, model.config, [Path(source)], limit=1, batch_size=1)[0]


def _queries(texts: list[str], read: Callable, expected: str) -> list | None:
    """Returns what `--query` says, each text turned by ``read`` into what plots take, or None if nothing was said."""
    found = []
    for text in texts:
        try:
            found.append(read(text))
        except ValueError:
            raise ValueError(f"`--query` ({text!r}) must be {expected}") from None
    return found or None


def _patch(text: str) -> str | tuple[int, int]:
    if text == "cls":
        return text
    row, column = text.split(",")
    return int(row), int(column)
