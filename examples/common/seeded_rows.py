"""Training batches whose randomness depends on nothing but the seed and the rows: a resumed run augments as before.

The global random state does not serve: data loaders read one batch ahead, so that a checkpoint holds the state after
the augmentation of a batch that it has not trained on yet.
"""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset


class NumberedRows(Dataset):
    """(number, row) for each row of a dataset."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> tuple[int, Any]:
        return number, self.rows[number]

    def __getitems__(self, numbers: list[int]) -> list[tuple[int, Any]]:
        read = getattr(self.rows, "__getitems__", None)  # reads a batch at once
        return list(zip(numbers, read(numbers) if read else [self.rows[n] for n in numbers], strict=True))


class NumberedStream(IterableDataset):
    """(number, row) for each row of a stream."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return iter(enumerate(self.rows))


def numbered(rows) -> Dataset:
    return NumberedStream(rows) if isinstance(rows, IterableDataset) else NumberedRows(rows)


class SeededCollator:
    """Collates numbered rows; torch's random numbers inside follow from ``seed`` and the numbers of the rows."""

    def __init__(self, collate: Callable, seed: int):
        self.collate, self.seed = collate, seed

    def __call__(self, batch: list[tuple[int, Any]]) -> dict[str, torch.Tensor]:
        numbers, rows = zip(*batch, strict=True)
        digest = hashlib.sha256(repr((self.seed, *map(int, numbers))).encode()).digest()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            return self.collate(list(rows))
