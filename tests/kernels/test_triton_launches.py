"""How many launches a layer's sum over pairs takes on a GPU: PyTorch's operators on tensors without data, and ours."""

import contextlib
from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="the triton package is not installed")

from itnet_kernels.exact.pair_inputs import PairInputs
from itnet_kernels.exact.triton import pairs

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
                return lambda **arguments: mode.counts.update([name])

        return Kernel

    def product(left: Tensor, right: Tensor) -> Tensor:  # one operator on a GPU
        mode.counts.update(["float32_product"])
        return left.new_empty(*left.shape[:2], right.shape[2], dtype=torch.float32)

    monkeypatch.setattr(pairs, "itnet_fwd_kernel", kernel("forward"))
    monkeypatch.setattr(pairs, "itnet_bwd_kernel", kernel("backward"))
    monkeypatch.setattr(pairs, "float32_product", product)
    monkeypatch.setattr(pairs, "device_major", lambda device: 9)
    monkeypatch.setattr(pairs, "on_device", lambda device: contextlib.nullcontext())

    def run(per_sample: bool, n: int = 128, batch: int = 32, heads: int = 6, is_causal: bool = False) -> list[Counter]:
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
                         lambda: pairs.TritonPairs(inputs).backward(inputs.queries, names)):  # fmt: skip
            mode.counts = Counter()
            with mode:
                evaluate()
            passes.append(mode.counts)
        return passes

    return run


@pytest.mark.parametrize(("heads", "most"), [(6, (100, 390)), (12, (106, 600))])
def test_padded_text_is_not_computed_sample_by_sample(launches, heads, most):
    """n = 128, B = 32; by a loop over samples it was 777 launches forward and 2345 backward (docs/kernels.md)."""
    padded, shared = launches(True, heads=heads), launches(False, heads=heads)
    totals = [counts.total() for counts in padded]
    assert all(total <= bound for total, bound in zip(totals, most, strict=True)), totals
    # The moments come in chunks of several samples, as they do for shared positions, but for a rest.
    assert padded[0]["forward"] <= shared[0]["forward"] + 1
    assert padded[1]["backward"] == shared[1]["backward"]


def test_a_chunk_holds_any_number_of_samples(launches):
    """Graphs of 16 nodes: twice as many of them are the same launches, as long as their workspaces fit."""
    assert launches(True, n=16, batch=8) == launches(True, n=16, batch=16)
