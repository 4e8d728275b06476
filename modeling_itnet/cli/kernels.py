# SPDX-License-Identifier: Apache-2.0
"""``itnet plot-kernel``: what a learned kernel looks like on an input."""

from pathlib import Path
from typing import Annotated

import typer
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from configuration_itnet import MODALITIES, find_modality

from ..analysis.plots import plot_cloud_kernel, plot_image_kernel, plot_text_kernel
from ..modalities import load
from .app import commands, load_model
from .inputs import TEXT_SUFFIXES, read_inputs, read_processors


@commands.command()
def plot_kernel(
    checkpoint: Annotated[Path, typer.Argument(help="Folder with a model that has exact kernels.")],
    source: Annotated[
        str, typer.Argument(help="An image file, a text (or a file with one), or a cloud (.npy, .xyz, .off, ...).")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Picture to write.")] = Path("kernel.png"),
    layer: Annotated[int, typer.Option(help="Layer, from 0; negative counts from the last.")] = 0,
    part: Annotated[str, typer.Option(help="full, learned or variation.")] = "variation",
    query: Annotated[
        list[str] | None,
        typer.Option(help="What to look from: row,column or cls (image), a number (cloud); may be repeated."),
    ] = None,
) -> None:
    """Draw how strongly one layer couples the positions of an input."""
    model = load_model(checkpoint)
    row = find_modality(model.config.modality)
    if row.plot is None:
        names = ", ".join(other.name for other in MODALITIES.values() if other.plot is not None)
        raise ValueError(f"there is no picture for `modality` ({row.name!r}); only {names} have one")
    load(row.plot)(model, checkpoint, source, query or [], output, layer, part)
    typer.echo(str(output))


def plot_image(model, checkpoint: Path, source: str, query: list[str], output: Path, layer: int, part: str) -> None:
    inputs = _read(model, checkpoint, source)
    plot_image_kernel(model, inputs["pixel_values"], output, [_patch(text) for text in query] or None, layer, part)


def plot_text(model, checkpoint: Path, source: str, query: list[str], output: Path, layer: int, part: str) -> None:
    if query:
        raise ValueError("`--query` does not go with a text: its picture shows every token")
    tokenizer = _tokenizer(checkpoint)
    if Path(source).is_file():
        inputs = _read(model, checkpoint, source)
    elif len(source.split()) == 1 and Path(source).suffix in (*TEXT_SUFFIXES, ".parquet", ".npz"):
        raise ValueError(f"no such file: {source}")
    else:
        inputs = dict(tokenizer(source, return_tensors="pt", truncation=True).convert_to_tensors("pt"))
        inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    tokens = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0].tolist())
    plot_text_kernel(model, inputs, tokens, output, layer, part)


def plot_cloud(model, checkpoint: Path, source: str, query: list[str], output: Path, layer: int, part: str) -> None:
    inputs = _read(model, checkpoint, source)
    plot_cloud_kernel(model, inputs, output, [_number(text) for text in query] or None, layer, part)


def _read(model, checkpoint: Path, source: str) -> dict[str, Tensor]:
    return read_inputs(checkpoint, model.config, [Path(source)], limit=1, batch_size=1)[0]


def _tokenizer(checkpoint: Path) -> PreTrainedTokenizerBase:
    for processor in read_processors(checkpoint):
        if isinstance(processor, PreTrainedTokenizerBase):
            return processor
    raise ValueError(f"{checkpoint} has no tokenizer")


def _patch(text: str):
    if text == "cls":
        return text
    try:
        row, column = (int(number) for number in text.split(","))
    except ValueError:
        raise ValueError(f"`--query` ({text!r}) must be row,column of a patch, or cls") from None
    return row, column


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"`--query` ({text!r}) must be the number of a point") from None
