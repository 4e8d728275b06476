"""The sum over listed keys as one PyTorch operator, ``itnet::list_sum``, for GPUs.

    out_i[a] = sum_{k,c} W2[(k, c), a] A_i[k, c] + sum_c b2[c, a] mean_i[c]
    A_i[k, c] = sum_m c_im GELU(q_i[k] + (W_uy[k] + W_had[k] * u_i) . u_j + P_ij[k]) u_j[c],     j = indices[i, m]
    mean_i[c] = sum_m c_im u_j[c]

Samples of Monte Carlo integration, anchors and edges are lists as they come; a neighbourhood of a block is the list of
the block's keys, with coefficients that are 0 where a pair does not count (:func:`block_sum`).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..exact.pair_inputs import PairInputs
from ..exact.plain_pair_sum import plain_tile
from ..first_layer import PositionWeights
from ..near.blocks import Blocks
from ..operators import KernelOperator

# Elements of one [queries, heads, w, M] tile of pre-activations in the form of ordinary operations.
_TILE_ELEMENTS = 2**22


class ListInputs(NamedTuple):
    """Arguments of the sum over listed keys. None: a group that the kernel does not use."""

    queries: Tensor  # [B, R, H, d_h]
    keys: Tensor  # [B, n, H, d_h]
    row: Tensor  # q [B, R, H, w]
    coefficients: Tensor  # c [B, R, M]
    query_positions: Tensor  # [B or 1, R, s]
    key_positions: Tensor  # [B or 1, n, s]
    query_features: Tensor  # gamma(x) [B or 1, R, F]
    key_features: Tensor  # gamma(y) [B or 1, n, F]
    w_y: Tensor | None  # [w, F]
    w_relative: Tensor | None  # [w, F]
    w_distance: Tensor | None  # [w, 1]
    w_key: Tensor | None  # W_uy [w, d_h]
    w_product: Tensor | None  # W_had [w, d_h]
    w2: Tensor  # [H, w * d_h, d_h], rows (k, c), columns a
    b2: Tensor  # [H, d_h, d_h], rows c, columns a
    indices: Tensor  # [B or 1, N, M]; N divides R: R / N queries after each other share a list
    has_frequencies: bool
    operand_dtype: torch.dtype  # of the matrix products, which accumulate in float32

    @property
    def position_weights(self) -> PositionWeights:
        return PositionWeights(self.w_y, self.w_relative, self.w_distance)

    @property
    def has_position_bias(self) -> bool:
        return self.position_weights.are_used


_PER_QUERY = ("queries", "row", "query_positions", "query_features")
_PER_KEY = ("keys", "key_positions", "key_features")


def plain_list_sum(inputs: ListInputs) -> Tensor:
    """Does the same in ordinary operations: every query is a cell of its own, with the keys of its list."""
    batch, rows, heads = inputs.queries.shape[:3]
    length = inputs.indices.shape[2]
    indices = inputs.indices.repeat_interleave(rows // inputs.indices.shape[1], dim=1).expand(batch, -1, -1)
    size = max(1, _TILE_ELEMENTS // (batch * heads * inputs.row.shape[3] * length))
    samples = torch.arange(batch, device=indices.device)[:, None, None]

    def whole(name: str) -> Tensor:
        tensor = getattr(inputs, name)
        return tensor.expand(batch, *tensor.shape[1:])

    parts = [whole(name).split(size, dim=1) for name in (*_PER_QUERY, "coefficients")]
    of_keys = {name: whole(name) for name in _PER_KEY}
    outs = []
    for *of_queries, weights, lists in zip(*parts, indices.split(size, dim=1), strict=True):
        cells = {name: part.flatten(0, 1).unsqueeze(1) for name, part in zip(_PER_QUERY, of_queries, strict=True)}
        cells |= {name: part[samples, lists].flatten(0, 1) for name, part in of_keys.items()}  # [b t, M, ...]
        shared = {
            name: getattr(inputs, name) for name in ("w_y", "w_relative", "w_distance", "w_key", "w_product", "w2")
        }
        nothing = dict.fromkeys(PairInputs._fields) | {"block_pairs": [], "is_causal": False}
        tile = PairInputs(**nothing | shared | cells | {"measure": weights.flatten(0, 1)})
        tile = tile._replace(frequencies=inputs.w2.new_zeros(int(inputs.has_frequencies), 1))
        mean = torch.einsum("zm,zmhc->zhc", tile.measure, tile.keys.to(tile.row.dtype))
        out = plain_tile(tile, None).squeeze(1) + torch.einsum("zhc,hca->zha", mean, inputs.b2)
        outs.append(out.unflatten(0, (batch, -1)))
    return torch.cat(outs, dim=1)


def _evaluate(inputs: ListInputs):
    from .triton.lists import TritonLists  # imports triton, which may not be installed

    return TritonLists(inputs)


def _flops(shapes: ListInputs) -> int:
    """Counts two products of 2 w d_h per pair, one for the mean, those with W2 and b2 per query, for every head."""
    batch, rows, heads, head_dim = shapes.queries
    width, length = shapes.row[3], shapes.indices[2]
    return batch * rows * heads * head_dim * (length * (4 * width + 2) + 2 * head_dim * (width + 1))


list_sum = KernelOperator(
    __name__,
    "list_sum",
    ListInputs,
    ListInputs._fields[: ListInputs._fields.index("indices")],
    forward=lambda inputs: _evaluate(inputs).forward(),
    backward=lambda inputs, grad_out, names: _evaluate(inputs).backward(grad_out, names),
    plain=plain_list_sum,
    shape=lambda inputs: inputs.queries.shape,
    flops=_flops,
    backward_ratio=3,
)


def block_sum(inputs: ListInputs, measure: Tensor, blocks: list[Blocks]) -> Tensor:
    """Returns the sum over the pairs of blocks, [B, n_q, H, d_h] in float32.

    ``inputs`` hold all queries and keys; ``measure`` [B, n] gives the coefficients. The queries of a block share its
    keys as their list.
    """
    batch, num_queries = inputs.queries.shape[:2]
    total = None
    for part in blocks:
        queries, keys, pairs = part
        rows = queries.flatten(1)  # [B or 1, N t]
        weights = measure.gather(1, keys.expand(batch, -1, -1).flatten(1)).view(batch, -1, 1, keys.shape[2])
        coefficients = (weights * pairs).flatten(1, 2)  # [B, N t, M]
        own = {name: take_rows(getattr(inputs, name), rows) for name in _PER_QUERY}
        found = list_sum(inputs._replace(**own, coefficients=coefficients, indices=keys))
        # In a fixed order on a GPU too. Rows without pairs fill the last block up, and may name any query.
        samples = torch.arange(batch, device=rows.device)[:, None]
        place = samples, rows.expand(batch, -1)
        total = found.new_zeros(batch, num_queries, *found.shape[2:]) if total is None else total
        total = total.index_put(place, found, accumulate=True)
    return total


def one_list(blocks: list[Blocks], measure: Tensor) -> tuple[Tensor, Tensor] | None:
    """Returns coefficients [B, M] and indices [B or 1, M] of the only query, if one block has it; otherwise None."""
    if len(blocks) != 1 or blocks[0].pairs.shape[1:3] != (1, 1):
        return None
    keys, pairs = blocks[0].keys[:, 0], blocks[0].pairs[:, 0, 0]  # [B or 1, M]
    return measure.gather(1, keys.expand(measure.shape[0], -1)) * pairs, keys


def take_rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """Returns the rows [B or 1, R] of a tensor [B or 1, n, ...]: [B or 1, R, ...]."""
    sets = max(tensor.shape[0], rows.shape[0])
    if sets == 1:
        return tensor[:, rows[0]]
    samples = torch.arange(sets, device=rows.device)[:, None]
    return tensor.expand(sets, *tensor.shape[1:])[samples, rows.expand(sets, -1)]
