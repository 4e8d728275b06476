"""FLOPs of the sum over pairs, for ``torch.utils.flop_counter.FlopCounterMode``. Importing this module registers them.

It is a module of its own because PyTorch's counter imports Triton, which the package itself does not need.
"""

import torch
from torch.utils.flop_counter import register_flop_formula

from ..integral_transform import _NAMESPACE
from .pair_inputs import PairInputs


def pair_sum_flops(*shapes, **_) -> int:
    """Returns the FLOPs of the sum from the shapes of its arguments, the fields of :class:`PairInputs`.

    There are 4 w d_h per pair and head, 2 w^2 more if there is a third layer, and 2 w d_h^2 per query and head for W2,
    2 w d_h more if the row term's part with content is computed inside.
    The position term, which heads share, is left out, as are sums and GELU. Of a causal sum only visible pairs count.
    Blocks count as they are computed, with the queries and pairs in them that do not count.
    """
    inputs = PairInputs(*shapes)
    (batch, queries, num_heads, head_dim), width = inputs.queries, inputs.row[-1]
    pairs = queries * inputs.keys[1] - (queries * (queries - 1) // 2 if inputs.is_causal else 0)
    if inputs.block_pairs:  # [., N, t, m] each
        queries = sum(number * rows for _, number, rows, _ in inputs.block_pairs)
        pairs = sum(number * rows * keys for _, number, rows, keys in inputs.block_pairs)
    per_pair = 4 * width * head_dim + (0 if inputs.w_mid is None else 2 * width**2)
    per_query = 2 * width * head_dim * (head_dim + (0 if inputs.w_query is None else 1))
    return batch * num_heads * (pairs * per_pair + queries * per_query)


register_flop_formula(getattr(torch.ops, _NAMESPACE).pair_sum)(pair_sum_flops)
# A backward is three times its forward: six products per pair, and two with W2 where a third of two would do.
register_flop_formula(getattr(torch.ops, _NAMESPACE).pair_sum_backward)(
    lambda *shapes, **_: 3 * pair_sum_flops(*shapes[3:])
)
