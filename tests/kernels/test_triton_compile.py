"""What the compiler makes of the tile configurations, without a GPU. A change that spills fails here."""

import functools
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the triton package is not installed")

from modeling_itnet.integration.choice import EXACT_POSITIONS

SCRIPT = Path(__file__).resolve().parents[2] / "kernels" / "benchmarks" / "inspect_kernels.py"
sys.path.insert(0, str(SCRIPT.parent))
gpu_model, inspect_kernels, inspection = map(importlib.import_module, ("gpu_model", "inspect_kernels", "sass"))
sys.path.remove(str(SCRIPT.parent))

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler", allow_module_level=True)

DEVICES = ["sm_80", "sm_90", "sm_100", "gfx942"]
VARIANTS = {"weighted": {}, "causal": {"is_causal": True}, "float16": {"dtype": "fp16"}}


@functools.cache
def inspect_default(kernel: str, arch: str = "sm_90", head_dim: int = 64, dtype: str = "bf16", **options):
    config = inspection.shipped_configs(kernel, arch, head_dim, dtype)[0]
    return inspection.inspect_kernel(kernel, config, arch, head_dim, dtype=dtype, **options)


HOPPER_KERNELS = inspection.kernels_on("sm_90")


@pytest.mark.parametrize("arch", DEVICES)
def test_every_configuration(arch):
    """d_h = 64, w = 128: no spills in the loop, nothing computed twice, no product serialised."""
    for kernel in inspection.kernels_on(arch):
        for config in inspection.shipped_configs(kernel, arch):
            report = inspection.inspect_kernel(kernel, config, arch)
            assert report.faults() == [], (kernel, config)
            if arch != "gfx942":
                assert report.tensor_instructions


@pytest.mark.parametrize("arch", DEVICES[:3])
@pytest.mark.parametrize("kernel", ["forward", "backward"])
def test_float32(kernel, arch):
    report = inspect_default(kernel, arch, dtype="fp32")
    assert report.faults() == []
    assert report.mufu_per_element == {"forward": 1.0, "backward": 2.0}[kernel]  # erf, and exp for its derivative


@pytest.mark.parametrize(
    ("arch", "head_dim", "width"), [("sm_90", 16, 32), ("sm_80", 32, 256), ("sm_80", 128, 64), ("sm_90", 128, 128)]
)
def test_other_sizes(arch, head_dim, width):
    for kernel in inspection.kernels_on(arch, head_dim):
        assert inspect_default(kernel, arch, head_dim, width=width).faults() == [], kernel


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kernel", HOPPER_KERNELS)
def test_defaults_on_hopper(kernel, variant):
    """wgmma for the products over pairs; the bias goes straight to registers."""
    report = inspect_default(kernel, **VARIANTS[variant])
    assert report.faults() == []
    assert "HGMMA" in report.tensor_instructions
    # 64 columns of the keys' features and 16 positions' lengths for each 16 rows
    assert report.wgmma_flop_share == (1.062 if kernel == "position_weights" else 1.0)
    assert report.programs_per_sm >= (2 if kernel == "forward" else 1)
    # A wait for each product would undo the pipelining of its instructions.
    assert report.tensor_waits <= 6


def test_the_forward_moves_few_bytes():
    """A tile of 128 x 64: U once, the bias once; 84 KB through shared memory and L1, 25 KB through L2."""
    report, elements = inspect_default("forward"), 128 * 64
    assert report.shared_bytes_per_element * elements <= 88 * 1024
    assert report.global_bytes_per_element * elements <= 26 * 1024


def test_the_fused_backward_stores_no_pairs():
    """5 bytes per element in its loop: 2 of the bias, 1 of U, and 2 that it adds to the keys' gradient."""
    assert inspect_default("fused_backward").global_bytes_per_element <= 5.2


def test_the_backward_changes_few_layouts():
    """Bytes of a tile through shared memory and L1: products, h and dpre2 once, no conversion of what is added up."""
    reports = {kernel: inspect_default(kernel) for kernel in ("fused_backward", "position_weights")}
    in_loop = {kernel: report.shared_bytes_per_element * 128 * 64 / 1024 for kernel, report in reports.items()}
    outside = {kernel: report.row_shared_bytes * 128 / 1024 for kernel, report in reports.items()}
    assert in_loop["fused_backward"] <= 255 and in_loop["position_weights"] <= 165
    assert outside["fused_backward"] <= 620 and outside["position_weights"] <= 210


def test_predictions():
    """The slowest limit names them; the goals for n = 512, d = 768 on an H200 are in docs/kernels.md."""
    rows = {(row["GPU"], row["model"], row["n"]): row for row in inspect_kernels.roofline(["H200"])}
    row = rows["H200", "B", 512]
    assert row["util forward"] >= 0.55
    assert row["util backward"] >= 0.39
    assert {row["forward limit"], row["backward limit"]} <= set(gpu_model.LIMITS)
    assert rows["H200", "L", 1024]["forward ms"] > row["forward ms"] > rows["H200", "S", 196]["forward ms"]


def test_a_prediction_is_its_slowest_limit():
    device = gpu_model.DEVICES[0]
    clocks = device.processors * device.ghz * 1e9
    work = gpu_model.Work(flops=1e9, slots=64e9, shared=1e9, l2=1e6, hbm=1e6)
    found = gpu_model.predict({"one": work, "two": work}, device, useful_flops=2e9)
    assert found.limit == "issue"
    assert found.seconds == pytest.approx(2 * 1e9 * 64 / device.lanes / clocks)
    assert gpu_model.predict({"one": work}, device, 1e9, launches=10**6).limit == "launch"


def test_the_limit_of_exact_integration():
    """What docs/decisions.md says of the default: longer signals train faster by samples, also on a GPU."""
    sys.path.insert(0, str(SCRIPT.parent))
    limit = importlib.import_module("exact_limit")
    sys.path.remove(str(SCRIPT.parent))
    device = next(device for device in gpu_model.DEVICES if device.name == "A100")
    assert 0 < limit.break_even(device) <= EXACT_POSITIONS
    ratios = [limit.exact_seconds(device, n) / limit.monte_carlo_seconds(device, n) for n in (512, 1024, 8192)]
    assert 1 < ratios[0] < ratios[1] < ratios[2]


@pytest.mark.parametrize("kernel", ["forward", "fused_backward"])
def test_without_bias(kernel):
    (config, *_) = inspection.shipped_configs(kernel)
    assert inspection.inspect_kernel(kernel, config, needs_measure=False, has_bias=False).faults() == []


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
    assert [line.split()[0] for line in inspection.key_loop(listing)] == ["HMMA.16816.F32", "MUFU.TANH", "BRA"]


@pytest.mark.parametrize(
    ("dtype", "backward"),
    [("bf16", {"fused_backward", "position_weights", "position_gradient"}), ("fp32", {"backward"})],
)
def test_command_line(subprocess_environment, dtype, backward):
    command = [sys.executable, str(SCRIPT), "--arch", "sm_90", "--dtype", dtype, "--json", "--check"]
    result = subprocess.run(command, env=subprocess_environment, capture_output=True, text=True, check=True)
    assert {kernel["kernel"] for kernel in json.loads(result.stdout)["kernels"]} == {"forward"} | backward


def test_the_loop_of_an_amd_listing():
    """Vector instructions by their rate, bytes of a wave; neither matrix instructions nor what is behind the end."""
    listing = """
    .LBB0_1:
            v_mfma_f32_32x32x8_bf16 a[0:15], v[0:1], v[2:3], a[0:15]
    .LBB0_2:                                ; the loop
            global_load_dwordx4 v[0:3], v4, s[0:1]
            ds_read2_b64 v[0:3], v5
            v_exp_f32_e32 v0, v1
            v_pk_fma_f32 v[0:1], v[2:3], v[4:5], v[6:7]
            v_mfma_f32_32x32x8_bf16 a[0:15], v[0:1], v[2:3], a[0:15]
            s_cbranch_scc1 .LBB0_2
            s_cbranch_scc1 .LBB0_1
            s_endpgm
            v_mfma_f32_32x32x8_bf16 a[0:15], v[0:1], v[2:3], a[0:15]
            s_branch .LBB0_1
    """
    amdgcn = sys.modules["amdgcn"]
    assert amdgcn.count(amdgcn.key_loop(listing)) == (5, 64 * 16, 64 * 16)
    report = inspect_default("forward", "gfx942")
    assert 10 < gpu_model.issue_slots(report) == report.instructions_per_element < 100
