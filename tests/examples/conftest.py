"""Runs a script in the process of the test."""

import json
import sys

import datasets
import pytest


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
