"""How many launches a layer's sum over pairs takes on a GPU: PyTorch's operators on tensors without data, and ours."""

import contextlib
from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="the triton package is not installed")

from itnet_kernels.exact.pair_inputs import PairInputs
from itnet_kernels.exact.triton import bias, chunked_backward, pairs, weight_sums

NO_LAUNCH = {"empty", "empty_like", "new_empty", "_unsafe_view"}


class Launches(TorchDispatchMode):
    """Counts the operators that run, but for views and allocations, by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if not function.is_view and name not in NO_LAUNCH:
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture
def launches(monkeypatch):
    """(whether positions are per sample, sizes) -> the launches of forward and backward on a Hopper GPU."""
    mode = Launches()

    def kernel(name: str):
        class Kernel:
            def __class_getitem__(cls, grid):
                def launch(**arguments):
                    mode.counts.update([name])
                    if name == "position weights":  # 8 of 128 hidden units each
                        tiles, groups, _ = grid({"BP": 16, "ROWS": 128})
                        assert len(arguments["p_dfeatures"]) == len(arguments["p_ddistance"]) >= tiles // 16 * groups

                return launch

        return Kernel

    def product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:  # one operator on a GPU
        mode.counts.update(["float32_product"])
        return left.new_empty(*left.shape[:2], right.shape[2], dtype=torch.float32) if out is None else out

    monkeypatch.setattr(bias, "itnet_bias_kernel", kernel("bias"))
    monkeypatch.setattr(pairs, "itnet_fwd_kernel", kernel("forward"))
    monkeypatch.setattr(pairs, "itnet_fused_bwd_kernel", kernel("backward"))
    monkeypatch.setattr(pairs, "itnet_position_gradient_kernel", kernel("position gradient"))
    monkeypatch.setattr(weight_sums, "itnet_position_weights_kernel", kernel("position weights"))
    monkeypatch.setattr(chunked_backward, "itnet_bwd_kernel", kernel("backward"))
    monkeypatch.setattr(chunked_backward, "device_major", lambda device: 8)
    for module in (pairs, chunked_backward):
        monkeypatch.setattr(module, "float32_product", product)
        monkeypatch.setattr(module, "on_device", lambda device: contextlib.nullcontext())

    def run(
        per_sample: bool,
        n: int = 128,
        batch: int = 32,
        heads: int = 6,
        is_causal: bool = False,
        evaluator: type = pairs.TritonPairs,
    ) -> list[Counter]:
        sizes = {
            "queries": (batch, n, heads, 64),
            "keys": (batch, n, heads, 64),
            "row": (batch, n, heads, 128),
            "measure": (batch, n),
            **dict.fromkeys(("query_positions", "key_positions"), (batch if per_sample else 1, n, 1)),
            **dict.fromkeys(("query_features", "key_features"), (batch if per_sample else 1, n, 128)),
            **dict.fromkeys(("w_y", "w_relative"), (128, 128)),
            "w_distance": (128, 1),
            **dict.fromkeys(("w_key", "w_product"), (128, 64)),
            "w2": (heads, 128 * 64, 64),
            "frequencies": (64, 1),
        }
        tensors = dict.fromkeys(PairInputs._fields) | {
            name: torch.empty(shape, device="meta") for name, shape in sizes.items()
        }
        inputs = PairInputs(**tensors | {"is_causal": is_causal, "operand_dtype": torch.bfloat16, "backend": "triton"})
        # A model trains its features and weights.
        names = ["queries", "keys", "row", *(name for name in sizes if name.startswith("w"))]
        passes = []
        for evaluate in (lambda: pairs.TritonPairs(inputs).forward(),
                         lambda: evaluator(inputs).backward(inputs.queries, names)):  # fmt: skip
            mode.counts = Counter()
            with mode:
                evaluate()
            passes.append(mode.counts)
        return passes

    return run


# What a layer took before positions had a sample stride and before the backward was fused: forward and backward.
BEFORE = {"n128": 2800, "n512": 5300, "n1024": 11000}
LAYERS = {
    "n128": {"per_sample": True, "n": 128, "batch": 32, "heads": 12},
    "n512": {"per_sample": False, "n": 512, "batch": 32, "heads": 12},
    "n1024": {"per_sample": False, "n": 1024, "batch": 16, "heads": 12},
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_a_few_hundred_launches(launches, name):
    """At least five times fewer than before, on Hopper (docs/kernels.md has the numbers)."""
    totals = [counts.total() for counts in launches(**LAYERS[name])]
    assert 5 * sum(totals) <= BEFORE[name], totals


def test_padded_text_is_not_computed_sample_by_sample(launches):
    """The moments come in chunks of several samples, as they do for shared positions, but for a rest of each bias."""
    padded, shared = launches(True), launches(False)
    assert padded[0]["forward"] <= shared[0]["forward"] + padded[0]["bias"]
    assert padded[1]["backward"] == padded[1]["bias"] == padded[1]["position weights"]


@pytest.mark.parametrize("per_sample", [False, True], ids=["shared", "per-sample"])
@pytest.mark.parametrize("n", [392, 584, 1000])
def test_every_program_has_a_place_to_add_to(launches, n, per_sample):
    """The last chunk has fewer queries than the first, and so more groups of samples, or more samples."""
    assert launches(per_sample, n=n, batch=64)[1]["position weights"] > 1


@pytest.mark.parametrize(("heads", "most"), [(6, 430), (12, 640)])
def test_the_backward_that_is_not_fused(launches, heads, most):
    """n = 128, B = 32; by a loop over samples it was 2345 launches."""
    assert launches(True, heads=heads, evaluator=chunked_backward.ChunkedBackward)[1].total() <= most


def test_a_chunk_holds_any_number_of_samples(launches):
    """Graphs of 16 nodes: twice as many of them are the same launches, as long as their workspaces fit."""
    assert launches(True, n=16, batch=8) == launches(True, n=16, batch=16)
