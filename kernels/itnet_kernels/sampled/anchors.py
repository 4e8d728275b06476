"""Deterministic quadrature: k-means clusters of the positions, each represented by one of its own positions."""

import torch
from torch import Tensor

from ..positions import position_dtype
from ..transforms import operator_namespace
from ..validation import batched, check_measure

_ITERATIONS = 10
_NAMESPACE = operator_namespace(__name__)


def kmeans_anchors(positions: Tensor, measure: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Clusters positions by k-means and represents each cluster by its position nearest to the centre.

    Starts from farthest points, the first position being the first of them, and takes 10 Lloyd steps weighted by the
    measure. Only positions of positive measure count: neither padding nor the other samples of a batch change the
    result. Nothing is random; ties go to the lower index.

    Args:
        positions: ``[n, s]`` or ``[B, n, s]``.
        measure: ``[B, n]``, not negative.
        count: number of clusters M. A sample of at most M positions has one cluster for each, even if some coincide;
            otherwise, clusters beyond the number of distinct positions are empty.

    Returns:
        ``indices [B, M]``, the representatives (0 for empty clusters), and ``clusters [B, n]``, the cluster of every
        position. A position of measure 0 belongs to some cluster but never represents it.
    """
    if count < 1:
        raise ValueError(f"`count` ({count}) must be at least 1")
    check_measure(measure, measure.shape[0], positions.shape[-2])
    positions = batched(positions).expand(measure.shape[0], -1, -1)
    return _kmeans(positions.detach(), measure.detach(), count)


def cluster_measure(measure: Tensor, clusters: Tensor, count: int) -> Tensor:
    """Returns the total measure of each cluster: measure [B, n], clusters [B, n] -> [B, M]."""
    return measure.new_zeros(measure.shape[0], count).scatter_add(1, clusters, measure)


# Opaque to compilers: a trace would hold every one of the M + 10 steps.
@torch.library.custom_op(f"{_NAMESPACE}::kmeans", mutates_args=())
def _kmeans(positions: Tensor, measure: Tensor, count: int) -> tuple[Tensor, Tensor]:
    dtype = position_dtype(positions.device)
    points, weights, real = positions.to(dtype), measure.to(dtype), measure > 0
    centres = _farthest_points(points, real, count)  # [B, M, s]
    for _ in range(_ITERATIONS):
        members = torch.nn.functional.one_hot(_nearest(points, centres), count).to(dtype) * weights.unsqueeze(-1)
        mass = members.sum(1).unsqueeze(-1)  # [B, M, 1]
        means = members.mT @ points / mass.where(mass > 0, 1)
        # Rounded: padding changes the order of the sums, and the last digit of a centre could break a tie.
        centres = torch.where(mass > 0, means.float().to(dtype), centres)
    # As many anchors as positions are exact, and whether there are as many must not depend on padding.
    few = real.sum(1, keepdim=True) <= count
    clusters = torch.where(few, (real.cumsum(1) - 1).clamp(min=0), _nearest(points, centres))
    last = points.shape[1]  # stands for "none"
    own = centres.gather(1, clusters.unsqueeze(-1).expand_as(points))
    distances = (points - own).square().sum(-1).float().where(real, torch.inf)
    best = torch.full_like(centres[..., 0], torch.inf, dtype=torch.float32)
    best = best.scatter_reduce(1, clusters, distances, "amin")
    candidates = real & (few | (distances <= best.gather(1, clusters)))
    order = torch.arange(last, device=points.device).expand_as(clusters).where(candidates, last)
    first = order.new_full((order.shape[0], count), last).scatter_reduce(1, clusters, order, "amin")
    return torch.where(first < last, first, 0), clusters


@_kmeans.register_fake
def _(positions, measure, count):
    batch, n = measure.shape
    return measure.new_empty(batch, count, dtype=torch.long), measure.new_empty(batch, n, dtype=torch.long)


def _farthest_points(points: Tensor, real: Tensor, count: int) -> Tensor:
    """Returns the first real position, then always the one farthest from those before it: [B, M, s]."""
    index = real.int().argmax(1)
    rows = torch.arange(points.shape[0], device=points.device)
    chosen, nearest = [], torch.full_like(points[..., 0], torch.inf)
    for _ in range(count):
        centre = points[rows, index]
        chosen.append(centre)
        nearest = torch.minimum(nearest, (points - centre.unsqueeze(1)).square().sum(-1))
        index = nearest.where(real, -1).argmax(1)
    return torch.stack(chosen, dim=1)


def _nearest(points: Tensor, centres: Tensor) -> Tensor:
    """Returns the index of the nearest centre, [B, n, s] and [B, M, s] -> [B, n]; O(n M) memory."""
    return torch.cdist(points, centres, compute_mode="donot_use_mm_for_euclid_dist").argmin(-1)
