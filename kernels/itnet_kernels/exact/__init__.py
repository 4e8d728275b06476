"""The sum over all pairs: by its definition, in tiles, and as Triton kernels."""
