# SPDX-License-Identifier: Apache-2.0
"""``itnet train``: a script of examples/ with the options of a recipe."""

import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..training.recipes import find_clone, find_recipe, read_recipe
from .app import commands


@commands.command()
def train(
    recipe: Annotated[str, typer.Argument(help="YAML file, or the name of one in configuration/recipes.")],
    override: Annotated[
        list[str] | None, typer.Option("--override", "-o", help="An option in place of the recipe's: name=value.")
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Processes on this machine, by torchrun if above 1.")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command, do not run it.")] = False,
) -> None:
    """Train the model of a recipe, in a clone of the repository. For instance: itnet train modelnet10-cpu -o seed=1"""
    path = find_recipe(recipe)
    script = _script(path)
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", f"--nproc_per_node={processes}"]
    command = [*launcher, str(script), str(path), *_options(override or [])]
    if dry_run:
        typer.echo(shlex.join(command))
        return
    raise typer.Exit(code=_run(command))


def _script(recipe: Path) -> Path:
    """The file in examples/ that a recipe names."""
    folder, name = find_clone() / "examples", read_recipe(recipe)["script"]
    if not (folder / f"{name}.py").is_file():
        scripts = ", ".join(sorted(path.stem for path in folder.glob("run_*.py")))
        raise ValueError(f"{recipe} names the `script` {name!r}, which is not in {folder}; there are {scripts}")
    return folder / f"{name}.py"


def _run(command: list[str]) -> int:
    """Exit code of a command. Ctrl-C ends it with one line: the process itself does not hear of it, only SIGTERM."""
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited
    try:
        process = subprocess.Popen(command)
    finally:
        signal.signal(signal.SIGINT, handler)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        typer.echo("itnet: interrupted", err=True)
        return 130


def _options(overrides: list[str]) -> list[str]:
    """["seed=1", "config_overrides.rank=4"] -> ["--seed", "1", "--config_overrides", "rank=4"]."""
    words, settings = [], []
    for override in overrides:
        name, sign, value = override.partition("=")
        if not sign:
            raise ValueError(f"`--override` ({override!r}) must have the form name=value")
        if name.startswith("config_overrides."):
            settings.append(f"{name.removeprefix('config_overrides.')}={value}")
        else:
            words += [f"--{name}", value]
    return words + (["--config_overrides", *settings] if settings else [])
