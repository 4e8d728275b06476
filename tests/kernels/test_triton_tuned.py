"""Phase 1 of Alg. tiled_full: candidates, winners per device, and who reads them."""

import json
import os
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("triton", reason="the triton package is not installed")

from itnet_kernels.exact.triton import tuned
from itnet_kernels.exact.triton.configs import BACKWARD, FAMILIES, FORWARD, FUSED_BACKWARD, TILE_SIZES, Problem
from modeling_itnet.cli import app

HOPPER = Problem(head_dim=64, itemsize=2, major=9, shared_limit=232448)
TUNED = [family for family in FAMILIES if family is not BACKWARD]


@pytest.mark.parametrize("family", TUNED, ids=lambda family: family.name)
def test_candidates(family):
    """All four query tiles and the key tiles that fit; none beyond the registers or the shared memory."""
    found = tuned.candidates(family, HOPPER)
    expected = {64, 128} if family is FUSED_BACKWARD else set(TILE_SIZES)  # one hidden unit: as many as rows
    assert {settings["BP"] for settings in found} == expected
    assert {settings["BK"] for settings in found} <= set(TILE_SIZES)
    assert len(found) == len({tuple(settings.items()) for settings in found})
    assert all(tuned.registers(family, settings, HOPPER) < 255 for settings in found)
    assert family.configs[0].settings in found
    smaller = tuned.candidates(family, HOPPER._replace(shared_limit=40_000))
    assert len(smaller) < len(found) and all(settings in found for settings in smaller)
    assert tuned.estimated_seconds([family], HOPPER) == len(found) * tuned.SECONDS_PER_CANDIDATE


def test_the_fastest_wins_and_faults_are_left_out():
    def timer(family, settings) -> float:
        if settings["num_warps"] == 4:
            raise RuntimeError("out of resources")
        return abs(settings["BP"] - 32) + abs(settings["BK"] - 64) + settings["num_stages"]

    lines = []
    (winner,) = tuned.tune([FORWARD], HOPPER, timer, lines.append).values()
    assert winner == {"BP": 32, "ROWS": 128, "BK": 64, "num_warps": 8, "num_stages": 1}
    assert any("RuntimeError" in line for line in lines) and "forward" in lines[-1]


def test_written_and_read(tmp_path, monkeypatch):
    monkeypatch.setenv("ITNET_TUNED_DIR", str(tmp_path))
    key = tuned.problem_key(torch.bfloat16, 64, 128)
    settings = {"BP": 32, "ROWS": 128, "BK": 64, "num_warps": 8, "num_stages": 1}
    assert tuned.tuned_settings("forward", "NVIDIA H200", key) is None
    path = tuned.write("NVIDIA H200", key, {"forward": settings}, tmp_path)
    tuned.write("NVIDIA H200", tuned.problem_key(torch.float16, 64, 128), {"forward": settings | {"BK": 32}}, tmp_path)
    assert path.name == "nvidia-h200.json"
    assert json.loads(path.read_text(encoding="utf-8"))["device"] == "NVIDIA H200"
    assert tuned.tuned_settings("forward", "NVIDIA H200", key) == settings
    assert tuned.tuned_settings("forward", "NVIDIA H100", key) is None
    assert tuned.tuned_settings("fused_backward", "NVIDIA H200", key) is None
    with tuned.forced("forward", {"BK": 16}):
        assert tuned.tuned_settings("forward", "NVIDIA H100", key) == {"BK": 16}
    assert tuned.tuned_settings("forward", "NVIDIA H100", key) is None


@pytest.mark.parametrize("text", ["{", "[]", '{"configs": {"forward": {"bfloat16 d64 w128": {"BK": 16}}}}'])
def test_a_file_that_is_none_of_ours(tmp_path, monkeypatch, text):
    monkeypatch.setenv("ITNET_TUNED_DIR", str(tmp_path))
    (tmp_path / "some-gpu.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"some-gpu\.json is no file of `itnet tune`.*delete it, or tune again"):
        tuned.tuned_settings("forward", "Some GPU", tuned.problem_key(torch.bfloat16, 64, 128))


def test_candidates_of_the_backward_that_is_not_fused():
    """Its tiles differ in keys, warps and stages alone."""
    ampere = HOPPER._replace(major=8, shared_limit=166912)
    found = tuned.candidates(BACKWARD, ampere)
    assert BACKWARD.configs[5].settings in found  # that of d_h = 64 on an A100
    assert {settings["BK"] for settings in found} <= set(TILE_SIZES) and len(found) > 4
    assert all(tuned.registers(BACKWARD, settings, ampere) < 255 for settings in found)


def test_the_default_is_among_a_few_candidates():
    few = tuned.chosen_candidates(FORWARD, HOPPER, 5)
    every = tuned.chosen_candidates(FORWARD, HOPPER)
    assert few[0] == every[0] == FORWARD.configs[0].settings
    assert len(few) == 5 and len({tuple(settings.items()) for settings in few}) == 5
    assert all(settings in every for settings in few) and len(every) == len(tuned.candidates(FORWARD, HOPPER))
    assert tuned.chosen_candidates(FORWARD, HOPPER, 1) == few[:1]
    assert tuned.estimated_seconds([FORWARD], HOPPER, 5) == 5 * tuned.SECONDS_PER_CANDIDATE


CODE = """
import json, sys
import torch
from typer.testing import CliRunner
from modeling_itnet.cli import app
from modeling_itnet.cli import tune as command
from itnet_kernels.exact.triton import tuned
from itnet_kernels.exact.triton.forward import itnet_fwd_kernel
from itnet_kernels.exact.triton.backward import itnet_bwd_kernel

folder, clock, sizes = sys.argv[1], iter(range(9, 0, -1)), dict(head_dim=16, width=32, positions=3, batch=1, heads=1)
timed = command._seconds

def slower_first(run, device):  # the interpreter's times are noise: candidates get faster one by one
    assert timed(run, device) > 0
    return next(clock) / 1e3

command._seconds = slower_first
forward, step = command._runs(torch.device("cpu"), torch.float32, **sizes)

def tiles():
    step()
    return [kernel.best_config.all_kwargs() for kernel in (itnet_fwd_kernel, itnet_bwd_kernel)]

def result():
    kernel_inputs = command._runs(torch.device("cpu"), torch.float32, **sizes)[0]
    return kernel_inputs()

before, value = tiles(), result()
options = [f"--{name.replace('_', '-')}={size}" for name, size in sizes.items()]
called = CliRunner().invoke(app, ["tune", "--dtype=fp32", "--most=2", f"--output={folder}", *options])
assert called.exit_code == 0, (called.output, called.exception)
after, again = tiles(), result()
with open(f"{folder}/interpreter.json", encoding="utf-8") as file:
    winners = json.load(file)
torch.use_deterministic_algorithms(True)
for kernel in (itnet_fwd_kernel, itnet_bwd_kernel):
    kernel.cache.clear()
print(json.dumps([before, after, tiles(), winners, called.output.splitlines(), float((again - value).norm())]))
"""


def test_a_tuned_device_from_end_to_end(tmp_path):
    """The command in the interpreter: it times tiles, writes JSON, and later calls launch the winners."""
    variables = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "ITNET_TUNED_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", CODE, str(tmp_path)], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    before, after, deterministic, winners, lines, difference = json.loads(done.stdout.splitlines()[-1])
    assert lines[0].startswith("4 candidates, about ") and lines[-1].endswith("interpreter.json")
    assert winners["device"] == "interpreter" and set(winners["configs"]) == {"forward", "backward"}
    for family, old, new, fixed in zip((FORWARD, BACKWARD), before, after, deterministic, strict=True):
        winner = winners["configs"][family.name]["float32 d16 w32"]
        problem = Problem(16, 4, 9, 232448)
        assert winner == tuned.chosen_candidates(family, problem, 2)[1]  # the second was faster
        assert winner.items() <= new.items()
        assert not winner.items() <= old.items()
        assert fixed == old  # the default, as its order of sums is known
    assert difference < 1e-4


@pytest.mark.parametrize(
    ("options", "message"), [(["--most=0"], "`--most` (0)"), (["--dtype=fp8"], "`--dtype` ('fp8')")]
)
def test_mistakes(options, message):
    result = CliRunner().invoke(app, ["tune", "--estimate", *options])
    assert result.exit_code == 2
    assert message in result.output


def test_an_estimate_needs_no_gpu():
    result = CliRunner().invoke(app, ["tune", "--estimate", "--most=3"])
    assert result.exit_code == 0, result.output
    assert "9 candidates" in result.output
