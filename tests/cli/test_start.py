"""``itnet --help`` and ``itnet --version`` answer at once; the list of sub-commands is that of the sub-commands."""

import importlib
import json
import re
import subprocess
import sys

import pytest
import typer

from itnet_command import COMMANDS
from modeling_itnet import __version__

PROGRAM = """
import json, sys
from itnet_command import app
try:
    app(sys.argv[1:])
except SystemExit as stop:
    heavy = ("torch", "transformers", "modeling_itnet")
    print(json.dumps([stop.code, [name for name in heavy if name in sys.modules]]))
"""


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_nothing_heavy_is_loaded(option):
    done = subprocess.run([sys.executable, "-c", PROGRAM, option], capture_output=True, text=True, check=True)
    *printed, state = done.stdout.splitlines()
    assert json.loads(state) == [0, []]
    if option == "--version":
        assert printed == [f"itnet {__version__}"]
    else:
        assert all(any(f" {name} " in line for line in printed) for name in COMMANDS)


def test_an_unknown_command_is_named(refuse):
    assert "No such command 'creat'" in refuse("creat")


@pytest.mark.parametrize("name", COMMANDS)
def test_help(run, name):
    """The help of a sub-command begins with its sentence in the list."""
    printed = re.sub(r"[\s│]+", " ", run(name, "--help"))
    assert f" {name} " in printed and COMMANDS[name][1] in printed


def test_every_command_is_listed():
    for module in {module for module, _ in COMMANDS.values()}:
        commands = importlib.import_module(f"modeling_itnet.cli.{module}").commands
    assert set(typer.main.get_command(commands).commands) == set(COMMANDS)
