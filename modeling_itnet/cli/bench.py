# SPDX-License-Identifier: Apache-2.0
"""``itnet bench``: time of one layer on this machine, in every integration mode, beside attention."""

import time
from statistics import median
from typing import Annotated

import torch
import typer

from ..analysis.costs import MODES, attention_layer, itnet_layer, peer_name
from .app import commands, load_config, print_json, print_table


@commands.command()
def bench(
    model: Annotated[str, typer.Argument(help="Preset or checkpoint folder: sets width, heads and kernel.")] = (
        "itnet-tiny"
    ),
    positions: Annotated[
        list[int] | None, typer.Option("--positions", "-n", min=1, help="Number of positions; may be repeated.")
    ] = None,
    modes: Annotated[list[str] | None, typer.Option("--mode", help="Only these modes; may be repeated.")] = None,
    rounds: Annotated[
        int, typer.Option(min=1, help="Rounds, in each of which all take turns; medians are printed.")
    ] = 5,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Time one layer, forward and backward, beside an attention layer of the same width."""
    unknown = set(modes or []) - set(MODES)
    if unknown:
        raise ValueError(f"`--mode` ({', '.join(sorted(unknown))}) must be one of {', '.join(MODES)}")
    config = load_config(model)
    try:
        layers = {mode: itnet_layer(config, mode, config.backend) for mode in modes or MODES}
        layers[peer_name(config)] = attention_layer(config)
        layers = {name: (layer.to(device), arguments) for name, (layer, arguments) in layers.items()}
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"`--device` ({device!r}) cannot be used: {error}") from error
    results = [row for count in positions or [64, 196] for row in _measure(layers, count, rounds, device)]
    if as_json:
        print_json({"torch": torch.__version__, "threads": torch.get_num_threads(), "results": results})
        return
    lines = [(f"{r['positions']}", r["model"], f"{r['forward_ms']:.2f}", f"{r['total_ms']:.2f}") for r in results]
    headings = ("positions", "model", "forward ms", "forward + backward ms")
    print_table(f"one layer of {model}, one input, float32, {device}", headings, lines, texts=["model"])


def _measure(layers: dict, count: int, rounds: int, device: str) -> list[dict]:
    """Median times of all layers at one number of positions. They take turns, so that a slow moment of the machine
    meets all of them."""
    inputs = {}
    for name, (_, make_arguments) in layers.items():
        features, *domain = make_arguments(count)
        inputs[name] = (features.detach().to(device).requires_grad_(), *(value.to(device) for value in domain))
    times = {name: [] for name in layers}
    for _ in range(rounds + 1):  # the first warms up
        for name, (layer, _) in layers.items():
            times[name].append(_time(layer, inputs[name], device))
    rows = []
    for name, values in times.items():
        forward, total = (1e3 * median(column) for column in zip(*values[1:], strict=True))
        rows.append({"model": name, "positions": count, "forward_ms": forward, "total_ms": total})
    return rows


def _time(layer: torch.nn.Module, arguments: tuple, device: str) -> tuple[float, float]:
    """Seconds of a forward, and of a forward and backward."""
    start = _now(device)
    output = layer(*arguments)
    forward = _now(device) - start
    (output[0] if isinstance(output, tuple) else output).sum().backward()
    return forward, _now(device) - start


def _now(device: str) -> float:
    if device != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()
