"""docs/results.md is what the logs say."""

import json
import statistics

import numpy as np
import pytest
from scipy.stats import t as student

from modeling_itnet.training.recipes import recipe_names


@pytest.fixture(scope="module")
def grid(load_script):
    return load_script("grid")


def test_page_matches_the_logs(load_script):
    table = load_script("table")
    assert table.PAGE.read_text(encoding="utf-8") == table.page()


def test_runs_are_distinct_and_their_recipes_exist(grid):
    runs = grid.runs()
    assert len({run.path for run in runs}) == len(runs)
    assert {run.table.recipe for run in runs} <= set(recipe_names())


def test_every_log_belongs_to_the_grid(grid):
    paths = {run.path for run in grid.runs()} | {grid.RESULTS / "trivial.json"}
    assert set(grid.RESULTS.glob("*.json")) <= paths


def test_every_remark_belongs_to_a_table(load_script, grid):
    assert load_script("table").remarks().keys() <= {table.name for table in grid.TABLES if table.kind != "tuning"}


def test_spread_and_missing_runs(load_script, grid, monkeypatch, tmp_path):
    table = load_script("table")
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
    monkeypatch.setattr(load_script("table"), "RESULTS", tmp_path)
    assert "| model | **0.300** | 0.200 | 0.100 |" in load_script("table").tuning_section(accuracy)


def test_models_to_start_from_are_runs_of_the_grid(grid):
    stems = {run.path.stem for run in grid.runs()}
    assert {run.row.start for run in grid.runs()} - {""} <= stems


def test_welch_is_the_formula(load_script, grid, monkeypatch, tmp_path):
    """t = (a - b) / sqrt(s_a^2 / n_a + s_b^2 / n_b), with the degrees of freedom of Welch and Satterthwaite."""
    table = load_script("table")
    monkeypatch.setattr(grid, "RESULTS", tmp_path)
    rows = (grid.Row("itnet-exact", "ITNet", seeds=3), grid.Row("peer", "Peer", seeds=3), grid.Row("once", "Once"))
    task = grid.Table("task", "Task", "cifar10-cpu", {"accuracy": "accuracy"}, rows)
    scores = {"itnet-exact": [0.50, 0.53, 0.51], "peer": [0.47, 0.52, 0.49], "once": [0.1]}
    for row in rows:
        for seed, value in enumerate(scores[row.name]):
            log = json.dumps({"metrics": {"accuracy": value}})
            grid.Run(task, row, seed).path.write_text(log, encoding="utf-8")
    first, second = scores["itnet-exact"], scores["peer"]
    parts = [statistics.variance(values) / 3 for values in (first, second)]
    t = (statistics.mean(first) - statistics.mean(second)) / sum(parts) ** 0.5
    freedom = sum(parts) ** 2 / sum(part**2 / 2 for part in parts)
    expected = 2 * student.sf(abs(t), freedom)
    assert table.welch(task) == f"Welch's t-test over seeds, p: ITNet against Peer = {expected:.3f}."


def test_trivial_models(load_script, tiny_data):
    trivial = load_script("trivial_baselines")
    assert trivial.majority([0, 0, 1], [0, 1, 1, 1]) == 0.25
    folder = tiny_data["run_glue"] / "mrpc"  # as many of either class: the first wins
    assert trivial.one_class(folder)[1] == {"accuracy": 0.5, "f1": 0.0, "matthews_correlation": 0.0}
    assert trivial.graphs(tiny_data["run_graph_classification"], "mutag")[1] == {"accuracy": 0.5}
    _, scores = trivial.mean_solution(tiny_data["run_operator_learning"], "burgers")
    with np.load(tiny_data["run_operator_learning"] / "burgers_train_16.npz") as arrays:
        mean = arrays["y"][:, -1].mean(0)
    with np.load(tiny_data["run_operator_learning"] / "burgers_test_16.npz") as arrays:
        solutions = arrays["y"][:, -1]
    errors = np.linalg.norm(mean - solutions, axis=1) / np.linalg.norm(solutions, axis=1)
    assert scores == {"16_relative_l2": pytest.approx(errors.mean(), rel=1e-5)}
    assert 0 <= trivial.prior(tiny_data["run_vqa"], False)[1]["accuracy"] <= 1


def test_every_floor_belongs_to_a_table(load_script, grid):
    tables = {table.name: table for table in grid.TABLES if table.kind == "task"}
    found = load_script("table").trivial()
    assert (
        found.keys() <= tables.keys() and found.keys() == load_script("trivial_baselines").baselines(grid.ROOT).keys()
    )
    for name, floor in found.items():
        assert set(floor["metrics"]) & set(tables[name].metrics)
