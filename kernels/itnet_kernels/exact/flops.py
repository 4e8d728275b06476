"""FLOPs of the sum over pairs, for ``torch.utils.flop_counter.FlopCounterMode``. Importing this module registers them.

It is a module of its own because PyTorch's counter imports Triton, which the package itself does not need.
"""

import math

import torch
from torch.utils.flop_counter import register_flop_formula

from ..integral_transform import _NAMESPACE
from .pair_inputs import PairInputs


def _flops(inputs: PairInputs) -> int:
    """FLOPs of the sum from the shapes of its arguments: two products per pair, hidden layer and head, and W2.

    The position term, which heads share, is left out, as are sums and GELU. Of a causal sum only visible pairs count.
    """
    (batch, num_queries, num_heads, head_dim), num_keys, width = inputs.queries, inputs.keys[1], inputs.row[-1]
    pairs = batch * num_queries * num_keys
    if inputs.is_causal:
        pairs -= batch * num_queries * (num_queries - 1) // 2
    if inputs.block_pairs:
        pairs = sum(batch // shape[0] * math.prod(shape) for shape in inputs.block_pairs)
    middle = 0 if inputs.w_mid is None else 2 * pairs * width * width
    return num_heads * (4 * pairs * width * head_dim + middle + 2 * batch * num_queries * width * head_dim**2)


# A backward is three times its forward: six products per pair, and two with W2 where a third of two would do.
register_flop_formula(getattr(torch.ops, _NAMESPACE).pair_sum)(
    lambda *shapes, out_shape=None, **_: _flops(PairInputs(*shapes))
)
register_flop_formula(getattr(torch.ops, _NAMESPACE).pair_sum_backward)(
    lambda *shapes, out_shape=None, **_: 3 * _flops(PairInputs(*shapes[3:]))
)
