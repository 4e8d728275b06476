# SPDX-License-Identifier: Apache-2.0
"""``itnet explore`` writes a page in which readers look at learned kernels."""

from pathlib import Path
from typing import Annotated

from PIL import Image
from torch import Tensor
from typer import Argument, Option, echo

from configuration_itnet import ITNetConfig, find_modality

from ..analysis.explorer import explore_kernels
from ..modalities import load
from . import commands
from .inputs import (
    IMAGE_SUFFIXES,
    find_tokenizer,
    is_text,
    load_model,
    process,
    process_pairs,
    read_inputs,
    read_processors,
    read_tokenizer,
)


@commands.command()
def explore(
    checkpoint: Annotated[Path, Argument(help="Folder with a model, of any modality and integration mode.")],
    sources: Annotated[
        list[str] | None,
        Argument(
            metavar="[INPUT]...",
            help="Images, texts (or files with one per line), clouds (.npy, .xyz, .off, ...), pairs of an image and a "
            "text, or .npz files of forward arguments; a made-up input if none.",
        ),
    ] = None,
    output: Annotated[Path, Option("--output", "-o", help="Page to write.")] = Path("kernels.html"),
    layers: Annotated[
        list[int] | None, Option("--layer", help="Only this layer, from 0; may be repeated; negative: from the last.")
    ] = None,
    heads: Annotated[list[int] | None, Option("--head", help="Only this head, from 0; may be repeated.")] = None,
    precision: Annotated[
        str | None, Option(help="float32 or float16; by default the first that is small enough.")
    ] = None,
    limit: Annotated[int, Option(min=1, help="Read at most this many inputs.")] = 4,
    max_megabytes: Annotated[float, Option(help="Largest page; larger ones leave out layers, then heads.")] = 5.0,
    title: Annotated[str | None, Option(help="Title of the page; by default, the name of the folder.")] = None,
) -> None:
    """The page is one file that needs neither a server nor a network."""
    model = load_model(checkpoint)
    processors = read_processors(checkpoint)
    batch = read_sources(checkpoint, model.config, processors, list(sources or [])[:limit], limit)
    page = explore_kernels(
        model,
        batch,
        output,
        tokenizer=find_tokenizer(processors),
        title=title or checkpoint.resolve().name,
        layers=layers or None,
        heads=heads or None,
        precision=precision,
        max_bytes=int(max_megabytes * 1e6),
    )
    echo(f"{output} ({len(page.encode()) / 1e6:.2f} MB)")


def read_sources(
    checkpoint: Path, config: ITNetConfig, processors: list, sources: list[str], limit: int
) -> dict[str, Tensor]:
    """Returns one batch of forward arguments: what the sources hold, or the made-up input of the modality."""
    row = find_modality(config.modality)
    if not sources:
        if row.example is None:
            raise ValueError(f"`modality` ({row.name!r}) has no made-up input: give some")
        return load(row.example)(config, processors)
    if row.parts and all(Path(source).suffix != ".npz" for source in sources):
        return _pairs(processors, sources)
    if row.has_tokens and not row.parts and any(is_text(source) for source in sources):
        return process(read_tokenizer(checkpoint), config, sources)
    batches = read_inputs(checkpoint, config, [Path(source) for source in sources], limit, limit)
    if len(batches) > 1:
        raise ValueError("a page shows one batch: give one .npz file, or inputs that a processor reads")
    return batches[0]


def _pairs(processors: list, sources: list[str]) -> dict[str, Tensor]:
    """Reads sources that are an image and a text in turn."""
    images, texts = sources[::2], sources[1::2]
    wrong = [source for source in images if Path(source).suffix.lower() not in IMAGE_SUFFIXES]
    if wrong or len(images) != len(texts):
        raise ValueError(f"inputs ({', '.join(sources)}) must be an image file and a text in turn")
    return process_pairs(processors, [Image.open(path).convert("RGB") for path in images], texts)
