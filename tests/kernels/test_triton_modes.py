"""The Triton kernels of the other modes: values in the interpreter, in processes of their own, and code offline."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the triton package is not installed")

HERE = Path(__file__).resolve()
BENCHMARKS = HERE.parents[2] / "kernels" / "benchmarks"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["list", "low_rank", "model"])
def test_interpreter(name):
    cases = HERE.with_name(f"interpreter_{name}_cases.py")
    command = [sys.executable, "-m", "pytest", str(cases), "-q", "-p", "no:cacheprovider", "-n", "0"]
    variables = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert " passed" in result.stdout


def inspection():
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter replaces the compiler")
    spec = importlib.util.spec_from_file_location("inspect_modes", BENCHMARKS / "inspect_modes.py")
    module = sys.modules.setdefault("inspect_modes", importlib.util.module_from_spec(spec))
    if not hasattr(module, "inspect_mode"):
        spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("kernel", "arch"),
    [
        ("list forward", "sm_80"),
        ("list forward", "sm_90"),
        ("list backward", "sm_90"),
        ("list backward", "gfx942"),
        ("within blocks, backward", "sm_90"),
        ("factor expand", "sm_80"),
    ],
)
def test_defaults_compile_without_faults(kernel, arch):
    """No spills in the loop, shared memory within limits, nothing serialised; `inspect_modes.py --check` has all."""
    report = inspection().inspect_mode(kernel, arch)
    assert report.faults() == []
    assert arch == "gfx942" or report.tensor
