"""The reassociated operator: what surrounds the sum over pairs, for the tiled and the triton backend alike.

Because the kernel MLP's last layer is linear, K_ij need never be formed. Per head,

    pre_ij[k] = q_i[k] + Q_i[k] . u_j + P_ij[k]           Q_i[k] = W_uy[k] + W_had[k] * u_i   (virtual queries)
    A_i[k, c] = sum_j GELU(pre_ij[k]) omega_j u_j[c]
    out_i[a]  = sum_{k,c} W2[(a, c), k] A_i[k, c] + (b2 ubar)[a],     ubar = sum_j omega_j u_j

which costs w d_h instead of w d_h^2 multiply-adds per pair. The sum over pairs is the operator ``itnet::pair_sum``
(pair_sum.py). Terms that do not depend on a pair (q, b2, the causal normalisation) are left to autograd. README.md
derives the backward.
"""

import torch
from torch import Tensor

from ..first_layer import row_term
from ..measure import over_mass, visible_sum
from ..positions import Coordinates
from ..transforms import is_transformed
from ..weights import KernelWeights, split_input_weights
from .pair_inputs import PairInputs


def matmul_dtype(features: Tensor) -> torch.dtype:
    """dtype of a GPU kernel's matrix operands: that of the features, or autocast's where it lowers float32."""
    device_type = features.device.type
    if features.dtype == torch.float32 and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return features.dtype


def prepare(
    queries: Tensor,  # [B, n_q, H, d_h]
    keys: Tensor,  # [B, n_k, H, d_h]
    x: Coordinates,  # of the queries
    y: Coordinates,  # of the keys
    weights: KernelWeights,
    measure: Tensor | None,  # [B, n_k]
    is_causal: bool,
    operand_dtype: torch.dtype,
    backend: str,
) -> PairInputs:
    """What the sum over pairs takes: everything that is linear in n, in float32 at least."""
    dtype = torch.promote_types(queries.dtype, torch.float32)
    queries, keys, weights = queries.to(dtype), keys.to(dtype), weights.to(dtype)
    num_heads, head_dim = queries.shape[2:]
    width = weights.w1.shape[0]
    columns = split_input_weights(weights, head_dim)
    gamma_x, gamma_y = x.features_in(dtype), y.features_in(dtype)
    has_displacements = columns["x-y"] is not None or columns["distance"] is not None
    # The triton backend needs no lattice: finding one waits for the device.
    wants_lattice = backend == "tiled" and has_displacements and not is_transformed()
    displacements, index = y.lattice(dtype, x) if wants_lattice else (None, None)
    return PairInputs(
        queries=queries,
        keys=keys,
        row=row_term(weights, columns, gamma_x, queries).expand(*queries.shape[:3], width),
        measure=None if measure is None else measure.to(dtype),
        query_positions=x.exact,
        key_positions=y.exact,
        query_features=gamma_x,
        key_features=gamma_y,
        w_y=columns["y"],
        w_relative=columns["x-y"],
        w_distance=columns["distance"],
        w_key=columns["u_y"],
        w_product=columns["u_x*u_y"],
        w_mid=weights.w_mid,
        b_mid=weights.b_mid,
        w2=weights.output_weight(head_dim).expand(num_heads, -1, -1),
        frequencies=weights.fourier.detach(),
        displacements=displacements,
        displacement_index=index,
        is_causal=is_causal,
        operand_dtype=operand_dtype,
        backend=backend,
    )


def finish(out: Tensor, inputs: PairInputs, weights: KernelWeights) -> Tensor:
    """The operator from its sum over pairs: adds b2 ubar and normalises a causal one. [B, n_q, H, d_h]."""
    _, num_queries, num_heads, head_dim = out.shape
    omega = inputs.omega[..., None, None]
    mean = visible_sum(inputs.keys * omega, num_queries) if inputs.is_causal else (inputs.keys * omega).sum(1, True)
    b2 = weights.output_bias(head_dim).to(out.dtype).expand(num_heads, -1, -1)  # [H, c, a]
    out = out + torch.einsum("hca,bihc->biha", b2, mean)
    return over_mass(out, visible_sum(omega, num_queries)) if inputs.is_causal else out
