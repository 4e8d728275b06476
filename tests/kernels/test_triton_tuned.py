"""Phase 1 of Alg. tiled_full: candidates, winners per device, and who reads them. No kernel runs here."""

import json

import pytest
import torch

pytest.importorskip("triton", reason="the triton package is not installed")

from itnet_kernels.exact.triton import tuned
from itnet_kernels.exact.triton.configs import FORWARD, FUSED_BACKWARD, POSITION_GRADIENT, TILE_SIZES, Problem

HOPPER = Problem(head_dim=64, itemsize=2, major=9, shared_limit=232448)
FAMILIES = [FORWARD, FUSED_BACKWARD, POSITION_GRADIENT]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_candidates(family):
    """All four query tiles and the key tiles that fit; none beyond the registers or the shared memory."""
    found = tuned.candidates(family, HOPPER)
    assert {settings["BP"] for settings in found} == set(TILE_SIZES)
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
