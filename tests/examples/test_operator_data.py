"""Operator learning: positions are those that the data were sampled at, and GNO's neighbours are summed right."""

from pathlib import Path

import pytest
import torch

DATA = Path(__file__).parent / "darcy"


@pytest.fixture(scope="module")
def script(load_script):
    return load_script("run_operator_learning")


def shared_nodes(script, fine: int, coarse: int) -> torch.Tensor:
    """Indices of the coarse grid's nodes in the fine grid [coarse^2]."""
    distances = torch.cdist(script.grid(coarse, 2), script.grid(fine, 2))
    assert distances.min(1).values.max() == 0, "the coarse grid is not a part of the fine one"
    return distances.argmin(1)


def test_nodes(script):
    torch.testing.assert_close(script.grid(4, 1), torch.tensor([[0.0], [0.25], [0.5], [0.75]]))
    assert shared_nodes(script, 4, 2).tolist() == [0, 2, 8, 10]


def test_solutions_agree_where_grids_meet(script):
    coarse, fine = (script.read(DATA / f"darcy_test_{side}.npz", "darcy", None) for side in (16, 32))
    nodes = shared_nodes(script, 32, 16)
    for few, many in zip(coarse, fine, strict=True):
        torch.testing.assert_close(many["labels"][nodes], few["labels"])


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_neighbour_sums_are_those_of_the_library(load_script, reduction, batch):
    pytest.importorskip("neuralop", reason="the peers of operator learning are not installed")
    from neuralop.layers.segment_csr import segment_csr as loop

    ours = load_script("common.peers.neural_operators").segment_csr
    torch.manual_seed(0)
    src = torch.randn(*batch, 9, 4, requires_grad=True)
    indptr = torch.tensor([0, 2, 2, 5, 9]).expand(*batch, -1)  # the second point has no neighbours
    results = [reduce(src, indptr, reduction, use_scatter=False) for reduce in (ours, loop)]
    torch.testing.assert_close(*results)
    probe = torch.randn_like(results[0])
    torch.testing.assert_close(*[torch.autograd.grad(out, src, probe)[0] for out in results])
