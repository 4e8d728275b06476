# Copyright 2026 The ITNet Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""The ``itnet`` command. ``itnet --help`` lists what it does."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from configuration_itnet import ITNetConfig, preset_names

from .parameters import ParameterTable, parameter_table

app = typer.Typer(no_args_is_help=True, help="Tools around ITNet, the integral transform network.")


@app.callback()
def callback() -> None:
    """A callback keeps ``info`` a sub-command while it is the only one."""


@app.command()
def info(
    models: Annotated[
        list[str] | None, typer.Argument(help="Presets or checkpoint folders; all presets if none.")
    ] = None,
    modality: Annotated[str | None, typer.Option(help="Build the presets for this modality.")] = None,
    sharing: Annotated[str, typer.Option(help="kernel_output_sharing: per_head or shared.")] = "per_head",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Print the real number of parameters, in total and by component, beside the paper's figures."""
    try:
        tables = [parameter_table(name, load_config(name, modality, sharing)) for name in models or preset_names()]
    except (ValueError, OSError) as error:
        typer.echo(f"itnet: {error}", err=True)
        raise typer.Exit(code=2) from None
    if as_json:
        typer.echo(json.dumps({t.name: t.components | {"total": t.total, "paper": t.paper_total} for t in tables}))
        return
    for table in tables:
        print_table(table)


def load_config(name: str, modality: str | None, sharing: str) -> ITNetConfig:
    """A preset by name, or the configuration of a checkpoint folder."""
    if Path(name).is_dir():
        return ITNetConfig.from_pretrained(name)
    overrides = {"kernel_output_sharing": sharing}
    if modality is not None:
        overrides["modality"] = modality
    return ITNetConfig.from_preset(name, **overrides)


def print_table(table: ParameterTable) -> None:
    grid = Table(title=table.name, title_justify="left")
    for heading in ("component", "parameters", "paper prints"):
        grid.add_column(heading, justify="left" if heading == "component" else "right")
    for component, count in table.components.items():
        grid.add_row(component, f"{count:,}", millions(table.paper_figure(component)))
    grid.add_section()
    grid.add_row("total", f"{table.total:,}", millions(table.paper_total))
    Console().print(grid)


def millions(count: float | None) -> str:
    return "-" if count is None else f"{count / 1e6:.3g} M"


def main() -> None:
    app()
