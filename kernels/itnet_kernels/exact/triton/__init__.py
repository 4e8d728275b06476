"""The sum over all pairs in fused GPU kernels. Only sizes.py can be imported without Triton."""
