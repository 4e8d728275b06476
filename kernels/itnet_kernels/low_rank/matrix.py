r"""The operator with a low-rank kernel of matrices, K_ij = sum_r f_i[r] g_j[r] M_r: linear in the number of positions.

    S[r, c]  = sum_j omega_j g_j[r] u_j[c]               r x d_h numbers per head, whatever n
    out_i[a] = sum_{r,c} M_r[a, c] f_i[r] S[r, c]

Where all queries see all keys, M_r S[r] is the same for all of them, and a position costs r d_h multiply-adds. Each
query of a causal operator has an S of its own, and costs r d_h^2. Positions are then taken in blocks of C. The keys of
earlier blocks are a state per block, as above. Those of the query's own block are summed as values are in attention,
by one product per block, [C r, C] x [C, d_h], and the sums meet all M_r in one product per head,
[B n, r d_h] x [r d_h, d_h]. Texts of more than a few blocks have these for a few blocks at a time, in the backward
too.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..backends import Backend, matmul_dtype, resolve_backend
from ..measure import over_mass
from ..positions import Coordinates
from ..sampled.sampled import take_keys
from ..transforms import recomputed
from ..validation import check_features, check_indices
from .fused import FeatureApply, FeatureSum, WithinBlocks, feature_apply, feature_sum, within_blocks
from .state import Keys, LowRankState, check_bias, check_keys, prepare_keys, running_sum
from .step import is_step, low_rank_step, step_decay

# Positions in a block of a causal operator.
_BLOCK = 16
_FUSED_BLOCK = 32  # the same in GPU kernels; with 64, their backward spills
# Elements of the sums within blocks at a time: 16 MB in float32.
_CHUNK_ELEMENTS = 2**22


def low_rank_matrix_transform(
    u: Tensor,
    f: Tensor,
    g: Tensor,
    matrices: Tensor,
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
    r"""Applies the operator with the kernel K_ij = sum_r f_i[r] g_j[r] e^(-lambda_r (x_i - x_j)) M_r + bias, in O(n).

        out_i = sum_j omega_j K_ij u_j

    Linear attention is f = phi(q), g = phi(k), M_r = W_V; Retention is the same with a decay. Differentiable in
    everything. Keys can be given in pieces: the state of one call continues in the next.

    Args:
        u: key features ``[B, n, H, d_h]``. Half precision is accumulated in float32.
        f: the query factor ``[B, n_q, H, r]``; n_q may differ from n (a query domain other than the key domain).
        g: the key factor ``[B, n, H, r]``.
        matrices: M ``[H, r, d_out, d_h]``; d_out is d_h as a rule.
        bias: constant part of the kernel, ``[H, d_out, d_h]``; none if not given. It does not decay.
        measure, is_causal, state, decay, positions, return_state: as in :func:`low_rank_transform`.
        backend: "triton" are GPU kernels, which "auto" takes for tensors on a GPU. Anything else is PyTorch.

    Returns:
        ``[B, n_q, H, d_out]`` in the dtype of ``u``, or a pair of it and the :class:`LowRankState`.
    """
    check_features("u", u)
    num_queries = _check_factors(u, f, g, matrices)
    batch, _, num_heads, head_dim = u.shape
    rank, rows = matrices.shape[1:3]
    check_bias(bias, num_heads, rows, head_dim)
    given = {"measure": measure, "is_causal": is_causal, "state": state, "decay": decay, "positions": positions}
    backend, operand_dtype = resolve_backend(backend, u), matmul_dtype(u)
    given["moments"] = [batch, num_heads, rank, head_dim]
    if backend == "triton" and is_step(num_queries, u, is_causal, state, f, g, matrices, bias, decay):
        token = u, check_keys(u, rank, num_queries, **given), f, g, state
        weights = {"matrices": matrices, "bias": bias} | step_decay(decay, positions, batch)
        out, last = low_rank_step(*token, **weights)
        return (out.to(u.dtype), last) if return_state else out.to(u.dtype)
    with torch.autocast(u.device.type, enabled=False):
        keys, state = prepare_keys(u, rank, num_queries, **given)
        # A GPU of AMD has no room for M_r of more than 64 features: PyTorch does it there.
        has_room = torch.version.hip is None or not is_causal or u.shape[3] <= 64
        keys = keys._replace(operand_dtype=operand_dtype if backend == "triton" and has_room else None)
        dtype, matrices = keys.measure.dtype, matrices.to(keys.measure.dtype)
        if not keys.is_fused:
            f, g = f.to(dtype), g.to(dtype)
        if is_causal and num_queries > 1:
            past, keys = keys.split(u.shape[1] - num_queries)
            if past.measure.shape[1] > 0:  # keys that all queries see
                state = _advance(state, past, g[:, :-num_queries])
            out, mean, last = _causal(keys, f, g[:, -num_queries:], matrices, state)
            before = None if state is None else state.mass
            mass = running_sum(keys.measure, before, is_fused=keys.is_fused)
        else:  # all queries see all keys
            last = _advance(state, keys, g)
            table = _apply(matrices, last.moments)
            if not keys.is_fused:
                out = torch.einsum("bnhr,bhra->bnha", f, table)
            else:
                out = feature_apply(FeatureApply(f, pad(table, (0, 0, 0, 1)), keys.operand_dtype))
            mean, mass = last.mean.unsqueeze(1), last.mass.unsqueeze(1)
        if bias is not None:
            out = out + torch.einsum("bnhc,hac->bnha", mean, bias.to(dtype))
        if is_causal:
            out = over_mass(out, mass[..., None, None])
    out = out.to(u.dtype)
    return (out, last) if return_state else out


def sampled_low_rank_matrix_transform(
    u: Tensor,
    f: Tensor,
    g: Tensor,
    matrices: Tensor,
    *,
    indices: Tensor,
    coefficients: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """Returns sum_m c_im (sum_r f_i[r] g_j[r] M_r + bias) u_j, j = indices[i, m], as :func:`sampled_transform` does.

    ``indices`` and ``coefficients`` are ``[B, n_q, M]``, the rest as in :func:`low_rank_matrix_transform`; returns
    ``[B, n_q, H, d_out]``.
    """
    check_features("u", u)
    num_queries = _check_factors(u, f, g, matrices)
    check_bias(bias, u.shape[2], *matrices.shape[2:])
    check_indices(indices, u.shape[0], num_queries, u.shape[1], coefficients=coefficients)
    dtype = torch.promote_types(u.dtype, torch.float32)

    def chunk(indices: Tensor, coefficients: Tensor, f: Tensor) -> Tensor:
        values = take_keys(u.to(dtype), indices) * coefficients.to(dtype)[..., None, None]  # [B, t, M, H, d_h]
        sums = torch.einsum("bnmhr,bnmhc->bnhrc", take_keys(g.to(dtype), indices), values) * f.to(dtype).unsqueeze(-1)
        out = torch.einsum("bnhrc,hrac->bnha", sums, matrices.to(dtype))
        return out if bias is None else out + torch.einsum("bnmhc,hac->bnha", values, bias.to(dtype))

    width = u.shape[2] * (matrices.shape[1] * u.shape[3] + indices.shape[2] * (u.shape[3] + g.shape[3]))
    size = max(1, _CHUNK_ELEMENTS // (u.shape[0] * width))
    with torch.autocast(u.device.type, enabled=False):
        parts = zip(*(tensor.split(size, dim=1) for tensor in (indices, coefficients, f)), strict=True)
        return torch.cat([recomputed(chunk, *part) for part in parts], dim=1).to(u.dtype)


def _advance(state: LowRankState | None, keys: Keys, g: Tensor) -> LowRankState:
    """Returns the state after more keys."""
    if keys.times is not None:
        g = g * keys.decay(keys.times[:, -1:] - keys.times[:, 1:])
    if not keys.is_fused:
        values = keys.values
        sums, mean = torch.einsum("bnhr,bnhc->bhrc", g, values), values.sum(1)
    else:
        found = feature_sum(FeatureSum(g, keys.features, keys.measure, keys.operand_dtype))
        sums, mean = found[:, :, :-1], found[:, :, -1]
    new = sums, mean, keys.measure.sum(1)
    if state is None:
        return LowRankState(*new, keys.position)
    before = state.moments
    if keys.times is not None:
        before = before * keys.decay(keys.times[:, -1] - keys.times[:, 0]).unsqueeze(-1)
    return LowRankState(before + new[0], state.mean + new[1], state.mass + new[2], keys.position)


def _causal(
    keys: Keys, f: Tensor, g: Tensor, matrices: Tensor, state: LowRankState | None
) -> tuple[Tensor, Tensor, LowRankState]:
    """Takes as many queries as keys; returns outputs and means that are not yet over the mass, and the last state."""
    count, all_values, is_fused = f.shape[1], keys.values, keys.is_fused
    size = min(count, _BLOCK)
    if is_fused:  # few sizes: kernels are compiled for each
        size = min(1 << (count - 1).bit_length(), _FUSED_BLOCK)
    f, g, values = (_in_blocks(tensor, size) for tensor in (f, g, all_values))  # [B, k, C, H, ...]
    visible, late = f, g  # as the state before a block finds f, and the state after it g
    times = decays = None
    if keys.times is not None:
        padding = keys.times[:, -1:].expand(-1, -count % size)
        times = torch.cat([keys.times, padding], dim=1)
        starts, ends = times[:, :-1:size], times[:, size::size]  # [B, k]
        times = times[:, 1:].unflatten(1, (-1, size))  # [B, k, C]
        visible = f * keys.decay(times - starts.unsqueeze(2))
        late = g * keys.decay(ends.unsqueeze(2) - times)
        decays = keys.decay(ends - starts).unsqueeze(-1)
    if is_fused:
        ones = values.new_ones(len(values) * values.shape[1], size)
        found = feature_sum(FeatureSum(late.flatten(0, 1), values.flatten(0, 1), ones, keys.operand_dtype))
        sums = found[:, :, :-1].unflatten(0, values.shape[:2])
    else:
        sums = torch.einsum("bkjhr,bkjhc->bkhrc", late, values)
    before = None if state is None else state.moments
    after = running_sum(sums, before, decays, is_fused)  # [B, k, H, r, d_h]
    first = torch.zeros_like(after[:, :1]) if before is None else before.unsqueeze(1)
    seen = _apply(matrices, torch.cat([first, after[:, :-1]], dim=1))  # [B, k, H, r, d_out]
    if is_fused:
        table, own = pad(seen, (0, 0, 0, 1)).flatten(0, 1), (tensor.flatten(0, 1) for tensor in (f, g, values))
        earlier = feature_apply(FeatureApply(visible.flatten(0, 1), table, keys.operand_dtype))
        steps = None if times is None else (times - starts.unsqueeze(2)).flatten(0, 1).to(values.dtype)
        within = within_blocks(WithinBlocks(*own, matrices, keys.rates, steps, keys.operand_dtype))
        out = (earlier + within).unflatten(0, values.shape[:2])
    else:
        earlier = torch.einsum("bkihr,bkhra->bkiha", visible, seen)
        out = earlier + _within_blocks(f, g, values, matrices, keys.rates, times)
    mean = running_sum(all_values, None if state is None else state.mean, is_fused=is_fused)
    mass = keys.measure.sum(1) if state is None else state.mass + keys.measure.sum(1)
    return out.flatten(1, 2)[:, :count], mean, LowRankState(after[:, -1], mean[:, -1], mass, keys.position)


def _within_blocks(f, g, values, matrices, rates, times) -> Tensor:
    """Returns the sums over the keys of the query's own block, up to the query: [B, k, C, H, d_out]."""
    batch, blocks, size, num_heads, rank = f.shape
    f, g, values = (tensor.permute(3, 0, 1, 2, 4).flatten(1, 2) for tensor in (f, g, values))  # [H, B k, C, ...]
    weight = matrices.transpose(2, 3).flatten(1, 2)  # [H, r d_h, d_out]
    mask = values.new_ones(size, size).tril()

    def chunk(f: Tensor, g: Tensor, values: Tensor, times: Tensor | None) -> Tensor:
        weights = mask.unsqueeze(1)  # [C, 1, C]
        if times is not None:  # [m, C]; the difference is negative where the mask is 0, and must not overflow
            spans = (times.unsqueeze(2) - times.unsqueeze(1)).clamp(min=0).to(mask.dtype)
            weights = weights * torch.exp(-rates[:, None, None, :, None] * spans.unsqueeze(2))  # [H, m, C, r, C]
        pairs = f.unsqueeze(4) * (g.transpose(2, 3).unsqueeze(2) * weights)  # [H, m, C, r, C]
        sums = pairs.flatten(2, 3) @ values  # [H, m, C r, d_h]
        out = sums.view(num_heads, -1, weight.shape[1]) @ weight  # M_r of each [H, m C, d_out]
        return out.unflatten(1, (-1, size))

    length = max(1, _CHUNK_ELEMENTS // (num_heads * size * rank * max(size, values.shape[-1])))
    parts = [tensor.split(length, dim=1) for tensor in (f, g, values)]
    parts.append([None] * len(parts[0]) if times is None else times.flatten(0, 1).split(length))
    if len(parts[0]) == 1:  # what it keeps for a gradient is small
        out = chunk(*(part[0] for part in parts))
    else:
        out = torch.cat([recomputed(chunk, *part) for part in zip(*parts, strict=True)], dim=1)  # [H, B k, C, d_out]
    return out.unflatten(1, (batch, blocks)).permute(1, 2, 3, 0, 4)


def _apply(matrices: Tensor, moments: Tensor) -> Tensor:
    """Returns M_r S[r]: [..., H, r, d_h] -> [..., H, r, d_out]."""
    return torch.einsum("hrac,...hrc->...hra", matrices, moments)


def _in_blocks(tensor: Tensor, size: int) -> Tensor:
    """Cuts [B, n, ...] into [B, blocks, size, ...], filled up with zeros."""
    return pad(tensor, (0, 0, 0, 0, 0, -tensor.shape[1] % size)).unflatten(1, (-1, size))


def _check_factors(u: Tensor, f: Tensor, g: Tensor, matrices: Tensor) -> int:
    """Returns the number of queries."""
    batch, num_keys, num_heads, head_dim = u.shape
    if matrices.dim() != 4 or [matrices.shape[0], matrices.shape[3]] != [num_heads, head_dim] or 0 in matrices.shape:
        raise ValueError(
            f"`matrices` {list(matrices.shape)} must be [{num_heads}, r, d_out, {head_dim}] with no size 0, to go "
            f"with `u` {list(u.shape)}"
        )
    for name, tensor, count in (("f", f, "n_q"), ("g", g, num_keys)):
        wanted = [batch, tensor.shape[1] if count == "n_q" and tensor.dim() == 4 else count, num_heads]
        if list(tensor.shape) != [*wanted, matrices.shape[1]] or tensor.shape[1] < 1:
            raise ValueError(
                f"`{name}` {list(tensor.shape)} must be [{batch}, {count}, {num_heads}, {matrices.shape[1]}]: [batch, "
                f"positions, heads, rank], to go with `u` {list(u.shape)} and `matrices` {list(matrices.shape)}"
            )
    return f.shape[1]
