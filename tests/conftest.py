"""The scripts of examples/ as modules, and tiny data for each."""

import importlib
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
FOLDERS = (str(TESTS.parent / "examples"), str(TESTS / "examples"))


@pytest.fixture(scope="session")
def load_script():
    """Name of a file in examples/ -> its module."""
    sys.path[:0] = FOLDERS
    yield importlib.import_module
    for folder in FOLDERS:
        sys.path.remove(folder)


@pytest.fixture(scope="session")
def tiny_data(load_script, tmp_path_factory):
    """Script -> folder of its data."""
    return load_script("tiny_data").write(tmp_path_factory.mktemp("data"))
