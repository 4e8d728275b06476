"""The integral operator of ITNet as functions of tensors. Needs torch; triton is optional."""

from .integral_transform import BACKENDS, integral_transform, resolve_backend
from .positions import fourier_features
from .reference import kernel_matrices
from .weights import KERNEL_INPUTS, KernelWeights, kernel_input_size

__all__ = [
    "BACKENDS",
    "KERNEL_INPUTS",
    "KernelWeights",
    "fourier_features",
    "integral_transform",
    "kernel_input_size",
    "kernel_matrices",
    "resolve_backend",
]
