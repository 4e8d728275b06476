"""The sum over all pairs of a kernel of low rank, in linear time."""
