"""FLOPs of all operators, for ``torch.utils.flop_counter.FlopCounterMode``. Importing this module registers them.

It is a module of its own because PyTorch's counter imports Triton, which the package itself does not need. Matrix
products count, as in PyTorch's own formulas; elementwise operations and sums do not. Position terms that heads share
are left out.
"""

import torch
from torch.utils.flop_counter import register_flop_formula

from .exact import flops as _pairs  # noqa: F401  registers itnet::pair_sum
from .low_rank import fused
from .low_rank import step as low_rank_step
from .sampled import list_step
from .sampled.list_sum import list_sum
from .transforms import operator_namespace

OPERATORS = (
    list_sum,
    fused.feature_sum,
    fused.feature_apply,
    fused.fused_running_sum,
    fused.factor_project,
    fused.factor_expand,
    fused.within_blocks,
)


def list_step_flops(query, keys, gamma_x, gamma_y, differences, coefficients, w1, b1, w2, *_, **__) -> int:
    """Returns the FLOPs of one query per sample: 4 w d_h per listed key and head, W2 and b2."""
    (batch, heads, head_dim), width = query, w1[0]
    return batch * heads * (4 * coefficients[1] * width * head_dim + 2 * head_dim**2 * (width + 1))


def low_rank_step_flops(*shapes, **_) -> int:
    """Returns the FLOPs of one token per sample: both factors, their products with u and z, or M_r and the state."""
    given = low_rank_step.named_arguments(shapes)
    (batch, heads, head_dim), rank = given["u"], given["moments"][2]
    if given["matrices"] is None:
        rows, per_rank = head_dim, 4 * head_dim * (given["key"][2] + 1)
    else:
        rows = given["matrices"][2]
        per_rank = 2 * rows * head_dim
    constant = 0 if given["bias"] is None else 2 * rows * head_dim
    return batch * heads * (rank * per_rank + constant)


for _operator in OPERATORS:
    _operator.register_flops()
for _module, _name, _formula in (
    (list_step, "list_step", list_step_flops),
    (low_rank_step, "low_rank_step", low_rank_step_flops),
):
    _namespace = getattr(torch.ops, operator_namespace(_module.__name__))
    register_flop_formula(getattr(_namespace, _name))(_formula)
