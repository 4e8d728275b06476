# SPDX-License-Identifier: Apache-2.0
"""``itnet verify``: the theorems of the paper, measured."""

from dataclasses import asdict
from typing import Annotated

import typer

from ..special_cases.verify import theorem_table
from .app import commands, print_json, print_table


@commands.command()
def verify(
    seed: Annotated[int, typer.Option(help="Of the random weights and signals.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure the paper's theorems: convolution, attention and recurrence as integral operators. Exit code 1 if one
    of them does not hold."""
    rows = theorem_table(seed=seed)
    if as_json:
        print_json([asdict(row) | {"holds": row.holds} for row in rows])
    else:
        headings = ("label", "statement", "measured", "bound", "holds")
        lines = [
            (r.name, r.statement, f"{r.error:.1e}", f"{r.relation} {r.tolerance:.0e}", "yes" if r.holds else "NO")
            for r in rows
        ]
        title = f"{sum(row.holds for row in rows)} of {len(rows)} statements hold"
        print_table(title, headings, lines, texts=headings)
    if not all(row.holds for row in rows):
        raise typer.Exit(code=1)
