"""The half-precision GELU of the Triton kernels against erf."""

import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", reason="the triton package is not installed")

from itnet_kernels.exact.triton.gelu import TANH_CUBIC, TANH_LINEAR

X = torch.linspace(-30, 30, 600_001, dtype=torch.float64)
TANH_APPROX_ERROR = 2.0**-11  # relative, of the instruction tanh.approx.f32 (PTX ISA)


def fitted(x: torch.Tensor) -> torch.Tensor:
    s = x / 2
    return s + s * torch.tanh(s * (TANH_LINEAR + TANH_CUBIC * s**2))


def test_error_is_below_the_rounding_of_the_argument():
    """|error| <= u |x| with the unit roundoff u of float16, the finer one, tanh.approx included."""
    error = (fitted(X) - torch.nn.functional.gelu(X)).abs() + 0.5 * X.abs() * TANH_APPROX_ERROR
    assert bool((error <= 2.0**-11 * X.abs()).all())


def test_coefficients_are_the_best_of_their_form():
    """No neighbour has a smaller largest error."""

    def largest(linear: float, cubic: float) -> float:
        s = X / 2
        return float((torch.tanh(s * (linear + cubic * s**2)) - torch.erf(2**0.5 * s)).abs().max())

    best = largest(TANH_LINEAR, TANH_CUBIC)
    assert best < 2.81e-4
    for step in (-1e-4, 1e-4):
        assert largest(TANH_LINEAR + step, TANH_CUBIC) > best
        assert largest(TANH_LINEAR, TANH_CUBIC + step) > best


KERNEL = """
import torch, triton, triton.language as tl
from itnet_kernels.exact.triton.gelu import gelu_gate, gelu_slope

@triton.jit
def kernel(p_x, p_value, p_slope, N: tl.constexpr, FORM: tl.constexpr):
    o = tl.arange(0, N)
    s = tl.load(p_x + o) * 0.5
    t = gelu_gate(s, FORM)
    tl.store(p_value + o, s * t + s)
    tl.store(p_slope + o, 0.5 * gelu_slope(s, t, FORM))

x = torch.cat([torch.linspace(-12, 12, 4090), torch.tensor([0.0, -1e4, 1e4, 6e4, -6e4, 1e-30])])
for form, tolerance in (("erf", 1e-6), ("tanh", 2e-4)):
    value, slope = torch.empty_like(x), torch.empty_like(x)
    kernel[(1,)](x, value, slope, len(x), form)
    exact = x.double().requires_grad_()
    out = torch.nn.functional.gelu(exact)
    out.sum().backward()
    error = (value - out.detach()).abs() / (1 + exact.detach().abs())
    assert error.max() < tolerance, (form, error.max())
    assert (slope - exact.grad).abs().max() < 8 * tolerance, (form, (slope - exact.grad).abs().max())
    if form == "tanh":  # the derivative of the very function, not of erf
        s = (x.double() / 2).requires_grad_()
        (s + s * torch.tanh(s * (1.59760287 + 0.28225639 * s**2))).sum().backward()
        assert (2 * slope - s.grad).abs().max() < 1e-5
print("ok")
"""


def test_value_and_derivative_in_the_interpreter(tmp_path, subprocess_environment):
    script = tmp_path / "gelu_kernel.py"  # Triton reads a kernel's source from its file
    script.write_text(KERNEL, encoding="utf-8")
    environment = subprocess_environment | {"TRITON_INTERPRET": "1"}
    result = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert result.stdout == "ok\n", result.stderr
