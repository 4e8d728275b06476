"""The protocol of evidence.py: equal budgets and parameters, restarts from logs, tests read once, tables from logs."""

import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

FEW = ("exact", "egnn", "mlp")


@pytest.fixture(scope="module")
def protocol(load_script):
    return load_script("protocol")


@pytest.fixture(scope="module")
def particles(load_script):
    """Three models of few parameters, on few particles, and four trials each."""
    problem = load_script("particle_problems").problems()["particles"]
    return replace(
        problem,
        **{"steps": 4, "tuning_steps": 2, "batch_size": 2, "num_particles": 8, "held_out": 16, "curve": 2},
        **{"parameters": 8000, "budget": 4, "seeds": (1, 2), "timed_seeds": (1, 2)},
        contestants={name: problem.contestants[name] for name in FEW},
        clock="exact",
    )


@pytest.fixture(scope="module")
def logs(protocol, particles, tmp_path_factory):
    """All trials of them, and a list of their names in the order in which they ran."""
    folder = tmp_path_factory.mktemp("logs")
    names = []
    original = protocol.Entry.run

    def run(entry, where):
        names.append(entry.name)
        return original(entry, where)

    protocol.Entry.run = run
    try:
        for model in FEW:
            protocol.run_rows(particles, model, folder, particles.seeds)
        for model in FEW[1:]:
            protocol.run_timed_rows(particles, model, folder, particles.timed_seeds)
    finally:
        protocol.Entry.run = original
    protocol.run_trivial(particles, folder)
    return folder, names


def read(folder, name):
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


def test_all_models_have_equal_budgets(particles, logs):
    _, names = logs
    for model in FEW:
        own = [name for name in names if name.startswith(f"particles.{model}.")]
        tuning, rows = own[: particles.budget], own[particles.budget :]
        assert all(".rate-" in name for name in tuning) and len(set(tuning)) == particles.budget
        expected = [f"particles.{model}.seed-1", f"particles.{model}.seed-2"]
        assert rows == expected + [f"particles.{model}.time-{seed}" for seed in (1, 2) if model != particles.clock]


def test_test_data_are_read_by_rows_alone(particles, logs):
    folder, names = logs
    for name in names:
        log = read(folder, name)
        if ".rate-" in name:
            assert log["test"] == {} == log["test_errors"] and "law" not in log
            assert (log["seed"], log["steps"]) == (0, particles.tuning_steps)
        else:
            assert list(log["test"]) == ["n = 4", "n = 8", "n = 16", "n = 32"]
            for test, errors in log["test_errors"].items():
                assert statistics.mean(errors) == pytest.approx(log["test"][test], rel=1e-3)


def test_rows_have_the_point_that_validation_chose(protocol, particles, logs):
    folder, names = logs
    for model in FEW:
        tuning = [read(folder, name) for name in names if name.startswith(f"particles.{model}.rate")]
        best = min(tuning, key=lambda log: log["validation"][-1][1])
        row = read(folder, f"particles.{model}.seed-1")
        for key in ("learning_rate", "weight_decay", "scale", "settings"):
            assert row[key] == best[key], key


def test_a_restart_runs_nothing(protocol, particles, logs, monkeypatch):
    folder, _ = logs
    monkeypatch.setattr(protocol.Entry, "run", lambda *_: pytest.fail("a trial with a log ran again"))
    for model in FEW:
        protocol.run_rows(particles, model, folder, particles.seeds)
        protocol.run_timed_rows(particles, model, folder, ()) if model == particles.clock else None
    protocol.run_timed_rows(particles, "mlp", folder, particles.timed_seeds)


def test_logs_of_other_settings_are_refused(protocol, particles, logs):
    folder, _ = logs
    other = replace(particles, shared={**particles.shared, "kernel_init_scale": 3.0})
    with pytest.raises(ValueError, match=r"has `kernel_init_scale` 1.0, not 3.0: delete it, or name another --logs"):
        protocol.searched(other, "mlp", folder)
    with pytest.raises(protocol.Missing, match=r"particles.exact.rate-0.003"):
        protocol.searched(particles, "exact", folder / "nowhere", may_run=False)


def test_equal_times_are_shares_of_the_clock(protocol, particles, logs):
    folder, _ = logs
    clock, own = (
        statistics.median_high([read(folder, f"particles.{m}.seed-{s}")["training_cpu_seconds"] / 4 for s in (1, 2)])
        for m in ("exact", "mlp")
    )
    steps = protocol.timed_steps(particles, "mlp", folder)
    if own > 0:  # so short a run may round to no time at all
        assert steps == max(1, min(round(4 * clock / own), protocol.LONGEST * 4))
    assert read(folder, "particles.mlp.time-1")["steps"] == steps
    with pytest.raises(protocol.Missing):
        protocol.timed_steps(replace(particles, clock="near_far"), "mlp", folder)


@pytest.mark.parametrize("model", FEW)
def test_parameters_are_matched(load_script, particles, model):
    start = load_script("search").Point(1e-2, particles.space(model).start)
    count = sum(parameter.numel() for parameter in particles.at(model, start).build(model).parameters())
    assert abs(count - particles.parameters) < 0.2 * particles.parameters


def test_knobs_reach_models(protocol, particles):
    point = protocol.Point(1e-2, (2.0, 1e-2, 2, ("x-y",), 16))
    moved = particles.at("exact", point)
    assert moved.weight_decay == 1e-2 and moved.config("exact").num_hidden_layers == 2
    assert moved.config("exact").kernel_hidden_size == 16 and list(moved.config("exact").kernel_inputs) == ["x-y"]
    assert particles.config("exact").num_hidden_layers == 1
    torch.manual_seed(0)
    doubled = replace(particles, scale=2.0).build("exact")
    torch.manual_seed(0)
    plain = dict(particles.build("exact").named_parameters())
    for name, parameter in doubled.named_parameters():
        is_matrix = parameter.dim() > 1 and name.rpartition(".")[2] in ("weight", "w1", "w2")
        assert torch.equal(parameter, plain[name] * 2 if is_matrix else plain[name]), name


def test_flops_of_a_linear_map_and_of_pairs(protocol, particles):
    """A linear map: two FLOPs per multiply-add, forward and for its weights. ITNet's pairs count too."""

    class Line(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.map = torch.nn.Linear(5, 7, bias=False)

        def forward(self, x):
            return type("Output", (), {"loss": self.map(x).sum()})

    assert protocol.training_flops(Line(), {"x": torch.randn(3, 5)}) == 2 * 2 * 3 * 5 * 7
    unfitted = replace(particles, parameters=0)
    narrow, wide = (
        protocol.training_flops(unfitted.at("exact", point).build("exact"), particles.batch(0, 1))
        for point in (protocol.Point(1e-2, (1.0, 1e-4, 1, ("x-y",), width)) for width in (16, 32))
    )
    assert wide > 1.3 * narrow


def test_models_without_absolute_positions_do_not_see_translations(load_script, particles):
    point_class = load_script("search").Point
    for model in ("exact", "egnn"):
        start = point_class(1e-2, particles.space(model).start)
        built, batch = particles.at(model, start).build(model).eval(), particles.batch(1, 0)
        with torch.no_grad():
            here, there = (built(**{**batch, "positions": batch["positions"] + s}).predictions for s in (0.0, 0.5))
        torch.testing.assert_close(here, there, rtol=1e-3, atol=1e-4)


def test_baselines_of_particles(particles):
    found = particles.trivial()
    assert all(torch.equal(errors, torch.ones_like(errors)) for errors in found["no force"].values())
    means = [found[name]["n = 32"].mean() for name in ("no force", "mean law", "mean law of the query's type")]
    assert means[0] > means[1] > means[2] > 0


def test_tables_say_what_logs_say(load_script, particles, logs):
    tables, comparisons = load_script("evidence_tables"), load_script("comparisons")
    folder, _ = logs
    text = tables.page({"particles": particles}, folder, "evidence")
    values = [read(folder, f"particles.egnn.seed-{seed}")["test"]["n = 8"] for seed in (1, 2)]
    spread = f"{statistics.mean(values):.4f} ± {statistics.stdev(values):.4f}"
    row = next(line for line in text.splitlines() if line.startswith("| EGNN |"))
    assert spread in row and row.endswith("| 2 of 2 |")
    assert "| *no force* | 1.000 | 1.000 | 1.000 | 1.000 |" in text
    assert "At the training time of ITNet, exact:" in text and "corrected for 8 comparisons (Holm)" in text
    found = tables.read_rows(particles, folder, "seed")
    made = tables.compared(particles, found, 2)
    assert set(made) == {(model, f"n = {n}") for model in ("egnn", "mlp") for n in (4, 8, 16, 32)}
    ours, theirs = (
        np.array([read(folder, f"particles.{m}.seed-{s}")["test_errors"]["n = 16"] for s in (1, 2)])
        for m in ("exact", "mlp")
    )
    assert made["mlp", "n = 16"][0] == comparisons.compare(ours, theirs)
    corrected = comparisons.holm([comparison.p for comparison, _ in made.values()])
    assert [p for _, p in made.values()] == corrected


def test_laws_are_found_by_least_squares(load_script):
    """True forces give back the true law, at the nodes, up to the error of linear interpolation."""
    typed, law_script = load_script("typed_particles"), load_script("force_law")
    law = typed.ForceLaw.draw()
    batch = typed.TypedParticles(law).batch(200, 32, typed.seeded(3))
    types = batch["signal_values"].argmax(-1)
    nodes, found = law_script.fitted_law(batch["labels"], batch["positions"], types, law)
    first, second = torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")
    expected = law.profile(first.unsqueeze(-1), second.unsqueeze(-1), nodes)
    size = expected.abs().max()
    assert (found - expected)[..., 1:].abs().max() < 0.12 * size  # nothing is near distance 0 to tell g there
    wrong = law_script.fitted_law(-batch["labels"], batch["positions"], types, law)[1]
    torch.testing.assert_close(wrong, -found, rtol=1e-6, atol=1e-8)


def test_figure_of_laws(load_script, logs, tmp_path, monkeypatch):
    folder, _ = logs
    script, output = load_script("force_law"), tmp_path / "law.png"
    monkeypatch.setattr(
        sys, "argv", ["force_law.py", "--models", "exact", "--logs", str(folder), "--output", str(output)]
    )
    script.main()
    assert output.read_bytes()[:4] == b"\x89PNG"
    monkeypatch.setattr(sys, "argv", ["force_law.py", "--models", "nobody", "--logs", str(folder)])
    with pytest.raises(SystemExit, match=r"there is no .*nobody.seed-1.json"):
        script.main()


def test_command_line(load_script, particles, logs, tmp_path, monkeypatch, capsys):
    script = load_script("evidence")
    folder, _ = logs
    monkeypatch.setattr(script, "problems", lambda data: {"particles": particles})
    page = tmp_path / "page.md"
    options = ["--logs", str(folder), "--page", str(page), "--threads", str(torch.get_num_threads())]
    for words in (["--models", "mlp"], ["--timed", "--models", "mlp"], ["--plan", "--models", "mlp"], ["--table"]):
        monkeypatch.setattr(sys, "argv", ["evidence.py", *words, *options])
        script.main()
    assert "hours of one core in all" in capsys.readouterr().out
    assert "### Typed particles" in page.read_text(encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["evidence.py", "--part", "3/2"])
    with pytest.raises(SystemExit, match=r"--part \(3/2\) must be K/N"):
        script.main()


def test_parts_divide_the_work(load_script):
    script = load_script("evidence")
    found = script.problems(Path("data"))
    pairs = [(problem, model) for problem in found.values() for model in problem.contestants]
    parts = [script.own_part(pairs, f"{k}/3") for k in (1, 2, 3)]
    assert sorted((p.name, m) for part in parts for p, m in part) == sorted((p.name, m) for p, m in pairs)
    for part in parts:
        names = {(p.name, m) for p, m in part}
        assert all((p.name, p.contestants[m].tuned_as or m) in names for p, m in part)
    for problem in found.values():
        spaces = [problem.space(model) for model, rival in problem.contestants.items() if not rival.tuned_as]
        assert len({sum(len(values) for values in space.knobs.values()) - len(space.knobs) for space in spaces}) == 1


def test_ablations_change_one_setting(load_script, particles, logs, tmp_path, monkeypatch):
    """Rows have the point of their model's search; the table compares each with that model."""
    script, folder = load_script("ablations"), logs[0]
    full = load_script("particle_problems").problems()["particles"]
    three = {name: full.contestants[name] for name in script.BASES}
    problem = script.ablated(replace(particles, contestants=three), folder)
    assert sum(name.startswith("inputs-") for name in problem.contestants) == 13
    protocol = load_script("protocol")
    point = protocol.searched(problem, "inputs-content", folder / "nowhere").best  # of exact's search
    assert point == protocol.searched(particles, "exact", folder).best
    base, row = (problem.at(name, point) for name in ("exact", "inputs-content"))
    first, second = base.config("exact").to_dict(), row.config("inputs-content").to_dict()
    assert {key for key in first if first[key] != second[key]} == {"kernel_inputs"}
    assert (base.scale, base.weight_decay) == (row.scale, row.weight_decay)
    short = replace(problem, seeds=(1, 2), contestants={n: problem.contestants[n] for n in ("exact", "inputs-none")})
    for model in short.contestants:
        protocol.run_rows(short, model, tmp_path, short.seeds)
    text = script.page({short.name: short}, tmp_path)
    assert "| kernel of nothing (constant) |" in text and "| changed | n = 4 |" in text
    with pytest.raises(protocol.Missing, match=r"particles.near_far.rate-0.003"):
        protocol.run_rows(problem, "near_far", tmp_path, (1,))
    meshes = script.problems(Path("data"))["darcy-meshes-ablated"]
    assert {"exact-uniform", "near_far-uniform", "low_rank-uniform"} <= set(meshes.contestants)
    assert not meshes.contestants["exact-uniform"].build.sees_measure


def test_summary_figure(load_script, particles, logs, tmp_path, monkeypatch, capsys):
    """The ratio is the geometric mean over seeds, beside the peer that is best on the test itself."""
    folder, _ = logs
    script, output = load_script("summary_figure"), tmp_path / "summary.png"
    monkeypatch.setattr(script, "problems", lambda data: {"particles": particles})
    monkeypatch.setattr(sys, "argv", ["summary_figure.py", "--logs", str(folder), "--output", str(output)])
    script.main()
    assert output.read_bytes()[:4] == b"\x89PNG" and "n = 16 against" in capsys.readouterr().out
    errors = {
        model: [read(folder, f"particles.{model}.seed-{seed}")["test_errors"]["n = 16"] for seed in (1, 2)]
        for model in FEW
    }
    means = {model: [statistics.mean(seed) for seed in found] for model, found in errors.items()}
    best = min(("egnn", "mlp"), key=lambda model: sum(means[model]))
    expected = statistics.geometric_mean(a / b for a, b in zip(means["exact"], means[best], strict=True))
    found = script.ratios(particles, folder)[2]
    assert found.peer == particles.contestants[best].label
    assert found.value == pytest.approx(expected) and found.low < found.value < found.high
    monkeypatch.setattr(sys, "argv", ["summary_figure.py", "--logs", str(tmp_path)])
    with pytest.raises(SystemExit, match="no problem has all its rows"):
        script.main()


def test_page_matches_the_logs(load_script):
    """docs/evidence.md, between its marks, is what the logs in the repository say."""
    script, tables = load_script("evidence"), load_script("trial_tables")
    text = script.PAGE.read_text(encoding="utf-8")
    begin, end = tables.marks(script.SCRIPT)
    inside = text.partition(begin)[2].partition(end)[0].strip()
    assert inside == script.page(script.problems(Path("data")), script.LOGS)
