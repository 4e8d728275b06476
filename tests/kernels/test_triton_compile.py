"""What the compiler makes of the default configurations, without a GPU. A change that spills fails here."""

import functools
import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="the triton package is not installed")

from itnet_kernels.inspect import (
    PAPER_SHAPES,
    PRODUCTS,
    SHARED_LIMIT,
    compile_kernel,
    inspect_kernel,
    predict,
    shipped_configs,
)

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler", allow_module_level=True)

VARIANTS = {
    "weighted": {},
    "uniform": {"uniform": True},
    "causal": {"is_causal": True},
    "float16": {"dtype": "fp16"},
}


@functools.cache
def inspect_default(kernel: str, arch: str = "sm_90", head_dim: int = 64, dtype: str = "bf16", **options):
    config = shipped_configs(kernel, arch, head_dim, dtype)[0]
    return inspect_kernel(kernel, config, arch, head_dim, dtype=dtype, **options)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kernel", PRODUCTS)
def test_defaults_on_hopper(kernel, variant):
    """d_h = 64, w = 128: no spills in the loop, wgmma for every product and nothing computed twice."""
    report = inspect_default(kernel, **VARIANTS[variant])
    assert report.loop_spill_instructions == 0
    assert report.stack_bytes <= 64  # outside the loop
    assert report.tensor_instructions.keys() == {"HGMMA"}
    assert report.wgmma_flop_share == 1.0
    assert report.shared_bytes <= 227 * 1024
    assert report.mufu_per_element == 1.0
    assert report.programs_per_sm >= (2 if kernel == "forward" else 1)
    # A wait for each product would undo the pipelining of its instructions.
    assert report.tensor_waits <= 6


@pytest.mark.parametrize(
    ("variant", "least"),
    [("weighted", 0.45), ("uniform", 0.45), ("float16", 0.45), ("causal", 0.45)],
    ids=lambda value: str(value),
)
def test_forward_utilisation(variant, least):
    report = inspect_default("forward", **VARIANTS[variant])
    assert report.utilisation_none >= least
    assert report.utilisation_perfect >= 0.7


def test_backward_costs_at_most_three_and_a_half_forwards():
    """In tensor-core FLOPs per pair as compiled; the GEMMs with W2 are two against one."""
    forward, backward = (inspect_default(kernel) for kernel in ("forward", "backward"))
    flops = {r.kernel: r.wgmma_flop_share * PRODUCTS[r.kernel] for r in (forward, backward)}
    assert flops["backward"] <= 3.5 * flops["forward"]
    assert backward.utilisation_none >= 0.45
    for shape in PAPER_SHAPES:
        row = predict(shape, {"forward": forward, "backward": backward})
        assert row["backward_gflop"] <= 3.5 * row["forward_gflop"]


@pytest.mark.parametrize("arch", ["sm_80", "sm_100"])
@pytest.mark.parametrize("kernel", PRODUCTS)
def test_defaults_on_other_nvidia_devices(kernel, arch):
    report = inspect_default(kernel, arch)
    assert report.loop_spill_instructions == 0
    assert report.shared_bytes <= SHARED_LIMIT[arch]
    assert report.tensor_instructions


@pytest.mark.parametrize("kernel", PRODUCTS)
def test_defaults_on_amd(kernel):
    report = inspect_default(kernel, "gfx942")
    assert report.loop_spill_instructions == 0
    assert report.shared_bytes <= 64 * 1024


@pytest.mark.parametrize(
    ("head_dim", "width", "dtype"),
    [(16, 32, "bf16"), (32, 256, "bf16"), (128, 64, "bf16"), (128, 128, "fp32"), (64, 128, "fp32")],
    ids=lambda value: str(value),
)
@pytest.mark.parametrize("kernel", PRODUCTS)
def test_every_size_fits(kernel, head_dim, width, dtype):
    report = inspect_default(kernel, head_dim=head_dim, width=width, dtype=dtype)
    assert report.shared_bytes <= SHARED_LIMIT["sm_90"]
    assert report.tensor_instructions
    if dtype != "fp32":
        assert report.loop_spill_instructions == 0


@pytest.mark.parametrize("kernel", PRODUCTS)
def test_every_shipped_configuration_fits_the_device(kernel):
    configs = shipped_configs(kernel)
    assert len(configs) > 1
    for config in configs:
        assert compile_kernel(kernel, config).metadata.shared <= SHARED_LIMIT["sm_90"]


def test_optional_features_compile():
    (config, *_) = shipped_configs("backward")
    report = inspect_kernel("backward", config, needs_measure=True, has_bias=False)
    assert report.wgmma_flop_share == 1.0


def test_command_line(subprocess_environment):
    command = [sys.executable, "-m", "itnet_kernels.inspect", "--arch", "sm_90", "--json"]
    result = subprocess.run(command, env=subprocess_environment, capture_output=True, text=True, check=True)
    report = json.loads(result.stdout)
    assert {kernel["kernel"] for kernel in report["kernels"]} == {"forward", "backward"}
    assert len(report["predictions"]) == len(PAPER_SHAPES)
