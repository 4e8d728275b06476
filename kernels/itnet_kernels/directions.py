"""Kernels that are affine in the displacement, by operators that know nothing of it.

    K_ij = K_ij^0 + sum_k (x_ik - y_jk) K_ij^k,     K_ij^k = reshape(W2_k h_ij + b2_k),     k = 1..s

with the hidden units h_ij of one MLP. A sum over keys is linear in what it weighs, so that

    sum_j omega_j K_ij u_j = [S_i^0(u) - sum_k S_i^k(y_k u)] + sum_k x_ik S_i^k(u)
    S_i^k(v) = sum_j omega_j K_ij^k v_j

The sums S are those of a kernel without directions whose heads hold u_j and the y_jk u_j side by side, (1 + s) d_h
numbers. Coordinates are counted from the first key of each sample: where the origin lies cancels, but for rounding.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from .positions import Coordinates
from .validation import check_operands
from .weights import KernelWeights, split_input_weights


def along_directions(
    transform: Callable[..., Tensor],
    u: Tensor,
    positions: Tensor | Coordinates,
    weights: KernelWeights,
    queries: Tensor | None,
    query_positions: Tensor | Coordinates | None,
    **settings,
) -> Tensor:
    """Returns what ``transform``, an operator on ``u`` [B, n, H, d_h], is for a kernel with directions.

    Products take float32 at least, also under autocast: the two parts of a displacement nearly cancel where points are
    close, and half precision would leave nothing of the difference.
    """
    given, x, y = check_operands(u, positions, weights, queries, query_positions)
    dtype, head_dim = torch.promote_types(given.dtype, torch.float32), u.shape[-1]
    with torch.autocast(u.device.type, enabled=False):
        origin = y.exact[:, :1]
        from_x, from_y = ((place.exact - origin).to(dtype) for place in (x, y))  # [B or 1, n, s]
        keys = u.to(dtype)
        scaled = from_y[:, :, None, :, None] * keys.unsqueeze(-2)  # y_jk u_j [B, n, H, s, d_h]
        keys = torch.cat([keys, scaled.flatten(-2)], dim=-1)
        if queries is not None:
            queries = pad(queries.to(dtype), (0, keys.shape[-1] - head_dim))
        wide = widened(weights.to(dtype), head_dim)
        out = transform(keys, y, wide, queries=queries, query_positions=None if queries is None else x, **settings)
        sums = out.unflatten(-1, (-1, head_dim))  # [B, n_q, H, 1 + s, d_h]
        moved = from_x[:, :, None, :, None] * sums[..., 1:, :]
        return (sums[..., 0, :] + moved.sum(-2)).to(given.dtype)


def widened(weights: KernelWeights, head_dim: int) -> KernelWeights:
    """Returns the kernel of the sums S for heads [u; y_1 u; ...; y_s u]: its hidden units see u alone."""
    count, rows = weights.w2_directions.shape[1], weights.w1.shape[0]
    columns = split_input_weights(weights, head_dim)
    parts = [
        pad(part, (0, count * head_dim)) if name.startswith("u_") else part
        for name, part in columns.items()
        if part is not None
    ]

    def of_blocks(constant: Tensor, directions: Tensor) -> Tensor:
        """[H, d_h^2, ...] and [H, s, d_h^2, ...] -> [H, ((1 + s) d_h)^2, ...]: rows K^0, -K^k, then K^k, 0."""
        constant = constant.unflatten(1, (head_dim, head_dim))
        directions = directions.unflatten(2, (head_dim, head_dim))  # [H, s, a, c, ...]
        first = torch.cat([constant, *(-part for part in directions.unbind(1))], dim=2)
        empty = directions.new_zeros(len(directions), count * head_dim, count * head_dim, *directions.shape[4:])
        others = torch.cat([directions.flatten(1, 2), empty], dim=2)
        return torch.cat([first, others], dim=1).flatten(1, 2)

    return weights._replace(
        w1=torch.cat(parts, dim=1) if parts else weights.w1.new_zeros(rows, 0),
        w2=of_blocks(weights.w2, weights.w2_directions),
        b2=of_blocks(weights.b2, weights.b2_directions),
        w2_directions=None,
        b2_directions=None,
    )
