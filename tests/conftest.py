"""One seed for every test and no settings left behind; tiny sizes; the scripts of examples/ and data for them."""

import importlib
import random
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

TESTS = Path(__file__).resolve().parent
EXAMPLES = TESTS.parent / "examples"
FOLDERS = tuple(map(str, (EXAMPLES, EXAMPLES / "results", EXAMPLES / "paper", TESTS / "examples")))

VOCABULARY = 40
TINY = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "num_fourier_features": 3,
    "fourier_scale": 1.0,
    "kernel_hidden_size": 12,
    "kernel_init_scale": 1.0,
    "image_size": 16,
    "patch_size": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "embedding_dropout_prob": 0.0,
    "drop_path_rate": 0.0,
    "num_labels": 3,
}


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
def tiny_sizes() -> dict:
    """Arguments of ITNetConfig: two narrow layers, no dropout, a kernel that matters from the start."""
    return dict(TINY)


@pytest.fixture(scope="session")
def load_script():
    """Name of a file in examples/, its results/ or its paper/ -> its module."""
    sys.path[:0] = FOLDERS
    yield importlib.import_module
    for folder in FOLDERS:
        sys.path.remove(folder)


@pytest.fixture
def printed_rows(load_script, monkeypatch, capsys):
    """printed_rows(script, *arguments): the rows of the tables that a script prints, as lists of cells."""

    def run(script: str, *arguments) -> list[list[str]]:
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        default = torch.get_default_dtype()
        try:
            load_script(script).main()
        finally:
            torch.set_default_dtype(default)
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
        return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]

    return run


@pytest.fixture(scope="session")
def tiny_data(load_script, tmp_path_factory):
    """Script -> folder of its data."""
    return load_script("tiny_data").write(tmp_path_factory.mktemp("data"))
