"""The integral operator of ITNet as functions of tensors. Needs torch; triton is optional."""

from .backends import BACKENDS, resolve_backend
from .exact.reference import kernel_matrices
from .integral_transform import integral_transform
from .low_rank.matrix import low_rank_matrix_transform, sampled_low_rank_matrix_transform
from .low_rank.state import LowRankState
from .low_rank.vector import Factor, low_rank_transform, sampled_low_rank_transform
from .measure import prefix_sum
from .near.balls import ball_blocks
from .near.blocks import Blocks, listed_blocks, window_blocks
from .positions import Coordinates, fourier_features
from .sampled.anchors import cluster_measure, kmeans_anchors
from .sampled.monte_carlo import monte_carlo_transform
from .sampled.sampled import integrand_norms, sampled_transform
from .weights import KERNEL_INPUTS, KernelWeights, kernel_input_size

__all__ = [
    "BACKENDS",
    "KERNEL_INPUTS",
    "Blocks",
    "Coordinates",
    "Factor",
    "KernelWeights",
    "LowRankState",
    "ball_blocks",
    "cluster_measure",
    "fourier_features",
    "integral_transform",
    "integrand_norms",
    "kernel_input_size",
    "kernel_matrices",
    "kmeans_anchors",
    "listed_blocks",
    "low_rank_matrix_transform",
    "low_rank_transform",
    "monte_carlo_transform",
    "prefix_sum",
    "resolve_backend",
    "sampled_low_rank_matrix_transform",
    "sampled_low_rank_transform",
    "sampled_transform",
    "window_blocks",
]
