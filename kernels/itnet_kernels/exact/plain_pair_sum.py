"""The sum over pairs in ordinary PyTorch operations, which any mode of differentiation passes through, to any order.

``itnet::pair_sum`` has a first derivative in reverse mode, written by hand. This form serves all others: torch.func,
forward mode, and derivatives of derivatives. It is the slower one, and what autograd keeps of it, n_q n_k w numbers
per sample and head, grows with the number of pairs; forward mode by itself keeps one tile.
"""

import torch
from torch import Tensor
from torch.nn.functional import gelu

from ..first_layer import position_term
from .pair_inputs import POSITIONS, PairInputs

# Elements of one [samples, heads, queries, w, keys] tile of pre-activations: 16 MB in float32.
_TILE_ELEMENTS = 2**22
# What a tile has its own rows of; dimension 1 counts queries.
_PER_QUERY = ("queries", "row", "query_positions", "query_features")


def plain_pair_sum(inputs: PairInputs) -> Tensor:
    """Returns [B, n_q, H, d_h] in the dtype of ``row``, as ``itnet::pair_sum``; in tiles of queries."""
    inputs = _wide(inputs)
    if inputs.block_pairs:
        return sum(plain_block_sum(inputs, number) for number in range(len(inputs.block_pairs)))
    num_queries, num_keys = inputs.queries.shape[1], inputs.keys.shape[1]
    size = max(1, min(num_queries, _TILE_ELEMENTS * num_queries // (inputs.row.numel() * num_keys)))
    # Split, not sliced: the gradient of a slice is a zero tensor of the size of the whole.
    tiles = zip(*(getattr(inputs, name).split(size, dim=1) for name in _PER_QUERY), strict=True)
    outs = []
    for start, tile in zip(range(0, num_queries, size), tiles, strict=True):
        first = start + num_keys - num_queries  # last key that the tile's first query sees, if causal
        outs.append(plain_tile(inputs._replace(**dict(zip(_PER_QUERY, tile, strict=True))), first))
    return torch.cat(outs, dim=1)


def plain_block_sum(inputs: PairInputs, number: int) -> Tensor:
    """Returns the same over the pairs of some blocks: every block is a sample of its own, [B N, t or m, ...]."""
    batch, num_queries = inputs.queries.shape[:2]
    lists = {"queries": inputs.block_queries[number], "keys": inputs.block_keys[number]}
    lists = {side: indices.expand(batch, -1, -1) for side, indices in lists.items()}

    def cells(tensor: Tensor, side: str) -> Tensor:
        tensor = tensor.expand(batch, *tensor.shape[1:])
        return tensor[torch.arange(batch, device=tensor.device)[:, None, None], lists[side]].flatten(0, 1)

    of_queries = {name: cells(getattr(inputs, name), "queries") for name in _PER_QUERY}
    of_keys = {name: cells(getattr(inputs, name), "keys") for name in ("keys", "key_positions", "key_features")}
    pairs = inputs.block_pairs[number].expand(batch, -1, -1, -1).flatten(0, 1)  # [B N, t, m]
    parts = plain_tile(inputs._replace(**of_queries, **of_keys, measure=cells(inputs.omega, "keys")), None, pairs)
    slots = lists["queries"].flatten(1)[..., None, None].expand(-1, -1, *parts.shape[2:])
    total = parts.new_zeros(batch, num_queries, *parts.shape[2:])
    return total.scatter_add(1, slots, parts.view(batch, -1, *parts.shape[2:]))


def plain_tile(inputs: PairInputs, last_visible: int | None, pairs: Tensor | None = None) -> Tensor:
    """Takes all queries at once; the first of them in a causal sum sees the keys up to ``last_visible``.

    ``pairs`` [B, n_q, n_k] says which pairs count, and is what the last hidden unit holds.
    """
    inputs = _wide(inputs)
    queries, keys, row = (t.transpose(1, 2) for t in (inputs.queries, inputs.keys, inputs.row))  # [B, H, n, .]
    batch, heads, num_queries, width = row.shape
    num_keys = keys.shape[2]
    hidden = row.unsqueeze(-1)  # [B, H, n_q, w, n_k], as are the next three
    if inputs.w_key is not None:
        hidden = hidden + (inputs.w_key @ keys.mT).unsqueeze(2)
    if inputs.w_product is not None:
        virtual = (queries.unsqueeze(3) * inputs.w_product).flatten(2, 3)  # [B, H, n_q w, d_h]
        hidden = hidden + (virtual @ keys.mT).unflatten(2, (num_queries, width))
    if inputs.has_position_bias:
        x, y, gamma_x, gamma_y = (getattr(inputs, name) for name in POSITIONS)
        keys_of_all = y.unsqueeze(1), gamma_x, gamma_y.unsqueeze(1)
        bias = position_term(x, *keys_of_all, inputs.position_weights, inputs.has_frequencies)
        hidden = hidden + bias.to(row.dtype).unsqueeze(1)
    hidden = gelu(hidden)
    if inputs.w_mid is not None:
        hidden = gelu(inputs.w_mid @ hidden + inputs.b_mid[:, None])
    if inputs.is_causal:
        key, query = (torch.arange(count, device=keys.device) for count in (num_keys, num_queries))
        hidden = hidden * (key <= query[:, None] + last_visible).unsqueeze(1)
    if pairs is not None:
        counts = pairs.to(hidden.dtype)[:, None, :, None]  # [B, 1, n_q, 1, n_k]
        others = (hidden[:, :, :, :-1] * counts).expand(batch, heads, -1, -1, -1)
        hidden = torch.cat([others, counts.expand(batch, heads, -1, -1, -1)], dim=3)
    hidden = hidden.expand(batch, heads, num_queries, width, num_keys).flatten(2, 3)
    values = keys * inputs.omega[:, None, :, None]
    moments = (hidden @ values).unflatten(2, (num_queries, width)).flatten(3)  # A [B, H, n_q, w * d_h]
    return (moments @ inputs.w2).transpose(1, 2).contiguous()


def _wide(inputs: PairInputs) -> PairInputs:
    """Returns the same sum with its whole row term and with features in the dtype of that, whatever the backend."""
    dtype = inputs.row.dtype
    return inputs.with_rows()._replace(queries=inputs.queries.to(dtype), keys=inputs.keys.to(dtype))
