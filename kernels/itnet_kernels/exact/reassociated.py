"""The reassociated operator: what surrounds the sum over pairs, for the tiled and the triton backend alike.

Because the kernel MLP's last layer is linear, K_ij need never be formed. Per head,

    pre_ij[k] = q_i[k] + Q_i[k] . u_j + P_ij[k]           Q_i[k] = W_uy[k] + W_had[k] * u_i   (virtual queries)
    A_i[k, c] = sum_j GELU(pre_ij[k]) omega_j u_j[c]
    out_i[a]  = sum_{k,c} W2[(a, c), k] A_i[k, c] + (b2 ubar)[a],     ubar = sum_j omega_j u_j

which costs w d_h instead of w d_h^2 multiply-adds per pair. The sum over pairs is the operator ``itnet::pair_sum``
(pair_sum.py); what has no pairs in it (q, b2, the causal normalisation) is left to autograd. README.md of this folder
derives the backward.
"""

import torch
from torch import Tensor

from ..positions import fourier_features, position_dtype
from ..prefix_sum import prefix_sum
from ..transforms import is_transformed
from ..weights import KernelWeights, split_input_weights
from .pair_inputs import PairInputs
from .pair_sum import pair_sum
from .plain_pair_sum import plain_pair_sum
from .reference import uniform_measure


def reassociated_transform(
    queries: Tensor,  # [B, n_q, H, d_h]
    keys: Tensor,  # [B, n_k, H, d_h]
    query_positions: Tensor,  # [B or 1, n_q, s]
    key_positions: Tensor,  # [B or 1, n_k, s]
    weights: KernelWeights,
    measure: Tensor | None,  # [B, n_k]
    is_causal: bool,
    backend: str,
) -> Tensor:
    """Same value and gradients as :func:`reference_transform`; [B, n_q, H, d_h]."""
    out_dtype, dtype = queries.dtype, torch.promote_types(queries.dtype, torch.float32)
    operand_dtype = matmul_dtype(queries)
    with torch.autocast(queries.device.type, enabled=False):
        queries, keys = queries.to(dtype), keys.to(dtype)
        measure = None if measure is None else measure.to(dtype)
        weights = weights.to(dtype)
        out = _pair_sum(
            queries, keys, query_positions, key_positions, weights, measure, is_causal, operand_dtype, backend
        )
        measure = uniform_measure(keys) if measure is None else measure
        out = out + _bias_term(keys, weights.b2, measure, queries.shape[1], is_causal)
        if is_causal:
            mass = prefix_sum(measure)[:, keys.shape[1] - queries.shape[1] :, None, None]  # visible to each query
            out = torch.where(mass > 0, out / mass.where(mass > 0, 1), 0)
        return out.to(out_dtype)


def matmul_dtype(features: Tensor) -> torch.dtype:
    """dtype of a GPU kernel's matrix operands: that of the features, or autocast's where it lowers float32."""
    device_type = features.device.type
    if features.dtype == torch.float32 and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return features.dtype


def _bias_term(keys: Tensor, b2: Tensor, measure: Tensor, num_queries: int, is_causal: bool) -> Tensor:
    """b2 ubar: [B, n_q or 1, H, d_h]."""
    weighted = keys * measure[..., None, None]
    mean = prefix_sum(weighted)[:, keys.shape[1] - num_queries :] if is_causal else weighted.sum(1, keepdim=True)
    head_dim = keys.shape[-1]
    matrices = b2.unflatten(-1, (head_dim, head_dim)).expand(keys.shape[2], -1, -1)  # [H, a, c]
    return torch.einsum("hac,bihc->biha", matrices, mean)


def _pair_sum(
    queries, keys, query_positions, key_positions, weights, measure, is_causal, operand_dtype, backend
) -> Tensor:
    """sum_j omega_j W2 (GELU(pre_ij) (x) u_j): prepares what is linear in n and calls the operator."""
    num_heads, head_dim = queries.shape[2:]
    width = weights.w1.shape[0]
    columns = split_input_weights(weights, head_dim)
    query_positions, key_positions = (x.to(position_dtype(x.device)) for x in (query_positions, key_positions))
    query_features, key_features = (
        fourier_features(x, weights.fourier).to(queries.dtype) for x in (query_positions, key_positions)
    )
    row = weights.b1.expand(1, 1, 1, width)  # q_i[k]: [B or 1, n_q or 1, H or 1, w]
    if columns["x"] is not None:
        row = row + (query_features @ columns["x"].T).unsqueeze(2)
    if columns["u_x"] is not None:
        row = row + queries @ columns["u_x"].T
    row = row.expand(*queries.shape[:3], width)
    w2 = weights.w2.unflatten(1, (head_dim, head_dim)).permute(0, 3, 2, 1)  # [H or 1, k, c, a]
    w2 = w2.reshape(-1, width * head_dim, head_dim).expand(num_heads, -1, -1)
    inputs = PairInputs(
        queries,
        keys,
        row,
        measure,
        query_positions,
        key_positions,
        query_features,
        key_features,
        columns["y"],
        columns["x-y"],
        columns["distance"],
        columns["u_y"],
        columns["u_x*u_y"],
        weights.w_mid,
        weights.b_mid,
        w2,
        weights.fourier.detach(),
        is_causal,
    )
    return plain_pair_sum(inputs) if is_transformed() else pair_sum(*inputs, operand_dtype, backend)
