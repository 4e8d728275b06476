"""Bad input is named, with its value and what was expected."""

import pytest
import torch

from itnet_kernels import integral_transform, resolve_backend


def change(**tensors):
    return lambda problem: [setattr(problem, name, value) for name, value in tensors.items()]


def change_weights(**tensors):
    def apply(problem):
        problem.weights = problem.weights._replace(**tensors)

    return apply


CASES = {
    "u is 3-D": (change(u=torch.zeros(2, 7, 8)), r"`u` must have shape .* got \[2, 7, 8\]"),
    "no positions": (change(u=torch.zeros(2, 0, 2, 4)), r"no size 0, got \[2, 0, 2, 4\]"),
    "integer u": (change(u=torch.zeros(2, 7, 2, 4, dtype=torch.long)), r"`u` must be a floating-point .* torch.int64"),
    "positions too few": (change(positions=torch.zeros(6, 2)), r"`positions` \[6, 2\] must be \[7, 2\]"),
    "positions of another dimension": (change(positions=torch.zeros(7, 3)), r"`positions` \[7, 3\] must be \[7, 2\]"),
    "positions of another batch": (change(positions=torch.zeros(3, 7, 2)), r"or \[2, 7, 2\]"),
    "infinite position": (change(positions=torch.full((7, 2), torch.inf)), "`positions` holds values .* not finite"),
    "NaN position": (change(positions=torch.full((7, 2), torch.nan)), "`positions` holds values .* not finite"),
    "measure of another length": (change(measure=torch.ones(2, 6)), r"`measure` \[2, 6\] must be \[2, 7\]"),
    "measure of another batch": (change(measure=torch.ones(1, 7)), r"`measure` \[1, 7\] must be \[2, 7\]"),
    "negative measure": (change(measure=-torch.ones(2, 7)), "`measure` must not be negative"),
    "boolean measure": (change(measure=torch.ones(2, 7).bool()), "`measure` must be a floating-point"),
    "queries without positions": (change(queries=torch.zeros(2, 3, 2, 4)), "`queries` was given without"),
    "query positions alone": (change(query_positions=torch.zeros(3, 2)), "`query_positions` was given without"),
    "queries of other heads": (
        change(queries=torch.zeros(2, 3, 1, 4), query_positions=torch.zeros(3, 2)),
        r"`queries` \[2, 3, 1, 4\] must agree with `u` \[2, 7, 2, 4\]",
    ),
    "causal with more queries than keys": (
        change(queries=torch.zeros(2, 9, 2, 4), query_positions=torch.zeros(9, 2), is_causal=True),
        "`u` has 7 positions, `queries` 9",
    ),
    "unknown input": (change_weights(inputs=("x", "time")), r"unknown groups \['time'\]; known are"),
    "w1 of another width": (change_weights(w1=torch.zeros(6, 9)), r"`weights.w1` \[6, 9\] must be \[6, 31\]"),
    "w2 of other heads": (change_weights(w2=torch.zeros(3, 16, 6)), r"`weights.w2` \[3, 16, 6\] must be \[2, 16, 6\]"),
    "half a third layer": (change_weights(w_mid=torch.zeros(6, 6)), "go together"),
}


@pytest.mark.parametrize(("spoil", "message"), CASES.values(), ids=CASES)
def test_bad_argument(problem, spoil, message):
    problem_ = problem(n=7)
    spoil(problem_)
    with pytest.raises(ValueError, match=message):
        problem_.run("tiled")


def test_unknown_backend(problem):
    problem_ = problem()
    with pytest.raises(ValueError, match=r"`backend` \('cuda'\) must be one of .*'tiled'"):
        problem_.run("cuda")


def test_auto_is_tiled_on_cpu(problem):
    problem_ = problem()
    assert resolve_backend("auto", problem_.u, problem_.weights) == "tiled"
    assert torch.equal(problem_.run("auto"), problem_.run("tiled"))


def test_triton_on_a_cpu_tensor_says_why_not(problem):
    problem_ = problem()
    with pytest.raises(ValueError, match=r'`backend` .*"triton"'):
        integral_transform(problem_.u, problem_.positions, problem_.weights, backend="triton")
