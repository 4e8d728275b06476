# SPDX-License-Identifier: Apache-2.0
"""``itnet info``, ``bench`` and ``verify`` measure something and print it as tables or as JSON."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from statistics import median
from typing import Annotated

import torch
from rich.console import Console
from rich.table import Table
from typer import Argument, Exit, Option

from configuration_itnet import ITNetConfig, preset_names

from ..analysis.costs import (
    MODES,
    Cost,
    attention_layer,
    itnet_layer,
    model_costs,
    peer_name,
    peer_parameters,
    possible_modes,
)
from ..analysis.parameters import ParameterTable, parameter_table
from ..special_cases.verify import theorem_table
from . import commands, given, print_json
from .inputs import load_config, model_class

AsJson = Annotated[bool, Option("--json", help="Print JSON instead of a table.")]


@commands.command()
def info(
    models: Annotated[list[str] | None, Argument(help="Presets or checkpoint folders; all presets if none.")] = None,
    modality: Annotated[str | None, Option(help="Build the presets for this modality.")] = None,
    sharing: Annotated[str | None, Option(help="kernel_output_sharing: per_head or shared.")] = None,
    positions: Annotated[
        list[int] | None,
        Option("--positions", "-n", min=1, help="Print FLOPs and memory at this many positions too; may be repeated."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    options = given(modality=modality, kernel_output_sharing=sharing)
    configs = {name: load_config(name, **options) for name in models or preset_names()}
    reports = []
    for name, config in configs.items():
        table = parameter_table(name, config, model_class(config))
        reports.append((table, config, model_costs(config, positions) if positions else []))
    if as_json:
        print_json({report[0].name: _as_dict(*report) for report in reports})
        return
    for report in reports:
        _print(*report)


def _as_dict(table: ParameterTable, config: ITNetConfig, costs: list[Cost]) -> dict:
    peer = {peer_name(config): peer_parameters(config)}
    totals = {"total": table.total, "paper": table.paper_total, "peer": peer}
    return table.components | totals | {"costs": [cost._asdict() for cost in costs]}


def _print(table: ParameterTable, config: ITNetConfig, costs: list[Cost]) -> None:
    rows = [(name, f"{count:,}", _in_millions(table.paper_figure(name))) for name, count in table.components.items()]
    rows += [("total", f"{table.total:,}", _in_millions(table.paper_total))]
    rows += [(f"{peer_name(config)} of this width and depth", f"{peer_parameters(config):,}", "")]
    _print_table(table.name, ("component", "parameters", "paper prints"), rows, texts=["component"])
    if costs:
        rows = [
            (f"{c.positions:,}", c.model, f"{c.forward_flops / 1e9:,.2f}", f"{c.activation_bytes / 1e6:,.1f}")
            for c in costs
        ]
        headings = ("positions", "model", "forward GFLOPs", "MB kept for the backward")
        _print_table("layers of the model, one input, float32", headings, rows, texts=["model"])


def _in_millions(count: float | None) -> str:
    return "-" if count is None else f"{count / 1e6:.3g} M"


@commands.command()
def bench(
    model: Annotated[str, Argument(help="Preset or checkpoint folder: sets width, heads and kernel.")] = "itnet-tiny",
    positions: Annotated[
        list[int] | None, Option("--positions", "-n", min=1, help="Number of positions; may be repeated.")
    ] = None,
    modes: Annotated[list[str] | None, Option("--mode", help="Time only this mode; may be repeated.")] = None,
    rounds: Annotated[int, Option(min=1, help="Rounds, in which all layers take turns; medians are printed.")] = 5,
    device: Annotated[str, Option(help="Device to run on: cpu, cuda, ...")] = "cpu",
    as_json: AsJson = False,
) -> None:
    """Neighbourhoods, which all layers of a forward share, are found before."""
    unknown = set(modes or []) - set(MODES)
    if unknown:
        raise ValueError(f"`--mode` ({', '.join(sorted(unknown))}) must be one of {', '.join(MODES)}")
    config = load_config(model)
    try:
        layers = {mode: itnet_layer(config, mode, config.backend) for mode in modes or possible_modes(config)}
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
    _print_table(f"one layer of {model}, one input, float32, {device}", headings, lines, texts=["model"])


def _measure(layers: dict, count: int, rounds: int, device: str) -> list[dict]:
    """Returns the median times of all layers at one number of positions. The layers take turns, so that a slow moment
    of the machine meets all of them."""
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
    """Returns the seconds of a forward, and of a forward and backward."""
    start = _now(device)
    output = layer(*arguments)
    forward = _now(device) - start
    (output[0] if isinstance(output, tuple) else output).sum().backward()
    return forward, _now(device) - start


def _now(device: str) -> float:
    if device != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()


@commands.command()
def verify(
    seed: Annotated[int, Option(help="Seed of the random weights and signals.")] = 0, as_json: AsJson = False
) -> None:
    """The exit code is 1 if one of them does not hold."""
    rows = theorem_table(seed=seed)
    if as_json:
        print_json([asdict(row) | {"holds": row.holds} for row in rows])
    else:
        headings = ("label", "statement", "measured", "bound", "holds")
        lines = [
            (r.name, r.statement, f"{r.error:.1e}", f"<= {r.tolerance:.0e}", "yes" if r.holds else "NO") for r in rows
        ]
        title = f"{sum(row.holds for row in rows)} of {len(rows)} statements hold"
        _print_table(title, headings, lines, texts=headings)
    if not all(row.holds for row in rows):
        raise Exit(code=1)


def _print_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], texts: Sequence[str]) -> None:
    """Prints rows under their headings; the columns ``texts`` begin on the left, those of numbers end on the right."""
    grid = Table(title=title, title_justify="left")
    for heading in headings:
        grid.add_column(heading, justify="left" if heading in texts else "right")
    for row in rows:
        grid.add_row(*row)
    Console().print(grid)
