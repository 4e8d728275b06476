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
"""``itnet train``: a script of examples/ with the options of a recipe."""

import shlex
import subprocess
import sys
from typing import Annotated

import typer

from ..recipes import ROOT, find_recipe, read_recipe
from .app import app


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="YAML file, or the name of one in configuration/recipes.")],
    override: Annotated[
        list[str] | None, typer.Option("--override", "-o", help="An option in place of the recipe's: name=value.")
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Processes on this machine, by torchrun if above 1.")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command, do not run it.")] = False,
) -> None:
    """Train the model of a recipe, for instance: itnet train cifar10-cpu -o seed=1 -o model_type=vit"""
    path = find_recipe(recipe)
    script = ROOT / "examples" / f"{read_recipe(path)['script']}.py"
    if not script.is_file():
        raise ValueError(f"{script} does not exist: training needs a clone of the repository, not a wheel")
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", f"--nproc_per_node={processes}"]
    command = [*launcher, str(script), str(path), *_options(override or [])]
    if dry_run:
        typer.echo(shlex.join(command))
        return
    raise typer.Exit(code=subprocess.run(command).returncode)


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
