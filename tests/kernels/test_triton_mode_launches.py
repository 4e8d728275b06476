"""How many launches the sums of the other modes take on a GPU, counted on tensors without data."""

import contextlib
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="the triton package is not installed")

from itnet_kernels import Factor, LowRankState, low_rank_matrix_transform, low_rank_transform
from itnet_kernels.low_rank.triton import launch, step
from itnet_kernels.sampled.list_sum import ListInputs
from itnet_kernels.sampled.triton import lists

KERNELS = {
    lists: ("list_fwd_kernel", "list_bwd_kernel", "list_bias_kernel", "pair_sum_kernel", "content_sum_kernel"),
    launch: ("feature_sum_kernel", "feature_apply_kernel", "scan_kernel", "project_kernel", "expand_kernel",
             "within_fwd_kernel", "within_bwd_kernel"),
    step: ("step_kernel",),
}  # fmt: skip


class Launches(TorchDispatchMode):
    """Counts the operators that run, but for views, allocations and our own, whose parts count."""

    counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name()
        if not (function.is_view or "empty" in name or "_unsafe_view" in name or name.startswith("itnet")):
            self.counts.update([name])
        return function(*args, **(kwargs or {}))


@pytest.fixture
def count(monkeypatch):
    """(function) -> how often it launches something on a Hopper GPU."""
    mode = Launches()

    class Kernel:
        def __class_getitem__(cls, grid):
            return lambda *given, **settings: mode.counts.update(["kernel"])

    for module, names in KERNELS.items():
        for name in names:
            monkeypatch.setattr(module, name, Kernel)
    for module in (lists, launch):
        monkeypatch.setattr(module, "on_device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(lists, "device_major", lambda device: 9)
    for module in ("low_rank.vector", "low_rank.matrix"):
        monkeypatch.setattr(f"itnet_kernels.{module}.resolve_backend", lambda backend, u: "triton")

    def counter(function) -> int:
        mode.counts = Counter()
        with mode:
            function()
        return mode.counts.total()

    return counter


def empty(*shape: int, dtype=torch.bfloat16):
    return torch.empty(shape, device="meta", dtype=dtype)


def list_inputs(batch: int, n: int, length: int, lists_: int, heads: int = 12) -> ListInputs:
    """A layer of the paper's B model: a list for each of ``lists_`` sets of samples."""
    float32 = {"dtype": torch.float32}
    weights = {name: empty(128, size, **float32) for name, size in (("w_y", 128), ("w_relative", 128), ("w_key", 64))}
    return ListInputs(
        **dict.fromkeys(("queries", "keys"), empty(batch, n, heads, 64)), row=empty(batch, n, heads, 128, **float32),
        coefficients=empty(batch, n, length, **float32),
        **dict.fromkeys(("query_positions", "key_positions"), empty(1, n, 2, **float32)),
        **dict.fromkeys(("query_features", "key_features"), empty(1, n, 128, **float32)),
        **weights, w_distance=empty(128, 1, **float32), w_product=empty(128, 64, **float32),
        w2=empty(heads, 128 * 64, 64, **float32), b2=empty(heads, 64, 64, **float32),
        indices=empty(lists_, n, length, dtype=torch.int64), has_frequencies=True, operand_dtype=torch.bfloat16,
    )  # fmt: skip


TRAINED = ["queries", "keys", "row", "w_y", "w_relative", "w_distance", "w_key", "w_product", "w2", "b2"]


@pytest.mark.parametrize(
    ("shape", "most"),
    [((16, 1024, 128, 16), (190, 3700)), ((16, 1024, 64, 1), (140, 1600)), ((32, 128, 64, 32), (60, 720))],
    ids=["monte-carlo", "window", "padded-text"],
)
def test_lists(count, shape, most):
    """PyTorch takes about 27,000 for Monte Carlo with 16 samples of 1024 positions: 35 for each of 21 queries."""
    inputs = list_inputs(*shape)
    forward = count(lambda: lists.TritonLists(inputs).forward())
    backward = count(lambda: lists.TritonLists(inputs).backward(inputs.queries.float(), TRAINED))
    assert forward <= most[0] and backward <= most[1]


def low_rank_calls(n: int, batch: int = 2, heads: int = 2, rank: int = 3, width: int = 4):
    """Small: the number of launches does not depend on sizes."""
    u, hidden = torch.zeros(batch, n, heads, 16), torch.zeros(batch, n, heads, width)
    factor = Factor(hidden, torch.zeros(heads, rank, 16, width), torch.zeros(heads, rank, 16))
    g, matrices, bias = u[..., :rank], torch.zeros(heads, rank, 16, 16), torch.zeros(heads, 16, 16)
    given = {"measure": torch.ones(batch, n), "bias": bias, "backend": "triton"}
    return {
        "vector": lambda **more: low_rank_transform(u, factor, factor, **given, **more),
        "matrix": lambda **more: low_rank_matrix_transform(u, g, g, matrices, **given, **more),
    }


@pytest.mark.parametrize(
    ("form", "is_causal", "most"),
    [("vector", False, 40), ("vector", True, 40), ("matrix", False, 40), ("matrix", True, 60)],
)
def test_low_rank(count, form, is_causal, most):
    found = count(lambda: low_rank_calls(96)[form](is_causal=is_causal))
    assert found <= most


@pytest.mark.parametrize("form", ["vector", "matrix"])
def test_a_token_is_one_kernel(count, form):
    """Beside casts of its state and output."""
    moments = (2, 2, 3) if form == "vector" else (2, 2, 3, 16)
    state = LowRankState(torch.zeros(moments), torch.zeros(2, 2, 16), torch.ones(2))
    calls = low_rank_calls(1)
    with torch.no_grad():
        assert count(lambda: calls[form](is_causal=True, state=state)) <= 8
