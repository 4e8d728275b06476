"""Sums with kernels of low rank in fused GPU kernels."""
