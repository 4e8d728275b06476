# SPDX-License-Identifier: Apache-2.0
"""``itnet create``, ``export``, ``convert`` and ``cards`` make and change folders."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option, echo

from configuration_itnet import MODALITIES, find_modality

from ..hub import create_checkpoint, export_to_hub_folder, preset_cards
from . import commands, given, print_json
from .inputs import load_model, read_inputs, read_processors

_TASKS = ", ".join(head.task for row in MODALITIES.values() for head in row.heads)
_TASKS = f"A head: {_TASKS}, or the Hub's name of one, as fill-mask. Without it, the model has no head."
_DATA = "Calibration data: image or text files, a folder of them, a parquet file, .npy or .npz."
Overwrite = Annotated[bool, Option("--overwrite", help="Write into the folder although it holds files.")]


@commands.command()
def create(
    preset: Annotated[str, Argument(help="itnet-tiny, -pc, -small, -base or -large.")],
    folder: Annotated[Path, Argument(help="New or empty folder to write the model to.")],
    modality: Annotated[str | None, Option(help=f"One of {', '.join(MODALITIES)}.")] = None,
    mode: Annotated[str | None, Option(help="exact, near_far, low_rank, monte_carlo or auto.")] = None,
    task: Annotated[str | None, Option(help=_TASKS)] = None,
    num_labels: Annotated[int | None, Option(help="Number of classes of the head.")] = None,
    tokenizer: Annotated[str | None, Option(help="Tokenizer to use: a folder or a Hub id.")] = None,
    texts: Annotated[list[Path], Option("--text", help="Text file to train a tokenizer on; may be repeated.")] = (),
    seed: Annotated[int, Option(help="Seed of the random weights.")] = 0,
    settings: Annotated[list[str], Option("--set", help="Any other argument of ITNetConfig, as name=value.")] = (),
    overwrite: Overwrite = False,
) -> None:
    _check_new_folder(folder, overwrite)
    overrides = given(integration_mode=mode, num_labels=num_labels) | _settings(settings)
    model = create_checkpoint(
        preset, folder, task=task, modality=modality, seed=seed, tokenizer=tokenizer, texts=texts, **overrides
    )
    vocabulary = f", {model.config.vocab_size:,} tokens" if find_modality(model.config.modality).has_tokens else ""
    echo(f"{folder}: {type(model).__name__}, {model.num_parameters():,} parameters{vocabulary}, random weights")


@commands.command()
def export(
    checkpoint: Annotated[Path, Argument(help="Folder with a trained or new model.")],
    folder: Annotated[Path, Argument(help="New or empty folder to write the model to, with its code.")],
    max_shard_size: Annotated[str, Option(help="Size of the largest weight file.")] = "50GB",
    push: Annotated[str | None, Option(help="Hub repository to upload it to as well.")] = None,
    overwrite: Overwrite = False,
) -> None:
    _check_new_folder(folder, overwrite, checkpoint)
    model, processors = load_model(checkpoint), read_processors(checkpoint)
    export_to_hub_folder(model, folder, processors, max_shard_size=max_shard_size)
    echo(f"{folder}: load it with trust_remote_code=True")
    if push is not None:
        echo(model.push_to_hub(push, processor=processors))


@commands.command()
def convert(
    checkpoint: Annotated[Path, Argument(help="Folder with an exact model.")],
    folder: Annotated[Path, Argument(help="New or empty folder to write the converted model to.")],
    to: Annotated[
        Literal["low_rank", "auto", "near_far", "monte_carlo"], Option(help="The mode; auto is exact and low_rank.")
    ] = "low_rank",
    rank: Annotated[int, Option(min=1, help="Rank per head of the low-rank kernel, or of the far field.")] = 8,
    near_size: Annotated[
        int | None, Option(min=1, help="near_far: positions of a window, in text and images.")
    ] = None,
    near_radius: Annotated[float | None, Option(help="near_far: radius of a neighbourhood elsewhere.")] = None,
    num_samples: Annotated[int | None, Option(min=1, help="Samples per query of Monte Carlo integration.")] = None,
    data: Annotated[list[Path], Option(help=_DATA)] = (),
    limit: Annotated[int, Option(min=1, help="Number of inputs to calibrate on.")] = 64,
    batch_size: Annotated[int, Option(min=1, help="Number of inputs per batch.")] = 16,
    steps: Annotated[int, Option(min=0, help="Optimisation steps per layer, and for all layers together.")] = 300,
    as_json: Annotated[bool, Option("--json", help="Print the errors as JSON.")] = False,
    overwrite: Overwrite = False,
) -> None:
    _check_new_folder(folder, overwrite, checkpoint)
    if to != "monte_carlo" and not data:
        raise ValueError(
            f"`--to {to}` needs `--data`: the new kernels are fitted to what the model does on real inputs"
        )
    model, report = load_model(checkpoint), None
    settings = {"rank": rank, "steps": steps, "distillation_steps": steps}
    batches = read_inputs(checkpoint, model.config, data, limit, batch_size) if data else None
    if to == "monte_carlo":
        model.to_monte_carlo(num_samples)
    elif to == "near_far":
        report = model.to_near_far(batches, near_size=near_size, near_radius=near_radius, **settings)
    else:
        report = model.to_low_rank(calibration_data=batches, integration_mode=to, **settings)
    model.save_pretrained(folder, processor=read_processors(checkpoint))
    if as_json:
        errors = {} if report is None else asdict(report)
        print_json({"folder": str(folder), "integration_mode": model.config.integration_mode, **errors})
        return
    echo(f"{folder}: integration_mode={model.config.integration_mode}")
    if report is not None:
        echo(str(report))


@commands.command()
def cards(
    folder: Annotated[Path, Argument(help="Where the cards of all presets are.")] = Path("model_cards"),
    check: Annotated[bool, Option("--check", help="Write nothing, and fail if a card is out of date.")] = False,
) -> None:
    stale = []
    for name, text in preset_cards().items():
        path = folder / name
        if not check:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
    if stale:
        raise ValueError(f"cards are out of date: {', '.join(stale)}; run `itnet cards {folder}`")


def _check_new_folder(folder: Path, overwrite: bool, source: Path | None = None) -> None:
    """Refuses to write a checkpoint over its source, and to a folder with other files unless the user says so."""
    if source is not None and source.resolve() == folder.resolve():
        raise ValueError(f"what is made of {source} needs another folder than {folder}")
    if folder.is_file():
        raise ValueError(f"{folder} is a file, not a folder")
    if overwrite or not folder.is_dir() or all(path.name.startswith(".") for path in folder.iterdir()):
        return
    held = "a checkpoint" if (folder / "config.json").exists() else "files"
    raise ValueError(f"{folder} holds {held} already; choose another folder, delete it or add --overwrite")


def _settings(pairs: list[str]) -> dict:
    """Turns ["rank=4", "measure=balanced"] into {"rank": 4, "measure": "balanced"}: values are JSON or strings."""
    values = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise ValueError(f"`--set {pair}` must have the form name=value")
        try:
            values[name] = json.loads(text)
        except json.JSONDecodeError:
            values[name] = text
    return values
