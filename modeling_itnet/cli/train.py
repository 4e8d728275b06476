# SPDX-License-Identifier: Apache-2.0
"""``itnet train`` runs a script of examples/ with the options of a recipe."""

import importlib
import shlex
import signal
import subprocess
import sys
from typing import Annotated

from typer import Argument, Exit, Option, echo

from ..training.recipes import find_clone, find_recipe, read_recipe
from . import commands


@commands.command()
def train(
    recipe: Annotated[str, Argument(help="YAML file, or the name of one in configuration/recipes.")],
    override: Annotated[
        list[str], Option("--override", "-o", help="An option in place of the recipe's: name=value.")
    ] = (),
    processes: Annotated[int, Option(min=1, help="Processes on this machine; torchrun starts more than 1.")] = 1,
    dry_run: Annotated[bool, Option("--dry-run", help="Print the command, and do not run it.")] = False,
) -> None:
    """For instance: itnet train modelnet10-cpu -o seed=1"""
    settings, options = read_recipe(find_recipe(recipe)), _options(override)
    folder, name = find_clone() / "examples", settings["script"]
    if not (folder / f"{name}.py").is_file():
        scripts = ", ".join(sorted(path.stem for path in folder.glob("run_*.py")))
        raise ValueError(f"{settings['recipe']} names the `script` {name!r}, but in {folder} there are {scripts}")
    launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={processes}"] if processes > 1 else []
    command = [sys.executable, *launcher, str(folder / f"{name}.py"), settings["recipe"], *options]
    if dry_run:
        echo(shlex.join(command))
        return
    try:
        if processes > 1:
            raise Exit(code=_launch(command))
        sys.path.insert(0, str(folder))  # where Python looks first when it runs a script
        importlib.import_module(name).main(settings, options)
    except KeyboardInterrupt:
        echo("itnet: interrupted", err=True)
        raise Exit(code=130) from None


def _launch(command: list[str]) -> int:
    """Returns a command's exit code. Its processes do not hear of Ctrl-C: this one does, and ends them by SIGTERM."""
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
        raise


def _options(overrides: list[str]) -> list[str]:
    """Turns ["seed=1", "config_overrides.rank=4"] into ["--seed", "1", "--config_overrides", "rank=4"]."""
    options, settings = [], []
    for override in overrides:
        name, sign, value = override.partition("=")
        if not sign:
            raise ValueError(f"`--override` ({override!r}) must have the form name=value")
        if name.startswith("config_overrides."):
            settings.append(override.removeprefix("config_overrides."))
        else:
            options += [f"--{name}", value]
    return options + (["--config_overrides", *settings] if settings else [])
