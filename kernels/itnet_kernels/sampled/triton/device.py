"""What the kernels of all modes ask of a device."""

import torch

from ...exact.triton.device import device_major, dot_precision, gelu_form, on_device
from ...exact.triton.gelu import tl

#: PyTorch's types as Triton calls them.
TRITON_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}

__all__ = ["TRITON_TYPES", "device_major", "dot_precision", "gelu_form", "on_device"]
