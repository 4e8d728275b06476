"""Runs interpreter_cases.py under TRITON_INTERPRET=1, once with small tiles and once with the default ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the triton package is not installed")

CASES = Path(__file__).with_name("interpreter_cases.py")
# 16 keys per iteration: several iterations, full and masked ones, even for short inputs.
SMALL_TILES = {
    "ITNET_FORWARD_CONFIG": "BP=16,ROWS=64,BK=16,num_warps=4,num_stages=1",
    "ITNET_BACKWARD_CONFIG": "BK=16,num_warps=4,num_stages=1",
    "ITNET_FUSED_BACKWARD_CONFIG": "BP=32,ROWS=32,BK=32,num_warps=4,num_stages=1",
    "ITNET_POSITION_GRADIENT_CONFIG": "BP=16,ROWS=64,BK=32,num_warps=4,num_stages=1",
    "ITNET_POSITION_WEIGHTS_CONFIG": "BP=16,ROWS=64,BK=32,num_warps=4,num_stages=1",
}


def run_cases(selection: str, environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "pytest", str(CASES), "-k", selection, "-q", "-p", "no:cacheprovider", "-n", "0"]
    variables = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"} | environment
    result = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert " passed" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "selection",
    [
        "test_float32",
        "test_float16 and (n33 or causal) or fragments or mates",
        "ragged_float32 and (causal or keys)",
        "chunks",
    ],
)
def test_small_tiles(selection):
    run_cases(selection, SMALL_TILES | {"ITNET_FUSED_BACKWARD": "1"})


@pytest.mark.slow
def test_the_backward_that_is_not_fused():
    run_cases("not test_float32 or n1 or n40 or d24", SMALL_TILES | {"ITNET_FUSED_BACKWARD": "0"})


@pytest.mark.slow
def test_default_tiles():
    run_cases("test_float32 and (n33 or shared-output) or test_float16 and n40", {"ITNET_FUSED_BACKWARD": "1"})
