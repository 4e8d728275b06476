"""The table of `itnet verify`."""

import dataclasses
import logging

import pytest
import torch
from transformers.utils import logging as transformers_logging

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
    records, before = [], transformers_logging.get_verbosity()
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", records.append)
    transformers_logging.warning_once.cache_clear()
    transformers_logging.add_handler(handler)
    try:
        theorem_table(0)
    finally:
        transformers_logging.remove_handler(handler)
    assert [record.getMessage() for record in records] == []
    assert transformers_logging.get_verbosity() == before


def test_a_row_can_fail():
    row = TheoremRow("x", "y", 1e-3, 1e-10)
    assert not row.holds
    assert dataclasses.replace(row, error=1e-11).holds
