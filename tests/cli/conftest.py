"""The command line in a folder of its own."""

import pytest
from typer.testing import CliRunner

from modeling_itnet.cli import app


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(*arguments): must succeed; what it prints."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert result.exit_code == 0, result.stderr
        return result.stdout

    return call


@pytest.fixture
def fail(tmp_path, monkeypatch):
    """fail(*arguments): the one line that a mistake prints."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert result.exit_code == 2 and result.stderr.count("\n") == 1, result.output
        return result.stderr.strip()

    return call


@pytest.fixture
def refuse(tmp_path, monkeypatch):
    """refuse(*arguments): what is printed about an option that is out of range."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})
        assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.output
        return " ".join(result.stderr.split())

    return call
