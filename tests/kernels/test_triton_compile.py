"""What the compiler makes of the tile configurations, without a GPU. A change that spills fails here."""

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the triton package is not installed")

SCRIPT = Path(__file__).resolve().parents[2] / "kernels" / "benchmarks" / "inspect_kernels.py"
spec = importlib.util.spec_from_file_location("inspect_kernels", SCRIPT)
inspection = sys.modules["inspect_kernels"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(inspection)


if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler", allow_module_level=True)

DEVICES = ["sm_80", "sm_90", "sm_100", "gfx942"]
VARIANTS = {"weighted": {}, "causal": {"is_causal": True}, "float16": {"dtype": "fp16"}}


@functools.cache
def inspect_default(kernel: str, arch: str = "sm_90", head_dim: int = 64, dtype: str = "bf16", **options):
    config = inspection.shipped_configs(kernel, arch, head_dim, dtype)[0]
    return inspection.inspect_kernel(kernel, config, arch, head_dim, dtype=dtype, **options)


@pytest.mark.parametrize("arch", DEVICES)
@pytest.mark.parametrize("kernel", inspection.PRODUCTS)
def test_every_configuration(kernel, arch):
    """d_h = 64, w = 128: no spills in the loop, nothing computed twice, no product serialised."""
    for config in inspection.shipped_configs(kernel, arch):
        report = inspection.inspect_kernel(kernel, config, arch)
        assert report.faults() == [], config
        if arch != "gfx942":
            assert report.mufu_per_element == 1.0
            assert report.tensor_instructions


@pytest.mark.parametrize("arch", DEVICES[:3])
@pytest.mark.parametrize("kernel", inspection.PRODUCTS)
def test_float32(kernel, arch):
    report = inspect_default(kernel, arch, dtype="fp32")
    assert report.faults() == []
    assert report.mufu_per_element == {"forward": 1.0, "backward": 2.0}[kernel]  # erf, and exp for its derivative


@pytest.mark.parametrize(
    ("arch", "head_dim", "width"), [("sm_90", 16, 32), ("sm_80", 32, 256), ("sm_80", 128, 64), ("sm_90", 128, 128)]
)
@pytest.mark.parametrize("kernel", inspection.PRODUCTS)
def test_other_sizes(kernel, arch, head_dim, width):
    assert inspect_default(kernel, arch, head_dim, width=width).faults() == []


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kernel", inspection.PRODUCTS)
def test_defaults_on_hopper(kernel, variant):
    """wgmma for every product; stack outside the loop only; figures of docs/kernels.md."""
    report = inspect_default(kernel, **VARIANTS[variant])
    assert report.faults() == []
    assert report.stack_bytes <= 64
    assert report.tensor_instructions.keys() == {"HGMMA"}
    assert report.wgmma_flop_share == report.flop_share == 1.0
    assert report.programs_per_sm >= (2 if kernel == "forward" else 1)
    # A wait for each product would undo the pipelining of its instructions.
    assert report.tensor_waits <= 6
    assert report.utilisation_none >= 0.4
    assert report.utilisation_perfect >= 0.7


def test_backward_costs_at_most_three_and_a_half_forwards():
    """In tensor-core FLOPs per pair as compiled; the GEMMs with W2 are two against one."""
    forward, backward = (inspect_default(kernel) for kernel in ("forward", "backward"))
    flops = {r.kernel: r.flop_share * inspection.PRODUCTS[r.kernel] for r in (forward, backward)}
    assert flops["backward"] <= 3.5 * flops["forward"]
    for shape in inspection.PAPER_SHAPES:
        row = inspection.predict(shape, {"forward": forward, "backward": backward})
        assert row["backward_gflop"] <= 3.5 * row["forward_gflop"]


@pytest.mark.parametrize("kernel", inspection.PRODUCTS)
def test_without_bias(kernel):
    (config, *_) = inspection.shipped_configs(kernel)
    assert inspection.inspect_kernel(kernel, config, needs_measure=True, has_bias=False).faults() == []


def test_faults_are_found():
    """Configurations that once shipped for an A100, where keys are few for eight warps, and for Hopper."""
    twice = inspection.inspect_kernel("backward", {"BK": 16, "num_warps": 8, "num_stages": 1}, "sm_80")
    assert twice.mufu_per_element > 1 and twice.flop_share > 1
    assert any("special functions per element instead of 1" in fault for fault in twice.faults())
    serialised = inspection.inspect_kernel("backward", {"BK": 32, "num_warps": 8, "num_stages": 2}, "sm_90")
    assert any("C7515" in fault for fault in serialised.faults())
    spilled = inspection.KernelReport(
        "forward", "sm_80", "fp32", 64, 128, {}, 255, 472, 186, 131072, loop_instructions=3970
    )
    assert spilled.faults() == ["186 spills in the loop"]


def test_the_loop_ends_before_the_kernel():
    """Code that is moved out of the loop's way, behind the end, branches back around more than the loop."""
    listing = """
        .L_x_0:
            /*0000*/  MUFU.TANH R0, R1 ;
            /*0010*/  HMMA.16816.F32 R0, R1, R2 ;
        .L_x_1:
            /*0020*/  HMMA.16816.F32 R0, R1, R2 ;
            /*0030*/  MUFU.TANH R0, R1 ;
            /*0040*/  @P0 BRA `(.L_x_1) ;
            /*0050*/  EXIT ;
        .L_x_2:
            /*0060*/  @P0 BRA `(.L_x_2) ;
            /*0070*/  BRA `(.L_x_0) ;
    """
    assert inspection.key_loop(listing) == ["HMMA.16816.F32", "MUFU.TANH", "BRA"]


@pytest.mark.parametrize(("dtype", "predictions"), [("bf16", len(inspection.PAPER_SHAPES)), ("fp32", 0)])
def test_command_line(subprocess_environment, dtype, predictions):
    command = [sys.executable, str(SCRIPT), "--arch", "sm_90", "--dtype", dtype, "--json", "--check"]
    result = subprocess.run(command, env=subprocess_environment, capture_output=True, text=True, check=True)
    report = json.loads(result.stdout)
    assert {kernel["kernel"] for kernel in report["kernels"]} == {"forward", "backward"}
    assert len(report["predictions"]) == predictions
