"""One seed for every test and no settings left behind; the scripts of examples/ as modules, and tiny data for each."""

import importlib
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

TESTS = Path(__file__).resolve().parent
FOLDERS = (str(TESTS.parent / "examples"), str(TESTS / "examples"))


@pytest.fixture(autouse=True)
def same_in_any_order():
    """Random numbers do not depend on the tests before this one, and this one changes no setting for those after."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    before = _settings()
    yield
    assert _settings() == before, "a test must restore what it sets"


def _settings() -> dict:
    return {
        "default dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
        "folder": Path.cwd(),
    }


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
