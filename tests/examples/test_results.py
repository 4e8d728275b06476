"""docs/results.md is what the logs say."""

import json
import statistics

import pytest

from modeling_itnet.recipes import recipe_names


@pytest.fixture(scope="module")
def grid(load_script):
    return load_script("results_grid")


def test_page_matches_the_logs(load_script):
    table = load_script("results_table")
    assert table.PAGE.read_text() == table.page()


def test_runs_are_distinct_and_their_recipes_exist(grid):
    runs = grid.runs()
    assert len({run.path for run in runs}) == len(runs)
    assert {run.table.recipe for run in runs} <= set(recipe_names())


def test_every_log_belongs_to_the_grid(grid):
    paths = {run.path for run in grid.runs()}
    assert set(grid.RESULTS.glob("*.json")) <= paths


def test_spread_and_missing_runs(load_script, grid, monkeypatch, tmp_path):
    table = load_script("results_table")
    monkeypatch.setattr(grid, "RESULTS", tmp_path)
    row = grid.Row("model", "Model", seeds=3)
    task = grid.Table("task", "Task", "cifar10-cpu", {"accuracy": "accuracy"}, (row,))
    assert table.line(task, row)[1:] == ["not run", "", "", "", "0 of 3"]
    values = [0.5, 0.6]
    for seed, value in enumerate(values):
        log = {"metrics": {"accuracy": value}, "cpu_seconds": 10 + seed, "peak_memory_mb": 1000, "parameters": 1234}
        grid.Run(task, row, seed).path.write_text(json.dumps(log))
    spread = f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}"
    assert table.line(task, row) == ["Model", spread, "1,234", "10", "1,000", "2 of 3"]
