"""``make bench-gpu`` without a GPU: its whole path in the interpreter at tiny shapes, and what it does in trouble."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the triton package is not installed")
pytest.importorskip("psutil")
pytest.importorskip("rich")

FOLDER = Path(__file__).resolve().parents[2] / "kernels" / "benchmarks"
SIZES, DTYPES = ("S", "B", "L"), ("float32", "float16")
MODES = ("exact", "near_far", "low_rank", "monte_carlo")
CHECKS = {
    "exact": 8,
    "lists": 7,  # windows twice, balls, edges, anchors, samples twice
    "low rank": 6,  # both forms: complete, causal, with decay and a state
    "one token": 4,
}


@pytest.fixture(scope="module")
def parts():
    """A module of the benchmark by its name."""
    sys.path.insert(0, str(FOLDER))
    before = set(sys.modules)
    yield lambda name: importlib.import_module(f"gpu.{name}")
    sys.path.remove(str(FOLDER))
    for name in set(sys.modules) - before:
        if FOLDER in Path(getattr(sys.modules[name], "__file__", None) or "/").parents:
            del sys.modules[name]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(results, page) of a run in the interpreter."""
    folder = tmp_path_factory.mktemp("bench")
    command = [sys.executable, str(FOLDER / "bench_gpu.py"), "--interpret", "--output", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "rows; about" in done.stdout  # the estimate comes first
    return json.loads((folder / "gpu.json").read_text(encoding="utf-8")), (folder / "gpu.md").read_text(
        encoding="utf-8"
    )


def test_every_kernel_is_checked(run):
    results, page = run
    assert results["all_checks_passed"]
    for family, count in CHECKS.items():
        rows = [row for row in results["checks"] if row["family"] == family]
        assert [row["dtype"] for row in rows] == list(DTYPES) * count
        assert all(row["case"] in page for row in rows)
        # Gradients of features and weights beside the output, some of measure and positions; none of a token.
        assert all(row["compared"] == 1 if family == "one token" else row["compared"] >= 6 for row in rows)
    assert {row["family"] for row in results["checks"] if row.get("repeats")} == {"exact", "lists", "low rank"}
    assert f"{2 * sum(CHECKS.values())} of {2 * sum(CHECKS.values())} passed" in page


def test_every_row_is_timed_and_predicted(run):
    results, page = run
    rows = results["rows"]
    steps = {(row["modality"], row["model"], row["mode"]) for row in rows["training steps"]}
    peers = {"image": "ViT, SDPA", "text": "BERT, SDPA"}
    assert steps == {(kind, size, mode) for kind in peers for size in SIZES for mode in (*MODES, peers[kind])}
    modes = ("exact", "near field", "low rank, vector", "low rank, matrix", "Monte Carlo", "SDPA")
    assert [(row["model"], row["mode"]) for row in rows["operators"]] == [(s, mode) for s in SIZES for mode in modes]
    assert [row["paper_tflops"] for row in rows["profiling"]] == [604, 831, 870]
    throughputs = [row["paper_throughput"] for row in rows["wallclock"]]
    assert throughputs == [1820, 1480, 2240, 3900, 1050, 2800, 4100, 3200, 7800, 2400, 5800, 1280, 860, 1520, 2200,
                           520, 410, 680, 890]  # fmt: skip
    decoders = ["exact", "near_far", "low_rank", "low_rank, matrix", "GPT-2, SDPA"]
    assert [row["mode"] for row in rows["decoding"]] == decoders
    for section, found in rows.items():
        assert not [row["failure"] for row in found if "failure" in row]
        assert all(row["forward_ms"] > 0 for row in found)
        if section != "decoding":
            assert all(row["step_ms"] > 0 and row["predicted_step_ms"] > 0 for row in found)
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    for row in rows["wallclock"]:
        (line,) = (li for li in lines if f"| {row['method']} | {row['benchmark']} |" in li)
        assert f"| {row['paper_throughput']} |" in line


def test_the_page_says_what_it_is(run):
    results, page = run
    assert not results["is_measured"]
    for text in ("**Not a measurement.**", "bfloat16 wrong", results["torch"], results["triton"], "## Limits"):
        assert text in page
    titles = [line for line in page.splitlines() if line.startswith("## ")]
    assert titles == ["## Checks", "## Table profiling of the paper", "## Table wallclock of the paper",
                      "## Training steps", "## The operator of each mode", "## Decoding", "## Limits"]  # fmt: skip


def test_a_wrong_kernel_fails(parts):
    """One gradient off by a thousandth of its size, one output of half precision, bits that differ, an exception."""
    cases, checks = parts("cases"), parts("checks")
    tensors = {"u": torch.arange(1.0, 9.0, dtype=torch.float64), "measure": torch.ones(8, dtype=torch.float64)}
    noise = iter(range(100))

    def right(t):
        return (t["u"] * t["measure"].to(t["u"].dtype)).view(1, 1, 2, 4)

    def wrong_gradient(t):
        return right(t | {"u": t["u"] - 1e-3 * (t["u"] - t["u"].detach())})

    def random(t):
        return right(t) * (1 + 1e-6 * next(noise))

    def verdict(kernel, dtype=torch.float32):
        return checks._check(cases.Case("exact", "one", tensors, kernel, right), dtype, is_repeated=True)

    assert verdict(right)["passed"] and verdict(right, torch.float16)["passed"]
    assert verdict(wrong_gradient)["worst"] == "u" and not verdict(wrong_gradient)["passed"]
    assert not verdict(lambda t: 1.05 * right(t), torch.bfloat16)["passed"]
    assert verdict(random)["repeats"] is False and not verdict(random)["passed"]
    assert not verdict(lambda t: right(t) * float("nan"))["passed"]


def test_nothing_is_timed_after_a_failed_check(parts):
    rows = [{"family": "exact", "case": "causal", "dtype": "bfloat16", "passed": False, "error": "Error: no"}]
    results = {"device": "NVIDIA H200", "is_measured": True, "checks": rows, "all_checks_passed": False}
    results |= {"predicted_for": "H200", "seconds": 1.0, "estimated_seconds": 1.0}
    page = parts("page").page(results)
    assert "**failed**: Error: no" in page
    assert "Nothing was timed" in page and "## Training steps" not in page


def test_one_workload_in_trouble_leaves_the_others(parts):
    clock = parts("clock")
    timer = clock.Clock(torch.device("cpu"), seconds=1e3)

    def broken():
        raise RuntimeError("no such kernel")

    def full():
        raise torch.OutOfMemoryError("too much")

    calls = []
    fine = clock.Workload(("fine",), lambda: clock.Runs(lambda: calls.append(1)))
    assert timer.measure(clock.Workload(("broken",), broken))["failure"] == "RuntimeError: no such kernel"
    assert timer.measure(clock.Workload(("full",), lambda: clock.Runs(full)))["failure"] == "out of memory"
    assert timer.measure(fine)["forward_ms"] >= 0 and timer.measure(fine) and calls == [1]  # timed once
    timer.seconds = 0
    assert timer.measure(fine)["forward_ms"] >= 0  # known already
    assert "time was up" in timer.measure(clock.Workload(("late",), broken))["failure"]


def test_the_plan_on_a_gpu(parts):
    """The paper's shapes, all three dtypes, and an estimate below ten minutes even if every step took 0.5 s."""
    scope, plan = parts("scope").on_gpu(), parts("plan")
    assert {str(dtype) for dtype in scope.dtypes} == {"torch.float32", "torch.float16", "torch.bfloat16"}
    rows = plan.rows(scope, None)
    operators = [row.labels for row in rows if row.section == "operators"]
    assert {(row["model"], row["n"]) for row in operators} == {(s, n) for s in SIZES for n in (196, 512, 1024)}
    assert {row.labels["n"] for row in rows if row.section == "wallclock"} == {196, 512, 1024, 260}
    for row in rows:
        row.predicted = parts("predictions").Predicted(0.02, 0.1, "issue")
    assert 60 < sum(plan.estimated_seconds(rows).values()) < 600
    assert parts("predictions").find_device("NVIDIA H100 80GB HBM3").name == "H100"
    assert parts("predictions").find_device("AMD Instinct MI300X").arch == "gfx942"
    assert parts("predictions").find_device("NVIDIA GeForce RTX 4090") is None


def test_without_a_gpu():
    """It says so, and what to do instead."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = subprocess.run([sys.executable, str(FOLDER / "bench_gpu.py")], capture_output=True, text=True)
    assert done.returncode == 1
    assert "no GPU here" in done.stderr and "--interpret" in done.stderr
