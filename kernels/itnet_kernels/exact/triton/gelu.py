"""GELU inside the Triton kernels, in terms of s = x/2 (the factor is folded into the pre-activation's parts):

    gelu(x) = s + s t(s),          2 gelu'(x) = 1 + t + s t'(s)

| form          | t(s)                    | used for                                               |
|---------------|-------------------------|--------------------------------------------------------|
| "erf"         | erf(sqrt(2) s)          | float32: the definition                                |
| "tanh"        | tanh(s (a + b s^2))     | half precision without tanh.approx (AMD, interpreter)  |
| "tanh.approx" | the same, by tanh.approx | half precision on NVIDIA: one special-function slot   |

a and b minimise max |tanh(s (a + b s^2)) - erf(sqrt(2) s)|, which is 2.81e-4. tanh.approx adds at most 2^-11, so that
|error| <= (2.81e-4 + 2^-11) |x| / 2 = 3.9e-4 |x|: less than rounding x to float16 (2^-11 |x|) or bfloat16 does. The
derivative is that of the form in use, so that the backward is the gradient of the function the forward computed.
"""

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("the triton backend needs the triton package: pip install triton") from error

TANH_LINEAR = 1.59760287
TANH_CUBIC = 0.28225639

_A = tl.constexpr(TANH_LINEAR)
_B = tl.constexpr(TANH_CUBIC)
_B3 = tl.constexpr(3 * TANH_CUBIC)
_SQRT2 = tl.constexpr(2**0.5)
_ERF_SLOPE = tl.constexpr(1.5957691216057308)  # d/ds erf(sqrt(2) s) at 0 = 2 sqrt(2 / pi)


@triton.jit
def gelu_gate(s, FORM: tl.constexpr):
    """Returns t(s), by which gelu(x) = s + s t."""
    if FORM == "erf":
        t = tl.erf(s * _SQRT2)
    else:
        y = s * (_B * (s * s) + _A)
        if FORM == "tanh.approx":
            t = tl.inline_asm_elementwise(
                "tanh.approx.f32 $0, $1;", "=f,f", [y], dtype=tl.float32, is_pure=True, pack=1
            )
        else:
            t = 1.0 - 2.0 / (tl.exp(2.0 * y) + 1.0)
    return t


@triton.jit
def gelu_slope(s, t, FORM: tl.constexpr):
    """Returns 2 gelu'(x) = 1 + t + s t'(s)."""
    if FORM == "erf":
        return s * (_ERF_SLOPE * tl.exp(-2.0 * (s * s))) + (1.0 + t)
    else:
        return (s * (_B3 * (s * s) + _A)) * (1.0 - t * t) + (1.0 + t)
