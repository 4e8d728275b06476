"""The scripts as modules, and tiny data for each."""

import importlib
import json
import sys
from pathlib import Path

import datasets
import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (str(ROOT / "examples"), str(Path(__file__).parent))


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


@pytest.fixture
def run_script(load_script, monkeypatch, tmp_path):
    """Runs a script in this process; returns what it recorded."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def run(name: str, *arguments: str, output: str = "output") -> dict:
        folder = tmp_path / output
        options = ["--output_dir", str(folder), "--use_cpu", "true", "--disable_tqdm", "true", "--bf16", "false"]
        monkeypatch.setattr(sys, "argv", [f"examples/{name}.py", *arguments, *options])
        load_script(name).main()
        return json.loads((folder / "results.json").read_text(encoding="utf-8"))

    return run
