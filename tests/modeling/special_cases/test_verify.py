"""The table of `itnet verify`, and the witnesses in it."""

import dataclasses
import logging

import pytest
import torch
from transformers.utils import logging as transformers_logging

from modeling_itnet.special_cases import witnesses
from modeling_itnet.special_cases.verify import TheoremRow, theorem_table


@pytest.mark.parametrize("seed", [0, 1])
def test_all_rows_hold(seed):
    rows = theorem_table(seed=seed)
    assert [row for row in rows if not row.holds] == []
    names = " ".join(row.name for row in rows)
    assert all(f"Theorem {k}" in names for k in (1, 2, 3))


def test_the_table_is_reproducible_and_leaves_no_trace():
    torch.set_default_dtype(torch.float32)
    state = torch.get_rng_state()
    first, second = theorem_table(3), theorem_table(3)
    assert first == second
    assert torch.get_default_dtype() == torch.float32
    assert torch.equal(torch.get_rng_state(), state)


def test_it_is_quiet(monkeypatch):
    """Transformers warns, once per process, that a Mamba without its CUDA packages is slow."""
    records = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", records.append)
    transformers_logging.warning_once.cache_clear()
    transformers_logging.add_handler(handler)
    try:
        theorem_table(0)
    finally:
        transformers_logging.remove_handler(handler)
    assert [record.getMessage() for record in records] == []


def test_a_row_can_fail():
    row = TheoremRow("x", "y", 1e-3, 1e-10)
    assert not row.holds
    assert dataclasses.replace(row, relation=">").holds


def test_two_symmetric_points_do_not_show_that_t_pos_has_positions():
    """The paper's example for T_pos: swapping two points swaps the outputs, as a permutation-equivariant map does."""
    distance = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    u = torch.eye(2)
    swap = [1, 0]
    torch.testing.assert_close(distance @ u[swap] / 2, (distance @ u / 2)[swap])
    assert witnesses.position_weighted().gap > 0.1


def test_a_recurrence_of_one_state_has_outputs_in_no_one_dimensional_space():
    """What the paper's argument for H_n says; the Hankel block is what has rank n."""
    time = torch.arange(16)
    matrix = (0.9 ** (time[:, None] - time).clamp(min=0)).tril()  # h_t = 0.9 h_(t-1) + u_t
    assert torch.linalg.matrix_rank(matrix) == 16
    assert torch.linalg.matrix_rank(matrix[8:, :8]) == 1
