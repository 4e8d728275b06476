# SPDX-License-Identifier: Apache-2.0
"""The sub-commands of ``itnet``, one file per group; ``itnet_command`` lists them and loads the one that is called."""

import json

import typer

from itnet_command import app, main

__all__ = ["app", "main"]

#: The sub-commands that have been loaded. The application is `app`.
commands = typer.Typer(callback=lambda: None)  # with a callback it stays a group, even of one


def given(**options) -> dict:
    """Returns the options that the user has given."""
    return {name: value for name, value in options.items() if value is not None}


def print_json(values) -> None:
    typer.echo(json.dumps(values))
