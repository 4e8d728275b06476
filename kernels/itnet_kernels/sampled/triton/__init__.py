"""The sum over listed keys in fused GPU kernels."""
