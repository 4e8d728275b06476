# SPDX-License-Identifier: Apache-2.0
"""``itnet info``: how large a model is, and what it costs."""

from typing import Annotated

import typer

from configuration_itnet import ITNetConfig, preset_names

from ..analysis.costs import Cost, model_costs, peer_name, peer_parameters
from ..analysis.parameters import ParameterTable, parameter_table
from .app import commands, load_config, model_class, print_json, print_table


@commands.command()
def info(
    models: Annotated[
        list[str] | None, typer.Argument(help="Presets or checkpoint folders; all presets if none.")
    ] = None,
    modality: Annotated[str | None, typer.Option(help="Build the presets for this modality.")] = None,
    sharing: Annotated[str | None, typer.Option(help="kernel_output_sharing: per_head or shared.")] = None,
    positions: Annotated[
        list[int] | None,
        typer.Option("--positions", "-n", help="Also print FLOPs and memory at this many positions; may be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Print the real number of parameters by component, beside the paper's figures, and what a forward costs."""
    options = {"modality": modality, "kernel_output_sharing": sharing}
    options = {name: value for name, value in options.items() if value is not None}
    if any(count < 1 for count in positions or []):
        raise ValueError(f"`--positions` ({min(positions)}) must be at least 1")
    configs = {name: load_config(name, **options) for name in models or preset_names()}
    tables = [parameter_table(name, config, model_class(config)) for name, config in configs.items()]
    costs = {name: model_costs(config, positions) if positions else [] for name, config in configs.items()}
    if as_json:
        print_json({table.name: _as_dict(table, configs[table.name], costs[table.name]) for table in tables})
        return
    for table in tables:
        _print(table, configs[table.name], costs[table.name])


def _as_dict(table: ParameterTable, config: ITNetConfig, costs: list[Cost]) -> dict:
    peer = {peer_name(config): peer_parameters(config)}
    totals = {"total": table.total, "paper": table.paper_total, "peer": peer}
    return table.components | totals | {"costs": [cost._asdict() for cost in costs]}


def _print(table: ParameterTable, config: ITNetConfig, costs: list[Cost]) -> None:
    rows = [(name, f"{count:,}", _millions(table.paper_figure(name))) for name, count in table.components.items()]
    rows += [("total", f"{table.total:,}", _millions(table.paper_total))]
    rows += [(f"{peer_name(config)} of this width and depth", f"{peer_parameters(config):,}", "")]
    print_table(table.name, ("component", "parameters", "paper prints"), rows, texts=["component"])
    if costs:
        rows = [
            (f"{c.positions:,}", c.model, f"{c.forward_flops / 1e9:,.2f}", f"{c.activation_bytes / 1e6:,.1f}")
            for c in costs
        ]
        headings = ("positions", "model", "forward GFLOPs", "MB kept for the backward")
        print_table("layers of the model, one input, float32", headings, rows, texts=["model"])


def _millions(count: float | None) -> str:
    return "-" if count is None else f"{count / 1e6:.3g} M"
