"""The operator by its definition: every z_ij, both MLP layers, every K_ij, then the sum. Small inputs only.

Memory is O(B H n_q n_k d_h^2). This is the oracle of all tests; autograd differentiates it.
"""

import torch
from torch import Tensor
from torch.nn.functional import gelu

from ..first_layer import length
from ..measure import over_mass, uniform_measure
from ..positions import Coordinates, fourier_features, position_dtype
from ..validation import batched
from ..weights import KERNEL_INPUTS, KernelWeights


def reference_transform(
    queries: Tensor,  # [B, n_q, H, d_h]
    keys: Tensor,  # [B, n_k, H, d_h]
    query_positions: Tensor,  # [B or 1, n_q, s]
    key_positions: Tensor,  # [B or 1, n_k, s]
    weights: KernelWeights,
    measure: Tensor | None,  # [B, n_k]
    is_causal: bool,
    listed: Tensor | None = None,  # [B or 1, n_q, n_k], the pairs that count
) -> Tensor:
    """Returns sum_j omega_j K_ij u_j, K_ij = kappa(x_i, y_j, u_i, u_j), Algorithm 1 of the paper: [B, n_q, H, d_h]."""
    with torch.autocast(queries.device.type, enabled=False):
        matrices = kernel_matrices(queries, keys, query_positions, key_positions, weights)
        u_y = keys.to(matrices.dtype).unsqueeze(1)  # [B, 1, n_k, H, d_h]
        values = (matrices @ u_y.unsqueeze(-1)).squeeze(-1)  # K_ij u_j [B, n_q, n_k, H, d_h]
        measure = uniform_measure(keys) if measure is None else measure
        omega = pair_measure(measure.to(matrices.dtype), queries.shape[1], is_causal)  # [B, n_q, n_k]
        omega = omega if listed is None else omega * listed
        return (omega[..., None, None] * values).sum(2).to(queries.dtype)


def kernel_matrices(
    queries: Tensor,
    keys: Tensor,
    query_positions: Tensor | Coordinates,
    key_positions: Tensor | Coordinates,
    weights: KernelWeights,
) -> Tensor:
    """Returns K_ij = reshape(W2 GELU(W1 z_ij + b1) + b2) of every pair and head: [B, n_q, n_k, H, d_h, d_h].

    A kernel with directions has further terms (:class:`KernelWeights`).

    Shapes as in :func:`reference_transform`, or :class:`Coordinates` for positions; float32 at least.
    """
    if weights.has_own_hidden:
        heads = [
            (queries[:, :, h : h + 1], keys[:, :, h : h + 1], weights.of_head(h)) for h in range(queries.shape[2])
        ]
        parts = [kernel_matrices(x, y, query_positions, key_positions, own) for x, y, own in heads]
        return torch.cat(parts, dim=3)
    with torch.autocast(queries.device.type, enabled=False):
        dtype = torch.promote_types(queries.dtype, torch.float32)
        weights = weights.to(dtype)
        query_positions, key_positions = batched(query_positions), batched(key_positions)
        u_x = queries.to(dtype).unsqueeze(2)  # [B, n_q, 1, H, d_h]
        u_y = keys.to(dtype).unsqueeze(1)  # [B, 1, n_k, H, d_h]
        hidden = kernel_input(u_x, u_y, query_positions, key_positions, weights)  # [B, n_q, n_k, H, kernel_input_size]
        hidden = gelu(hidden @ weights.w1.T + weights.b1)  # [B, n_q, n_k, H, w]
        if weights.w_mid is not None:
            hidden = gelu(hidden @ weights.w_mid.T + weights.b_mid)
        w2 = weights.w2.expand(queries.shape[2], -1, -1)  # [H, d_h^2, w]
        matrices = torch.einsum("hkw,bijhw->bijhk", w2, hidden) + weights.b2
        if weights.w2_directions is not None:
            w2 = weights.w2_directions.expand(queries.shape[2], -1, -1, -1)  # [H, s, d_h^2, w]
            directions = torch.einsum("hskw,bijhw->bijhsk", w2, hidden) + weights.b2_directions
            x, y = (place.to(position_dtype(place.device)) for place in (query_positions, key_positions))
            displacements = x.unsqueeze(2) - y.unsqueeze(1)  # [B or 1, n_q, n_k, s]
            matrices = matrices + (displacements.to(dtype)[..., None, :, None] * directions).sum(-2)
        return matrices.unflatten(-1, (queries.shape[-1], queries.shape[-1]))


def kernel_input(u_x: Tensor, u_y: Tensor, query_positions: Tensor, key_positions: Tensor, weights: KernelWeights):
    """Returns z_ij of Eq. kernel_input for all pairs: [B, n_q, n_k, H, kernel_input_size]."""
    x = query_positions.to(position_dtype(u_x.device)).unsqueeze(2)  # [B or 1, n_q, 1, s]
    y = key_positions.to(x.dtype).unsqueeze(1)  # [B or 1, 1, n_k, s]
    groups = {
        "x": fourier_features(x, weights.fourier),
        "y": fourier_features(y, weights.fourier),
        "x-y": fourier_features(x - y, weights.fourier),
        "distance": length(x - y).unsqueeze(-1),
    }
    groups = {name: group.to(u_x.dtype).unsqueeze(3) for name, group in groups.items()}  # [..., 1 head, size]
    groups |= {"u_x": u_x, "u_y": u_y, "u_x*u_y": u_x * u_y}
    pairs = torch.broadcast_shapes(u_x.shape[:-1], u_y.shape[:-1])
    chosen = [groups[name].expand(*pairs, -1) for name in KERNEL_INPUTS if name in weights.inputs]
    return torch.cat(chosen, dim=-1) if chosen else u_x.new_zeros(*pairs, 0)


def pair_measure(measure: Tensor, num_queries: int, is_causal: bool) -> Tensor:
    """Returns omega_ij [B, n_q, n_k]: omega_j, which a causal operator normalises over the keys that query i sees."""
    batch, num_keys = measure.shape
    omega = measure.unsqueeze(1).expand(batch, num_queries, num_keys)
    if not is_causal:
        return omega
    omega = omega.tril(diagonal=num_keys - num_queries)
    return over_mass(omega, omega.sum(-1, keepdim=True))
