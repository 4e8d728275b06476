"""What the host asks about a device before it launches kernels on it."""

import contextlib
import os

import torch

from .configs import device_kind, is_interpreted
from .gelu import tl

#: PyTorch's types as Triton calls them.
TRITON_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def gelu_form(dtype: torch.dtype, device: torch.device) -> str:
    """Says which form of gelu.py the kernels use."""
    if dtype == torch.float32:
        return "erf"
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return "tanh.approx" if is_nvidia and not is_interpreted() else "tanh"


def dot_precision(device: torch.device) -> str:
    """Returns the precision of float32 products: float32, unless PyTorch's old or new setting allows TF32.

    NVIDIA's tensor cores reach it by three TF32 products ("tf32x3"), 2^-21 relative error.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return "ieee"
    try:  # torch >= 2.9; the old function raises once the new setting was used
        allowed = torch.backends.cuda.matmul.fp32_precision
    except AttributeError:
        allowed = "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    return "tf32" if allowed == "tf32" else "tf32x3"


def device_major(device: torch.device) -> int | None:
    """Returns the major compute capability of an NVIDIA device."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return torch.cuda.get_device_capability(device)[0] if is_nvidia else None


def on_device(device: torch.device):
    """Makes the current device, on which Triton launches, that of the tensors."""
    return contextlib.nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device)


def multiprocessors(device: torch.device) -> int:
    """Says how many programs of one per multiprocessor run at a time. Without a GPU, those of an H100 or H200."""
    is_gpu = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_properties(device).multi_processor_count if is_gpu else 132


def has_fused_backward(head_dim: int, dtype: torch.dtype, device: torch.device, stores_pairs: bool = False) -> bool:
    """Says whether the backward is the fused kernel: half precision up to d_h = 64, where it does not spill.

    Not on Blackwell and AMD, where the other one is predicted to be faster (docs/kernels.md). On GPUs whose warps
    multiply from registers (A100 and consumer GPUs), heads of up to 32 features would be computed twice, and so would
    dL/dP, which is wanted if ``stores_pairs``: they take the other one then. ``ITNET_FUSED_BACKWARD`` (0 or 1) decides
    otherwise.
    """
    if os.environ.get("ITNET_FUSED_BACKWARD") in ("0", "1"):
        return os.environ["ITNET_FUSED_BACKWARD"] == "1"
    is_gpu = is_interpreted() or device.type == "cuda"
    kind = "hopper" if is_interpreted() else device_kind(device_major(device))
    is_left_out = kind in ("blackwell", "other") or (kind == "ampere" and (stores_pairs or head_dim <= 32))
    return is_gpu and head_dim <= 64 and dtype.itemsize == 2 and not is_left_out


def shared_limit(device: torch.device) -> int:
    """Returns the bytes of shared memory that one program may use. Without a GPU, those of an H100 or H200."""
    is_gpu = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin if is_gpu else 232448
