"""Kernels whose heads have hidden layers of their own, one head after the other."""

from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor

from .positions import Coordinates
from .validation import check_features, check_weights
from .weights import KernelWeights


def join_heads(parts: list[Tensor]) -> Tensor:
    """Results [B, n_q, 1, d_h] of all heads side by side."""
    return torch.cat(parts, dim=2)


def join_norms(parts: list[Tensor]) -> Tensor:
    """Norms [B, n_q, M] of all heads as the norm over them."""
    return torch.linalg.vector_norm(torch.stack(parts), dim=0)


def per_head(transform: Callable[..., Tensor], join: Callable[[list[Tensor]], Tensor] = join_heads):
    """Lets an operator on ``u`` [B, n, H, d_h] take weights with hidden layers of their own for each head.

    Heads share no work then but what follows from positions alone.
    """

    @wraps(transform)
    def wrapper(u: Tensor, positions: Tensor | Coordinates, weights: KernelWeights, **settings) -> Tensor:
        if not weights.has_own_hidden:
            return transform(u, positions, weights, **settings)
        check_features("u", u)
        check_weights(weights, num_heads=u.shape[2], head_dim=u.shape[3])
        domains = {"positions": positions, "query_positions": settings.pop("query_positions", None)}
        for name, given in domains.items():
            if isinstance(given, Tensor):
                domains[name] = Coordinates(given, weights.fourier, name=name)
        queries = settings.pop("queries", None)
        parts = []
        for head in range(u.shape[2]):
            own = slice(head, head + 1)
            own_queries = None if queries is None else queries[:, :, own]
            given = {"queries": own_queries, "query_positions": domains["query_positions"], **settings}
            parts.append(transform(u[:, :, own], domains["positions"], weights.of_head(head), **given))
        return join(parts)

    return wrapper
