"""Kernels whose heads have hidden layers of their own, one head after the other."""

from collections.abc import Callable

from torch import Tensor

from .positions import Coordinates
from .validation import check_features, check_weights
from .weights import KernelWeights


def by_head(
    transform: Callable[..., Tensor],
    u: Tensor,
    positions: Tensor | Coordinates,
    weights: KernelWeights,
    queries: Tensor | None,
    query_positions: Tensor | Coordinates | None,
    **settings,
) -> list[Tensor]:
    """Returns the results of ``transform``, an operator on ``u`` [B, n, H, d_h], for each head by itself.

    Heads share no work then but what follows from positions alone.
    """
    check_features("u", u)
    check_weights(weights, num_heads=u.shape[2], head_dim=u.shape[3])
    if isinstance(positions, Tensor):
        positions = Coordinates(positions, weights.fourier)
    if isinstance(query_positions, Tensor):
        query_positions = Coordinates(query_positions, weights.fourier, name="query_positions")
    parts = []
    for head in range(u.shape[2]):
        own = slice(head, head + 1)
        given = {"queries": None if queries is None else queries[:, :, own], "query_positions": query_positions}
        parts.append(transform(u[:, :, own], positions, weights.of_head(head), **given, **settings))
    return parts
