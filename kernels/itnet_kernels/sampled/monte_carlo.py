"""Importance-weighted Monte Carlo integration."""

import torch
from torch import Tensor

from ..backends import Backend
from ..directions import along_directions
from ..measure import over_mass, uniform_measure, visible_sum
from ..per_head import by_head
from ..positions import Coordinates
from ..validation import check_causal, check_indices, check_measure, check_operands, may_look_at
from ..weights import KernelWeights
from .sampled import SampledPairs


def monte_carlo_transform(
    u: Tensor,
    positions: Tensor | Coordinates,
    weights: KernelWeights,
    *,
    indices: Tensor,
    probabilities: Tensor,
    measure: Tensor | None = None,
    is_causal: bool = False,
    queries: Tensor | None = None,
    query_positions: Tensor | Coordinates | None = None,
    backend: Backend = "auto",
) -> Tensor:
    r"""Returns the importance-weighted Monte Carlo estimate of :func:`integral_transform` (Eq. is_estimator_clean).

        out_i = 1/M sum_m omega_j / p_ij K_ij u_j,     j = indices[i, m] ~ p_i

    It is unbiased for every measure and every pmf p_i that is positive wherever omega_j K_ij u_j is not 0, and
    differentiable like the exact operator. Indices and probabilities are constants of the sampling: pass
    probabilities that require no gradient. The result is ``[B, n_q, H, d_h]`` in the dtype of the queries.

    Args:
        u, positions, weights, measure, queries, query_positions: as in :func:`integral_transform`.
        indices: the keys drawn for each query, ``[B, n_q, M]``, with replacement; M may exceed n.
        probabilities: p_ij of each drawn key, positive, ``[B, n_q, M]``.
        is_causal: omega is normalised over the keys j <= i + n_k - n_q that query i sees; a hidden key that was drawn
            contributes nothing.
        backend: as in :func:`sampled_transform`.
    """
    settings = {"indices": indices, "probabilities": probabilities, "measure": measure, "is_causal": is_causal}
    settings["backend"] = backend
    if weights.has_own_hidden:
        parts = by_head(monte_carlo_transform, u, positions, weights, queries, query_positions, **settings)
        return torch.cat(parts, dim=2)
    if weights.w2_directions is not None:
        return along_directions(monte_carlo_transform, u, positions, weights, queries, query_positions, **settings)
    queries, x, y = check_operands(u, positions, weights, queries, query_positions)
    (batch, num_keys), num_queries = u.shape[:2], queries.shape[1]
    check_indices(indices, batch, num_queries, num_keys, probabilities=probabilities)
    if indices.shape[2] == 0:
        raise ValueError("`indices` holds no key: a Monte Carlo estimate needs at least one sample per query")
    if may_look_at(probabilities) and not bool((probabilities > 0).all()):
        raise ValueError("`probabilities` must be positive: a key of probability 0 cannot have been drawn")
    if measure is None:
        measure = uniform_measure(u)
    else:
        check_measure(measure, batch, num_keys)
        measure = measure.to(torch.promote_types(measure.dtype, torch.float32))  # sums of it do not fit half precision
    drawn = measure.gather(1, indices.flatten(1).long()).view(indices.shape)  # omega_j [B, n_q, M]
    if is_causal:
        check_causal(num_queries, num_keys)
        last = torch.arange(num_keys - num_queries, num_keys, device=u.device)  # last visible key of each query
        visible = indices <= last[:, None]
        drawn = over_mass(drawn * visible, visible_sum(measure, num_queries).unsqueeze(-1))
    coefficients = drawn / (indices.shape[2] * probabilities)
    return SampledPairs(queries, u, x, y, weights, backend).transform(indices, coefficients)
