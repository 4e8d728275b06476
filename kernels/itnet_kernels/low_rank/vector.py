"""The operator with a kernel of low rank, K_ij = Phi_i^T Psi_j: linear in the number of positions.

    Z[r]     = sum_j omega_j Psi_j[r] . u_j          r numbers per head, whatever n
    out_i[a] = sum_r Phi_i[r, a] Z[r]

A factor is a tensor, or hidden units with an output layer (:class:`Factor`), which are not multiplied out:

    Phi_i[r, a] = sum_k W[r, a, k] h_i[k] + b[r, a]
    Z[r]        = sum_{k,c} W[r, c, k] (sum_j omega_j h_j[k] u_j[c]) + b[r] . ubar,    ubar = sum_j omega_j u_j
    out_i[a]    = sum_k h_i[k] (sum_r W[r, a, k] Z[r]) + sum_r b[r, a] Z[r]

so that a position costs w d_h multiply-adds per head and factor, and the rank none. A causal kernel may decay with the
distance, each rank at a rate of its own: Phi_i[r] Psi_j[r] e^(-lambda_r (x_i - x_j)).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..backends import Backend, matmul_dtype, resolve_backend
from ..measure import over_mass
from ..positions import Coordinates
from ..sampled.sampled import take_keys
from ..transforms import recomputed
from ..validation import check_features, check_indices
from .fused import (
    FactorExpand,
    FactorProject,
    FeatureApply,
    FeatureSum,
    factor_expand,
    factor_project,
    feature_apply,
    feature_sum,
)
from .state import Keys, LowRankState, check_bias, check_keys, prepare_keys, running_sum
from .step import is_step, low_rank_step, step_decay

# Elements of the factors that a causal operator multiplies out at a time: 16 MB in float32.
_CHUNK_ELEMENTS = 2**22


class Factor(NamedTuple):
    """Phi or Psi as an MLP's hidden units and output layer: Phi_i[r, a] = sum_k weight[r, a, k] hidden_i[k] + bias."""

    hidden: Tensor  # [B, n, H, w]
    weight: Tensor  # [H, r, d_h, w]
    bias: Tensor  # [H, r, d_h]


def low_rank_transform(
    u: Tensor,
    phi: Tensor | Factor,
    psi: Tensor | Factor,
    *,
    measure: Tensor | None = None,
    is_causal: bool = False,
    state: LowRankState | None = None,
    bias: Tensor | None = None,
    decay: Tensor | None = None,
    positions: Tensor | Coordinates | None = None,
    return_state: bool = False,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, LowRankState]:
    r"""Applies the integral operator with the kernel K_ij = Phi_i^T Psi_j + bias, in O(n) time and memory.

        out_i = sum_j omega_j K_ij u_j,     K_ij[a, c] = sum_r Phi_i[r, a] Psi_j[r, c] + bias[a, c]

    Differentiable in everything. Keys can be given in pieces: the state of one call continues in the next.

    Args:
        u: key features ``[B, n, H, d_h]``. Half precision is accumulated in float32.
        phi: the query factor ``[B, n_q, H, r, d_h]`` or a :class:`Factor`; n_q may differ from n (a query domain other
            than the key domain).
        psi: the key factor ``[B, n, H, r, d_h]`` or a :class:`Factor`.
        measure: quadrature weights omega ``[B, n]``, not negative; None is uniform. A key of measure 0 (padding)
            contributes nothing.
        is_causal: query i sees the keys j <= i + n - n_q of this call and all keys of ``state``, and omega is
            normalised over them.
        state: the keys of earlier calls. Without ``is_causal`` it needs a ``measure``, as uniform weights of pieces
            do not add up to those of the whole.
        bias: constant part of the kernel, ``[H, d_h, d_h]``; none if not given. It does not decay.
        decay: rates lambda ``[H, r]``, not negative, of a causal operator; none if not given.
        positions: x of the keys, ``[n, 1]`` or ``[B, n, 1]``, which ``decay`` needs. They must not fall; padding may
            lie anywhere. The queries are at the last n_q of them.
        return_state: also return the state after the last key.
        backend: "triton" has GPU kernels for factors that are a :class:`Factor`; "auto" takes them for tensors on a
            GPU. Anything else is PyTorch.

    Returns:
        ``[B, n_q, H, d_h]`` in the dtype of ``u``, or a pair of it and the :class:`LowRankState`.
    """
    check_features("u", u)
    rank, num_queries = _check_factors(u, phi, psi)
    batch, _, num_heads, head_dim = u.shape
    check_bias(bias, num_heads, head_dim, head_dim)
    given = {"measure": measure, "is_causal": is_causal, "state": state, "decay": decay, "positions": positions}
    backend, operand_dtype = resolve_backend(backend, u), matmul_dtype(u)
    is_fused = backend == "triton" and isinstance(phi, Factor) and isinstance(psi, Factor)
    given["moments"] = [batch, num_heads, rank]
    if is_fused and is_step(num_queries, u, is_causal, state, *phi, *psi, bias, decay):
        weights = {"w_phi": phi.weight, "b_phi": phi.bias, "w_psi": psi.weight, "b_psi": psi.bias, "bias": bias}
        token = u, check_keys(u, rank, num_queries, **given), phi.hidden, psi.hidden, state
        out, last = low_rank_step(*token, **weights, **step_decay(decay, positions, batch))
        return (out.to(u.dtype), last) if return_state else out.to(u.dtype)
    with torch.autocast(u.device.type, enabled=False):
        keys, state = prepare_keys(u, rank, num_queries, **given)
        keys = keys._replace(operand_dtype=operand_dtype if is_fused else None)
        dtype = keys.measure.dtype
        phi, psi = (_cast(factor, dtype, keys.is_fused) for factor in (phi, psi))
        bias = None if bias is None else bias.to(dtype)
        out, last = (_causal if is_causal else _complete)(keys, phi, psi, state, bias)
    out = out.to(u.dtype)
    return (out, last) if return_state else out


def sampled_low_rank_transform(
    u: Tensor,
    phi: Tensor | Factor,
    psi: Tensor | Factor,
    *,
    indices: Tensor,
    coefficients: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """Returns sum_m c_im (Phi_i^T Psi_j + bias) u_j, j = indices[i, m], as :func:`sampled_transform` does.

    ``indices`` and ``coefficients`` are ``[B, n_q, M]``, the rest as in :func:`low_rank_transform`; returns
    ``[B, n_q, H, d_h]``.
    """
    check_features("u", u)
    _, num_queries = _check_factors(u, phi, psi)
    check_indices(indices, u.shape[0], num_queries, u.shape[1], coefficients=coefficients)
    dtype = torch.promote_types(u.dtype, torch.float32)
    with torch.autocast(u.device.type, enabled=False):
        phi, psi = (_cast(factor, dtype) for factor in (phi, psi))
        values, coefficients = u.to(dtype), coefficients.to(dtype)
        moments = take_keys(_in_chunks(_project, psi, values), indices)  # [B, n_q, M, H, r]
        out = _in_chunks(_expand, phi, torch.einsum("bnm,bnmhr->bnhr", coefficients, moments))
        if bias is not None:
            mean = torch.einsum("bnm,bnmhc->bnhc", coefficients, take_keys(values, indices))
            out = out + torch.einsum("bnhc,hac->bnha", mean, bias.to(dtype))
        return out.to(u.dtype)


def _complete(keys: Keys, phi, psi, state, bias) -> tuple[Tensor, LowRankState]:
    """Lets all queries see all keys: there is one Z per sample and head."""
    if isinstance(psi, Factor):
        if not keys.is_fused:
            values = keys.values  # [B, n, H, d_h]
            pairs, mean = torch.einsum("bnhk,bnhc->bhkc", psi.hidden, values), values.sum(1)
        else:
            sums = feature_sum(FeatureSum(psi.hidden, keys.features, keys.measure, keys.operand_dtype))
            pairs, mean = sums[:, :, :-1], sums[:, :, -1]  # [B, H, w, d_h], [B, H, d_h]
        moments = torch.einsum("bhkc,hrck->bhr", pairs, psi.weight) + torch.einsum("bhc,hrc->bhr", mean, psi.bias)
    else:
        moments, mean = torch.einsum("bnhrc,bnhc->bhr", psi, keys.values), keys.values.sum(1)
    last = LowRankState(moments, mean, keys.measure.sum(1))
    if state is not None:
        last = LowRankState(*(a + b for a, b in zip(state[:3], last[:3], strict=True)))
    constant = 0 if bias is None else torch.einsum("bhc,hac->bha", last.mean, bias)
    if isinstance(phi, Factor):
        matrices = torch.einsum("bhr,hrak->bhka", last.moments, phi.weight)
        constant = constant + torch.einsum("bhr,hra->bha", last.moments, phi.bias)
        if keys.is_fused:
            table = torch.cat([matrices, constant.unsqueeze(2)], dim=2)  # [B, H, w + 1, d_h]
            return feature_apply(FeatureApply(phi.hidden, table, keys.operand_dtype)), last
        out = torch.einsum("bnhk,bhka->bnha", phi.hidden, matrices)
    else:
        out = torch.einsum("bnhra,bhr->bnha", phi, last.moments)
    return (out if isinstance(constant, int) else out + constant.unsqueeze(1)), last


def _causal(keys: Keys, phi, psi, state, bias) -> tuple[Tensor, LowRankState]:
    """Gives every query its own Z: running sums of r numbers per head, and of u for the constant of the kernel."""
    num_queries = (phi.hidden if isinstance(phi, Factor) else phi).shape[1]
    before = (None,) * 3 if state is None else state[:3]
    values = keys.values
    if keys.is_fused:
        new = factor_project(FactorProject(values, *psi, keys.operand_dtype))
    else:
        new = _in_chunks(_project, psi, values)
    moments = running_sum(new, before[0], keys.decays, keys.is_fused)  # [B, n, H, r]
    given = zip((values, keys.measure), before[1:], strict=True)
    prefix = moments, *(running_sum(*part, None, keys.is_fused) for part in given)
    moments, mean, mass = (tensor[:, -num_queries:] for tensor in prefix)
    if keys.is_fused:
        out = factor_expand(FactorExpand(moments, *phi, keys.operand_dtype))
    else:
        out = _in_chunks(_expand, phi, moments)
    if bias is not None:
        out = out + torch.einsum("bnhc,hac->bnha", mean, bias)
    return over_mass(out, mass[..., None, None]), LowRankState(*(t[:, -1] for t in prefix), keys.position)


def _project(psi: Tensor, values: Tensor) -> Tensor:
    """Returns Psi_j[r] . u_j: [B, n, H, r, d_h], [B, n, H, d_h] -> [B, n, H, r]."""
    return (psi @ values.unsqueeze(-1)).squeeze(-1)


def _expand(phi: Tensor, moments: Tensor) -> Tensor:
    """Returns sum_r Phi_i[r] Z_i[r]: [B, n, H, r, d_h], [B, n, H, r] -> [B, n, H, d_h]."""
    return (moments.unsqueeze(-2) @ phi).squeeze(-2)


def _in_chunks(apply, factor: Tensor | Factor, other: Tensor) -> Tensor:
    """Returns ``apply(factor, other)``, where a factor that is an MLP is multiplied out a few positions at a time."""
    if not isinstance(factor, Factor):
        return apply(factor, other)

    def chunk(hidden: Tensor, part: Tensor) -> Tensor:
        return apply(torch.einsum("bnhk,hrak->bnhra", hidden, factor.weight) + factor.bias, part)

    size = max(1, _CHUNK_ELEMENTS // (other.shape[0] * factor.bias.numel()))
    parts = zip(factor.hidden.split(size, dim=1), other.split(size, dim=1), strict=True)
    return torch.cat([recomputed(chunk, *part) for part in parts], dim=1)


def _cast(factor: Tensor | Factor, dtype: torch.dtype, keeps_hidden: bool = False) -> Tensor | Factor:
    if not isinstance(factor, Factor):
        return factor.to(dtype)
    hidden, *others = factor
    return Factor(hidden if keeps_hidden else hidden.to(dtype), *(tensor.to(dtype) for tensor in others))


def _check_factors(u: Tensor, phi: Tensor | Factor, psi: Tensor | Factor) -> tuple[int, int]:
    """Returns the rank and the number of queries."""
    batch, num_keys, num_heads, head_dim = u.shape
    shapes = {name: _factor_shape(name, factor) for name, factor in (("phi", phi), ("psi", psi))}
    num_queries, rank = shapes["phi"][1], shapes["psi"][3]
    for name, count in (("phi", num_queries), ("psi", num_keys)):
        expected = [batch, count, num_heads, rank, head_dim]
        if shapes[name] != expected or rank < 1:
            raise ValueError(
                f"`{name}` {shapes[name]} must be {expected} with a rank of at least 1: [batch, positions, heads, "
                f"rank, head size] to go with `u` {list(u.shape)}"
            )
    return rank, num_queries


def _factor_shape(name: str, factor: Tensor | Factor) -> list[int]:
    """Returns [B, n, H, r, d_h] of a factor in either form."""
    if not isinstance(factor, Factor):
        if factor.dim() != 5:
            raise ValueError(
                f"`{name}` {list(factor.shape)} must have shape [batch, positions, heads, rank, head size]"
            )
        return list(factor.shape)
    heads, rank, head_dim, width = factor.weight.shape
    if list(factor.hidden.shape[2:]) != [heads, width] or list(factor.bias.shape) != [heads, rank, head_dim]:
        raise ValueError(
            f"`{name}.hidden` {list(factor.hidden.shape)}, `{name}.weight` {list(factor.weight.shape)} and "
            f"`{name}.bias` {list(factor.bias.shape)} must be [B, n, H, w], [H, r, d_h, w] and [H, r, d_h]"
        )
    return [*factor.hidden.shape[:2], heads, rank, head_dim]
