# SPDX-License-Identifier: Apache-2.0
"""The ``itnet`` command: its sub-commands by name.

This module lies outside the packages, whose import loads torch and Transformers: ``itnet --help`` and ``itnet
--version`` need neither. A sub-command is loaded when it is called; ``modeling_itnet/cli`` has a file per group.
"""

import importlib
import runpy
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

#: Sub-command -> the module of modeling_itnet.cli that defines it, and the first sentence of its help. The docstring
#: of the function that defines it holds further ones.
COMMANDS = {
    "create": (
        "checkpoints",
        "Make a new, untrained model: seeded weights, configuration, processor, tokenizer, card and code.",
    ),
    "info": (
        "reports",
        "Print the real number of parameters by component, beside the paper's figures, and what a forward costs.",
    ),
    "train": ("train", "Train the model of a recipe, in a clone of the repository."),
    "convert": ("checkpoints", "Switch a trained exact model to low-rank, near and far, or Monte Carlo integration."),
    "export": (
        "checkpoints",
        "Write a folder that loads with trust_remote_code=True where this package is not installed.",
    ),
    "generate": ("generate", "Continue texts with a causal language model."),
    "plot-kernel": ("kernels", "Draw how strongly one layer couples the positions of an input."),
    "explore": (
        "explore",
        "Write a page that evaluates the kernels of a model in the browser, for every query of some inputs.",
    ),
    "verify": (
        "reports",
        "Measure the paper's theorems: convolution, attention and recurrence as integral operators.",
    ),
    "bench": ("reports", "Time one layer, forward and backward, beside an attention layer of the same width."),
    "tune": ("tune", "Time the tiles of the GPU kernels on this machine's GPU and keep the fastest."),
    "cards": ("checkpoints", "Write the model cards of all presets."),
}


class LazyCommands(TyperGroup):
    """Loads a sub-command when it is called. A mistake of the user is one line on stderr and exit code 2, as for a
    wrong option; not a traceback."""

    def resolve_command(self, ctx, args):
        name, command, rest = super().resolve_command(ctx, args)
        return name, (None if command is None else _load(name)), rest

    def invoke(self, ctx):
        try:
            return super().invoke(ctx)
        except Exception as error:
            if not _is_mistake(error):
                raise
            message = " ".join(str(error).split())
            typer.echo(f"itnet: {message}", err=True)
            raise typer.Exit(code=2) from None


app = typer.Typer(
    cls=LazyCommands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Tools around ITNet, the integral transform network. Start with: itnet create itnet-tiny my-model",
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        folder = Path(find_spec("modeling_itnet").origin).parent  # found, not imported
        typer.echo(f"itnet {runpy.run_path(str(folder / '_version.py'))['__version__']}")
        raise typer.Exit


@app.callback()
def callback(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def _listed(name: str, text: str) -> None:
    """Puts a sub-command into the list of ``itnet --help``."""

    @app.command(name, help=text)
    def listed() -> None:
        raise AssertionError(f"{name} was not loaded")


for _name, (_, _text) in COMMANDS.items():
    _listed(_name, _text)


def main() -> None:
    app()


def _load(name: str):
    """Returns the sub-command itself, which prints no progress bars beside its answer."""
    module, text = COMMANDS[name]
    commands = importlib.import_module(f"modeling_itnet.cli.{module}").commands
    importlib.import_module("transformers.utils.logging").disable_progress_bar()
    command = typer.main.get_command(commands).commands[name]
    command.help = " ".join(filter(None, (text, command.help)))
    return command


def _is_mistake(error: Exception) -> bool:
    """Says whether an error speaks to the user, as those of our checks do."""
    from huggingface_hub.errors import StrictDataclassError

    return isinstance(error, (ValueError, OSError, ImportError, StrictDataclassError))
