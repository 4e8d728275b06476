# SPDX-License-Identifier: Apache-2.0
"""``itnet create``, ``export``, ``convert`` and ``cards``: what makes and changes folders."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from configuration_itnet import MODALITIES, find_modality

from ..hub import create_checkpoint, export_to_hub_folder, preset_cards, task_classes
from .app import check_new_folder, commands, load_model, print_json
from .inputs import read_inputs, read_processors

_OVERWRITE = typer.Option("--overwrite", help="Write into the folder although it holds files.")


@commands.command()
def create(
    preset: Annotated[str, typer.Argument(help="itnet-tiny, -pc, -small, -base or -large.")],
    folder: Annotated[Path, typer.Argument(help="Where to: a new or empty folder.")],
    modality: Annotated[str | None, typer.Option(help=f"One of {', '.join(MODALITIES)}.")] = None,
    mode: Annotated[str | None, typer.Option(help="exact, monte_carlo, low_rank or auto.")] = None,
    task: Annotated[
        str | None,
        typer.Option(help=f"A head: {', '.join(task_classes())}, or the Hub's name, as fill-mask. None: no head."),
    ] = None,
    num_labels: Annotated[int | None, typer.Option(help="Classes of the head.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Tokenizer to use: a folder or a Hub id.")] = None,
    texts: Annotated[
        list[Path] | None, typer.Option("--text", help="Text file to train a tokenizer on; may be repeated.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the weights.")] = 0,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Any other argument of ITNetConfig, as name=value.")
    ] = None,
    overwrite: Annotated[bool, _OVERWRITE] = False,
) -> None:
    """Make a new, untrained model: seeded weights, configuration, processor, tokenizer, card and code."""
    check_new_folder(folder, overwrite)
    overrides = {"integration_mode": mode, "num_labels": num_labels}
    overrides = {name: value for name, value in overrides.items() if value is not None} | _settings(settings or [])
    model = create_checkpoint(
        preset, folder, task=task, modality=modality, seed=seed, tokenizer=tokenizer, texts=texts or (), **overrides
    )
    vocabulary = f", {model.config.vocab_size:,} tokens" if find_modality(model.config.modality).has_tokens else ""
    typer.echo(f"{folder}: {type(model).__name__}, {model.num_parameters():,} parameters{vocabulary}, random weights")


@commands.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="Folder with a trained or new model.")],
    folder: Annotated[Path, typer.Argument(help="Where to write it, with code: a new or empty folder.")],
    max_shard_size: Annotated[str, typer.Option(help="Largest weight file.")] = "50GB",
    push: Annotated[str | None, typer.Option(help="Hub repository to upload it to as well.")] = None,
    overwrite: Annotated[bool, _OVERWRITE] = False,
) -> None:
    """Write a folder that loads with trust_remote_code=True where this package is not installed."""
    check_new_folder(folder, overwrite, checkpoint)
    model, processors = load_model(checkpoint), read_processors(checkpoint)
    export_to_hub_folder(model, folder, processors, max_shard_size=max_shard_size)
    typer.echo(f"{folder}: load it with trust_remote_code=True")
    if push is not None:
        typer.echo(model.push_to_hub(push, processor=processors))


@commands.command()
def convert(
    checkpoint: Annotated[Path, typer.Argument(help="Folder with an exact model.")],
    folder: Annotated[Path, typer.Argument(help="Where to write the converted model: a new or empty folder.")],
    to: Annotated[str, typer.Option(help="low_rank, auto (both kinds of weights) or monte_carlo.")] = "low_rank",
    rank: Annotated[int, typer.Option(min=1, help="Rank per head of the low-rank kernel.")] = 8,
    num_samples: Annotated[
        int | None, typer.Option(min=1, help="Samples per query of Monte Carlo integration.")
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(help="Calibration data: image or text files, a folder of them, a parquet file, .npy or .npz."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Inputs to calibrate on.")] = 64,
    batch_size: Annotated[int, typer.Option(min=1, help="Inputs per batch.")] = 16,
    steps: Annotated[
        int, typer.Option(min=0, help="Optimisation steps per layer, and for all layers together.")
    ] = 300,
    as_json: Annotated[bool, typer.Option("--json", help="Print the errors as JSON.")] = False,
    overwrite: Annotated[bool, _OVERWRITE] = False,
) -> None:
    """Switch a trained exact model to low-rank or Monte Carlo integration."""
    if to not in ("low_rank", "auto", "monte_carlo"):
        raise ValueError(f"`--to` ({to!r}) must be 'low_rank', 'auto' or 'monte_carlo'")
    check_new_folder(folder, overwrite, checkpoint)
    model, processors = load_model(checkpoint), read_processors(checkpoint)
    report = None
    if to == "monte_carlo":
        model.to_monte_carlo(num_samples)
    elif not data:
        raise ValueError(f"`--to {to}` needs `--data`: the factors are fitted to what the model does on real inputs")
    else:
        batches = read_inputs(checkpoint, model.config, data, limit, batch_size)
        report = model.to_low_rank(rank, batches, steps=steps, distillation_steps=steps, integration_mode=to)
    model.save_pretrained(folder, processor=processors)
    if as_json:
        errors = {} if report is None else asdict(report)
        print_json({"folder": str(folder), "integration_mode": model.config.integration_mode, **errors})
        return
    typer.echo(f"{folder}: integration_mode={model.config.integration_mode}")
    if report is not None:
        typer.echo(str(report))


@commands.command()
def cards(
    folder: Annotated[Path, typer.Argument(help="Where the cards of all presets are.")] = Path("model_cards"),
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail if a card is out of date.")] = False,
) -> None:
    """Write the model cards of all presets."""
    stale = []
    for name, text in preset_cards().items():
        path = folder / name
        if check and (not path.exists() or path.read_text(encoding="utf-8") != text):
            stale.append(name)
        elif not check:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    if stale:
        raise ValueError(f"out of date: {', '.join(stale)}; run `itnet cards {folder}`")


def _settings(pairs: list[str]) -> dict:
    """["rank=4", "measure=balanced"] -> {"rank": 4, "measure": "balanced"}: values are JSON, or else strings."""
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
