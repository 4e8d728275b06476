"""``itnet::pair_sum`` as PyTorch's compilers, autocast and checkpointing see it. The triton backend's opcheck is in
interpreter_cases.py."""

import importlib
import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from itnet_kernels import KERNEL_INPUTS, integral_transform
from itnet_kernels.exact.pair_inputs import POSITIONS
from itnet_kernels.exact.plain_pair_sum import plain_pair_sum, plain_tile
from itnet_kernels.exact.tiled import PairTiles

VARIANTS = {
    "full": {"n": 6},
    "causal-queries": {"n": 7, "num_queries": 4, "is_causal": True},
    "per-sample": {"n": 5, "per_sample": True},
    "three-layers": {"n": 5, "layers": 3},
    "no-positions": {"n": 5, "inputs": ("u_x", "u_y")},
    "shared-output": {"n": 5, "shared_output": True, "frequencies": 0},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_opcheck(problem, pair_sum_arguments, name):
    arguments = pair_sum_arguments(problem(**VARIANTS[name]), "tiled")  # float64: opcheck compares to 1e-7
    torch.library.opcheck(torch.ops.itnet.pair_sum, arguments)


def test_opcheck_without_measure_or_position_gradients(problem, pair_sum_arguments):
    inputs = pair_sum_arguments(problem(n=5), "tiled")
    frozen = {name: getattr(inputs, name).detach() for name in POSITIONS}
    torch.library.opcheck(torch.ops.itnet.pair_sum, inputs._replace(measure=None, **frozen))


@torch.no_grad()
@pytest.mark.parametrize("name", ["full", "causal-queries", "no-positions"])
def test_plain_sums_take_what_either_backend_is_given(problem, pair_sum_arguments, monkeypatch, name):
    """The triton backend gets a part of the row term and features in their dtype; exports write either out densely."""
    monkeypatch.setattr(sys.modules[integral_transform.__module__], "resolve_backend", lambda backend, *_: backend)
    problem_ = problem(**VARIANTS[name])
    whole, parts = (pair_sum_arguments(problem_, backend) for backend in ("tiled", "triton"))
    assert parts.w_query is not None and whole.w_query is None
    parts = parts._replace(queries=parts.queries.float(), keys=parts.keys.float())
    whole = whole._replace(queries=parts.queries.double(), keys=parts.keys.double(), row=parts.with_rows().row)
    last_visible = whole.keys.shape[1] - whole.queries.shape[1]
    expected = PairTiles(whole).forward()
    for actual in (plain_pair_sum(parts), plain_tile(parts, last_visible)):
        torch.testing.assert_close(actual, expected)


def loss_and_gradients(function, problem) -> tuple[torch.Tensor, list[torch.Tensor]]:
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in problem.tensors().items()}
    loss = function(problem.with_tensors(leaves)).square().sum()
    loss.backward()
    return loss.detach(), [leaf.grad for leaf in leaves.values()]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", ["full", "causal-queries", "three-layers"])
def test_compiles_to_one_graph(problem, name, backend):
    problem_ = problem(**VARIANTS[name])
    torch._dynamo.reset()
    compiled = torch.compile(integral_transform, fullgraph=True, backend=backend)

    def run(function):
        return lambda p: function(
            p.u, p.positions, p.weights, measure=p.measure, is_causal=p.is_causal,
            queries=p.queries, query_positions=p.query_positions,
        )  # fmt: skip

    expected, actual = (loss_and_gradients(run(f), problem_) for f in (integral_transform, compiled))
    torch.testing.assert_close(actual, expected)


def test_compiles_for_any_length(problem):
    torch._dynamo.reset()
    compiled = torch.compile(integral_transform, fullgraph=True, backend="eager", dynamic=True)
    for n in (5, 8, 11):
        problem_ = problem(n=n)
        arguments = (problem_.u, problem_.positions, problem_.weights)
        torch.testing.assert_close(compiled(*arguments), integral_transform(*arguments))


def test_exports(problem):
    problem_ = problem(n=6)

    class Operator(torch.nn.Module):
        def forward(self, u, positions, w1, b1, w2, b2):
            weights = problem_.weights._replace(w1=w1, b1=b1, w2=w2, b2=b2)
            return integral_transform(u, positions, weights)

    arguments = (problem_.u, problem_.positions, *problem_.weights[:4])
    program = torch.export.export(Operator(), arguments)
    graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    assert [str(node.target) for graph in graphs for node in graph.nodes].count("itnet.pair_sum.default") == 1
    torch.testing.assert_close(program.module()(*arguments), Operator()(*arguments))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_autocast_keeps_the_dtype_and_accumulates_in_float32(problem, dtype):
    problem_ = problem(n=40, head_dim=8).to(dtype)
    expected = problem_.run("tiled")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = problem_.run("tiled")
    assert actual.dtype == dtype
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["saved-tensor-hooks", "reentrant"])
def test_checkpointing_changes_nothing(problem, use_reentrant):
    problem_ = problem(n=6)

    def run(p):
        return p.run("tiled")

    def run_checkpointed(p):
        def inner(*tensors):
            return run(p.with_tensors(dict(zip(p.tensors(), tensors, strict=True))))

        return checkpoint(inner, *p.tensors().values(), use_reentrant=use_reentrant)

    torch.testing.assert_close(loss_and_gradients(run_checkpointed, problem_), loss_and_gradients(run, problem_))


def test_every_subset_of_gradients(problem):
    """A frozen tensor gets no gradient and changes none of the others."""
    problem_ = problem(n=5)
    names = list(problem_.tensors())
    expected = dict(zip(names, loss_and_gradients(lambda p: p.run("tiled"), problem_)[1], strict=True))
    for frozen in names:
        leaves = {name: t.detach().clone().requires_grad_(name != frozen) for name, t in problem_.tensors().items()}
        problem_.with_tensors(leaves).run("tiled").square().sum().backward()
        assert leaves[frozen].grad is None
        for name in set(names) - {frozen}:
            torch.testing.assert_close(leaves[name].grad, expected[name])


def test_repeats_bit_by_bit(problem):
    problem_ = problem(n=33, batch=2, head_dim=8, width=16, inputs=KERNEL_INPUTS).to(torch.float32)
    first, second = problem_.run_backward("tiled"), problem_.run_backward("tiled")
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_flops_are_counted(problem, is_causal):
    """4 w d_h for each visible pair and head, and W2; a backward counts three times as much."""
    importlib.import_module("itnet_kernels.exact.flops")
    problem_ = problem(n=7, batch=2, heads=2, head_dim=4, width=6, is_causal=is_causal)
    pairs = 2 * (7 * 8 // 2 if is_causal else 7 * 7)
    expected = 2 * (4 * pairs * 6 * 4 + 2 * 2 * 7 * 6 * 4 * 4)
    with FlopCounterMode(display=False) as counter:
        problem_.run_backward("tiled")
    counts = {str(operator): count for operator, count in counter.get_flop_counts()["Global"].items()}
    assert counts["itnet.pair_sum"] == expected
    assert counts["itnet.pair_sum_backward"] == 3 * expected
