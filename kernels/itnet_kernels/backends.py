"""Which backend runs a call: what the Triton kernels are written for, and what "auto" takes."""

import importlib.util
import logging
import os
from functools import cache
from typing import Literal, get_args

import torch
from torch import Tensor

from .exact.triton.sizes import TRITON_HEAD_DIMS, TRITON_WIDTHS
from .weights import KernelWeights

logger = logging.getLogger(__name__)

Backend = Literal["auto", "reference", "tiled", "triton"]
BACKENDS = get_args(Backend)

#: What the Triton kernels are written for.
TRITON_DEVICES = ("cuda", "xpu")  # ROCm tensors call themselves cuda
TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# Looked up once and without importing it: a traced function can do neither.
_TRITON_INSTALLED = importlib.util.find_spec("triton") is not None


def matmul_dtype(features: Tensor) -> torch.dtype:
    """Returns the dtype of a GPU kernel's operands: that of the features, or autocast's where it lowers float32."""
    device_type = features.device.type
    if features.dtype == torch.float32 and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return features.dtype


def resolve_backend(backend: str, u: Tensor, weights: KernelWeights | None = None) -> str:
    """Returns the backend that will run on these tensors: "auto" is settled, and a choice that cannot run raises.

    "auto" is "triton" for tensors on a GPU if it can run there and "tiled" otherwise. Which one is logged once, as a
    warning where a GPU has to do without its kernels. ``weights`` are those of the kernel MLP, where there is one.
    """
    if backend not in BACKENDS:
        raise ValueError(f"`backend` ({backend!r}) must be one of {list(BACKENDS)}")
    if backend in ("reference", "tiled"):
        return backend
    device = u.device.type
    has_no_kernels = backend == "auto" and device not in TRITON_DEVICES
    obstacle = f"the tensors are on {device}" if has_no_kernels else triton_obstacle(u, weights)
    if backend == "triton" and obstacle is not None:
        raise ValueError(f'`backend` ("triton") cannot run: {obstacle}')
    if backend == "auto" and not torch.compiler.is_compiling():  # loggers cannot be traced
        if obstacle is None:
            _log_once(logging.INFO, '`backend` ("auto") uses "triton"')
        elif has_no_kernels:
            _log_once(logging.INFO, f'`backend` ("auto") uses "tiled": {obstacle}')
        else:
            message = f'`backend` ("auto") uses "tiled" on {device}, which is many times slower than "triton"'
            _log_once(logging.WARNING, f"{message}: {obstacle}")
    return "triton" if obstacle is None else "tiled"


def triton_obstacle(u: Tensor, weights: KernelWeights | None = None) -> str | None:
    """Returns why the Triton kernels cannot run on these tensors; None if they can."""
    head_dim, dtype = u.shape[-1], matmul_dtype(u)
    if not _TRITON_INSTALLED:
        return "the triton package is not installed: pip install triton"
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if u.device.type not in TRITON_DEVICES and not is_interpreted:
        return (
            f"it needs tensors on {' or '.join(TRITON_DEVICES)}, `u` is on {u.device.type}; use 'tiled' there, "
            "or set TRITON_INTERPRET=1 before the start of Python to run the kernels in Triton's slow interpreter"
        )
    if weights is not None and weights.w_mid is not None:
        return "it has no kernel for a 3-layer kernel MLP (`weights.w_mid`); use a 2-layer one, or 'tiled'"
    if dtype not in TRITON_DTYPES:
        names = ", ".join(str(t) for t in TRITON_DTYPES)
        return f"it computes in {names}, not in {dtype}; cast the features, or use 'tiled'"
    if dtype == torch.bfloat16 and is_interpreted:
        return (
            "Triton's interpreter (TRITON_INTERPRET=1) multiplies the bits of torch.bfloat16 as integers and would "
            "return wrong numbers; use torch.float32 or torch.float16 there, or 'tiled'"
        )
    if head_dim > TRITON_HEAD_DIMS[-1]:
        return f"its head sizes end at {TRITON_HEAD_DIMS[-1]}, `u` has {head_dim}; use more heads, or 'tiled'"
    if weights is not None and len(weights.w1) > TRITON_WIDTHS[-1]:
        width = len(weights.w1)
        return (
            f"its kernel widths end at {TRITON_WIDTHS[-1]}, `weights.w1` has {width}; use a smaller width, or 'tiled'"
        )
    return None


@cache
def _log_once(level: int, message: str) -> None:
    logger.log(level, message)
