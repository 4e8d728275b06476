"""The sums as one would write them, every pair at a time: oracles in float64, and what plain PyTorch loses in half."""

import torch
from torch import Tensor
from torch.nn.functional import gelu

from itnet_kernels import KernelWeights
from itnet_kernels.exact.reference import kernel_input
from itnet_kernels.validation import batched


def pair_sum(
    queries: Tensor,  # [B, n_q, H, d_h]
    keys: Tensor,  # [B, n_k, H, d_h]
    query_positions: Tensor,  # [n_q, s] or [B, n_q, s]
    key_positions: Tensor,
    weights: KernelWeights,
    coefficients: Tensor,  # c_ij [B or 1, n_q, n_k]
) -> Tensor:
    """Returns sum_j c_ij K_ij u_j, [B, n_q, H, d_h], with every operation in the dtype of the features."""
    u_x, u_y = queries.unsqueeze(2), keys.unsqueeze(1)
    z = kernel_input(u_x, u_y, batched(query_positions), batched(key_positions), weights)
    hidden = gelu(z @ weights.w1.T + weights.b1)  # [B, n_q, n_k, H, w]
    values = coefficients[..., None, None].to(keys.dtype) * u_y  # [B, n_q, n_k, H, d_h]
    moments = torch.einsum("bijhk,bijhc->bihkc", hidden, values)
    w2, b2 = (part.unflatten(1, (keys.shape[-1],) * 2) for part in (weights.w2, weights.b2))
    return torch.einsum("hack,bihkc->biha", w2, moments) + torch.einsum("hac,bihc->biha", b2, values.sum(2))


def causal(measure: Tensor) -> Tensor:
    """Returns omega_ij of a causal sum: omega_j over the measure of all keys that query i sees. [B, n] ->
    [B, n, n]."""
    omega = measure.unsqueeze(1).expand(-1, measure.shape[1], -1).tril()
    mass = omega.sum(2, keepdim=True)
    return omega / mass.where(mass > 0, 1)


def listed(indices: Tensor, coefficients: Tensor, num_keys: int) -> Tensor:
    """Lists of keys [B, n_q, M] with coefficients as a table [B, n_q, n_k]; a key may come twice."""
    table = coefficients.new_zeros(*indices.shape[:2], num_keys)
    return table.scatter_add(2, indices, coefficients)


def factor_sum(phi: Tensor, psi_u: Tensor, u: Tensor, bias: Tensor, omega: Tensor, decay: Tensor | None) -> Tensor:
    """Returns sum_j omega_ij (sum_r e_ijr phi_i[r] (psi_j[r] . u_j) + bias u_j); psi_u [B, n, H, r], e
    [B, n, n, H, r]."""
    omega = omega.to(u.dtype)
    seen = omega[..., None, None] * (1 if decay is None else decay.to(u.dtype))
    seen = seen * psi_u.unsqueeze(1)  # [B, n, n, H, r]
    constant = torch.einsum("hac,bij,bjhc->biha", bias, omega, u)
    return torch.einsum("bihra,bijhr->biha", phi, seen) + constant


def matrix_sum(
    f: Tensor, g: Tensor, matrices: Tensor, u: Tensor, bias: Tensor, omega: Tensor, decay: Tensor | None
) -> Tensor:
    """Returns sum_j omega_ij (sum_r e_ijr f_i[r] g_j[r] M_r + bias) u_j."""
    omega = omega.to(u.dtype)
    seen = omega[..., None, None] * (1 if decay is None else decay.to(u.dtype))
    seen = seen * f.unsqueeze(2) * g.unsqueeze(1)  # [B, n, n, H, r]
    moved = torch.einsum("hrac,bjhc->bjhra", matrices, u)
    constant = torch.einsum("hac,bij,bjhc->biha", bias, omega, u)
    return torch.einsum("bijhr,bjhra->biha", seen, moved) + constant


def decays(rates: Tensor, positions: Tensor) -> Tensor:
    """Returns e^(-lambda_r (x_i - x_j)) for j <= i, 1 elsewhere: rates [H, r], positions [B, n, 1] ->
    [B, n, n, H, r]."""
    apart = (positions - positions.transpose(1, 2)).clamp(min=0)  # x_i - x_j
    return torch.exp(-rates * apart[..., None, None])
