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
    assert table.PAGE.read_text(encoding="utf-8") == table.page()


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
    assert table.line(task, row)[1:] == ["not run", "", "", "", "", "0 of 3"]
    values = [0.5, 0.6]
    for seed, value in enumerate(values):
        log = {"metrics": {"accuracy": value}, "cpu_seconds": 10 + seed, "peak_memory_mb": 1000, "parameters": 1234}
        log["learning_rate"] = 3e-3
        grid.Run(task, row, seed).path.write_text(json.dumps(log), encoding="utf-8")
    spread = f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}"
    assert table.line(task, row) == ["Model", spread, "0.003", "1,234", "10", "1,000", "2 of 3"]


def test_best_learning_rate_is_taken(load_script, grid, monkeypatch, tmp_path):
    monkeypatch.setattr(grid, "RESULTS", tmp_path)
    accuracy = grid.tuning_table("task", "Task", {"accuracy": "accuracy"}, {"model": ()})
    error = grid.tuning_table("other", "Other", {"16_relative_l2": "error"}, {"model": ()})
    monkeypatch.setattr(grid, "TABLES", (accuracy, error))
    row = grid.Row("itnet-exact", "ITNet", tuned="model")
    runs = [
        grid.Run(grid.Table("t", "T", "cifar10-cpu", {}, (row,), tuning=f"{name}-rates"), row, 2)
        for name in ("task", "other")
    ]
    with pytest.raises(FileNotFoundError, match=r"task-rates.model-1e-3.0, .* has not run"):
        _ = runs[0].options
    for table, metric in ((accuracy, "accuracy"), (error, "16_relative_l2")):
        for tried, value in zip(table.rows, (0.3, 0.2, 0.1), strict=True):
            grid.Run(table, tried, 0).path.write_text(json.dumps({"metrics": {metric: value}}), encoding="utf-8")
    assert runs[0].options == ["--learning_rate", "1e-3", "--seed", "2"]  # the highest accuracy
    assert runs[1].options == ["--learning_rate", "1e-2", "--seed", "2"]  # the lowest error
    monkeypatch.setattr(load_script("results_table"), "RESULTS", tmp_path)
    assert "| model | **0.300** | 0.200 | 0.100 |" in load_script("results_table").tuning_section(accuracy)


def test_models_to_start_from_are_runs_of_the_grid(grid):
    stems = {run.path.stem for run in grid.runs()}
    assert {run.row.start for run in grid.runs()} - {""} <= stems
