"""FLOP formulas of all operators against PyTorch's count of the same mathematics in ordinary operations.

No kernel runs: the tensors have no data."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from itnet_kernels import flops
from itnet_kernels.exact.pair_inputs import PairInputs
from itnet_kernels.exact.plain_pair_sum import plain_pair_sum
from itnet_kernels.integral_transform import pair_sum
from itnet_kernels.low_rank import fused
from itnet_kernels.sampled.list_sum import ListInputs, list_sum

B, N, H, R, D, W, M = 2, 5, 3, 2, 4, 6, 7


def new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, requires_grad=dtype.is_floating_point)


def arguments() -> dict:
    """Of every operator that multiplies; the sums over pairs have content alone, without a position term."""
    dtype, content = torch.float32, {"queries": new(B, N, H, D), "keys": new(B, M, H, D), "w2": new(H, W * D, D)}
    content |= {"row": new(B, N, H, W), "w_product": new(W, D), "operand_dtype": dtype}
    lists = dict.fromkeys(ListInputs._fields) | content | {"has_frequencies": False, "coefficients": new(B, N, 3)}
    lists |= {"indices": new(B, N, 3, dtype=torch.int64), "b2": new(H, D, D)}
    for name, count in (("query", N), ("key", M)):
        lists |= {f"{name}_positions": new(1, count, 1), f"{name}_features": new(1, count, 1)}
    pairs = dict.fromkeys(PairInputs._fields) | content | {name: lists[name] for name in lists if "_features" in name}
    pairs |= {name: lists[name] for name in lists if "_positions" in name} | {"measure": new(B, M)}
    pairs |= {"frequencies": new(0, 1), "is_causal": False, "backend": "tiled"}
    pairs |= {name: [] for name in ("block_queries", "block_keys", "block_pairs")}
    hidden, weight, bias = new(B, N, H, W), new(H, R, D, W), new(H, R, D)
    return {
        "pair_sum": PairInputs(**pairs),
        "list_sum": ListInputs(**lists),
        "feature_sum": fused.FeatureSum(new(B, N, H, R), new(B, N, H, D), new(B, N), dtype),
        "feature_apply": fused.FeatureApply(new(B, N, H, R), new(B, H, R + 1, D), dtype),
        "factor_project": fused.FactorProject(new(B, N, H, D), hidden, weight, bias, dtype),
        "factor_expand": fused.FactorExpand(new(B, N, H, R), hidden, weight, bias, dtype),
        "within_blocks": fused.WithinBlocks(
            new(B, N, H, R), new(B, N, H, R), new(B, N, H, D), new(H, R, D, D), None, None, dtype
        ),
    }


def counts(function, inputs) -> tuple[int, int]:
    """FLOPs of the forward, and of the backward with all gradients."""
    with FlopCounterMode(display=False) as forward:
        out = function(inputs)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


OPERATORS = {operator.function._name: operator for operator in flops.OPERATORS}
NAMES = ["pair_sum", *(name for name in OPERATORS if name != "running_sum")]  # which multiplies no matrices


@pytest.mark.parametrize("name", NAMES)
def test_formulas_count_the_mathematics(name):
    """A backward recomputes what it needs of the forward: once the forward, but for sums of two factors alone."""
    plain = plain_pair_sum if name == "pair_sum" else OPERATORS[name].plain
    operator = pair_sum if name == "pair_sum" else OPERATORS[name].function
    with FakeTensorMode():
        given = arguments()[name]
        forward, backward = counts(lambda inputs: operator(*inputs), given)
        expected, derivative = counts(plain, given)
    assert forward == expected > 0
    assert backward == derivative + (0 if name.startswith("feature") else expected)


def test_every_operator_is_there():
    assert {*OPERATORS} == {*arguments(), "running_sum"} - {"pair_sum"}
    assert OPERATORS["list_sum"] is list_sum


def test_the_row_term_of_content_counts():
    """2 w d_h for each query and head, where it is computed inside."""
    with FakeTensorMode():
        given = arguments()["pair_sum"]._replace(backend="triton")
        inside = given._replace(w_query=new(W, D))
        difference = counts(lambda i: pair_sum(*i), inside)[0] - counts(lambda i: pair_sum(*i), given)[0]
    assert difference == 2 * B * N * H * W * D


def test_one_token():
    """By hand: two products for each of M keys, W2 and b2; both factors, their products with u and z; M_r and b2."""
    dtype = torch.float32
    with FakeTensorMode(), torch.no_grad(), FlopCounterMode(display=False) as counter:
        step = torch.ops.itnet.list_step(
            new(B, H, D), new(B, M, H, D), new(1, 1), new(1, M, 1), new(1, M, 1), new(B, M), new(W, 3), new(W),
            new(H, D * D, W), new(H, D * D), None, [-1] * 7, False, dtype,
        )  # fmt: skip
        assert step.shape == (B, H, D)
        assert counter.get_total_flops() == B * H * (4 * M * W * D + 2 * W * D * D + 2 * D * D)
    state = new(B, H, D), new(B)
    bias = new(H, D, D)
    factors = new(H, R, D, W), new(H, R, D), new(H, R, D, W), new(H, R, D)
    vector = new(B, H, W), new(B, H, W), new(B, H, R), *state, None, *factors, bias
    matrix = new(B, H, R), new(B, H, R), new(B, H, R, D), *state, new(H, R, D, D), *[None] * 4, None
    expected = {vector: 2 * (2 * R * D * W + 2 * R * D) + 2 * D * D, matrix: 2 * R * D * D}
    for given, count in expected.items():
        with FakeTensorMode(), torch.no_grad(), FlopCounterMode(display=False) as counter:
            fake = [tensor if tensor is None else new(*tensor.shape) for tensor in given]
            torch.ops.itnet.low_rank_step(new(B, H, D), new(B), *fake, None, None, None)
        assert counter.get_total_flops() == B * H * count
