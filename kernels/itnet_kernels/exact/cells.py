"""Which queries meet which keys: all of them, or those that share a block."""

from typing import NamedTuple

import torch
from torch import Tensor

from .pair_inputs import POSITIONS, PairInputs


class Place(NamedTuple):
    """A part of the cells: some blocks of some samples, and some of the queries in each."""

    samples: slice
    blocks: slice
    rows: slice

    @property
    def num_blocks(self) -> int:
        return self.blocks.stop - self.blocks.start

    @property
    def num_cells(self) -> int:
        return (self.samples.stop - self.samples.start) * self.num_blocks

    @property
    def num_queries(self) -> int:
        """How many queries each of the cells has."""
        return self.rows.stop - self.rows.start


class Cells:
    """Pairs as a grid of cells, [samples, blocks]: in a cell, every query meets every key.

    The sum over all pairs has one block per sample, which is the sample itself; otherwise the blocks list their
    queries and keys by index. What is taken for the cells of a place is [..., cells, t, f] for queries and
    [..., cells, m, f] for keys; ``side`` says which of the two.
    """

    def __init__(self, inputs: PairInputs, number: int | None = None):
        """Holds the cells of the blocks ``inputs.block_...[number]``, or of all pairs."""
        self.batch, self.num_queries = inputs.queries.shape[:2]
        self.num_keys, self.num_blocks = inputs.keys.shape[1], 1
        self.lists = self.pairs = None
        parts = [getattr(inputs, name) for name in POSITIONS]
        if number is not None:
            counts = {"queries": self.num_queries, "keys": self.num_keys}
            lists = {"queries": inputs.block_queries[number], "keys": inputs.block_keys[number]}
            self.pairs = inputs.block_pairs[number]  # [B or 1, blocks, t, m]
            parts += [*lists.values(), self.pairs]
            self.lists = {side: part.expand(self.batch, -1, -1) for side, part in lists.items()}  # [B, blocks, t or m]
            samples = torch.arange(self.batch, device=inputs.queries.device)[:, None, None]
            self.flat = {side: self.lists[side] + samples * count for side, count in counts.items()}
            self.num_blocks, self.num_queries, self.num_keys = self.pairs.shape[1:]
        # Whether all samples have the same positions, and the same pairs of them.
        self.is_shared = all(len(part) == 1 for part in parts)

    @classmethod
    def all(cls, inputs: PairInputs) -> list["Cells"]:
        """Returns what a sum goes over."""
        return [cls(inputs, number) for number in range(len(inputs.block_pairs))] or [cls(inputs)]

    def take(self, tensor: Tensor, side: str, heads: slice, place: Place) -> Tensor:
        """Returns the rows of a tensor [H, B, n, f] that belong to a place: [h, cells, t or m, f]."""
        rows = place.rows if side == "queries" else slice(None)
        if self.lists is None:
            return tensor[heads, place.samples, rows]
        indices = self.flat[side][place.samples, place.blocks, rows]
        taken = tensor[heads].flatten(1, 2).index_select(1, indices.flatten())
        return taken.view(len(taken), -1, indices.shape[2], tensor.shape[3])

    def add(self, total: Tensor, side: str, heads: slice, place: Place, values: Tensor) -> None:
        """Adds values [h, cells, t or m, f] to the rows of ``total`` that :meth:`take` takes."""
        rows = place.rows if side == "queries" else slice(None)
        if self.lists is None:
            total[heads, place.samples, rows] += values
        else:
            indices = self.flat[side][place.samples, place.blocks, rows]
            total[heads].flatten(1, 2).index_add_(1, indices.flatten(), values.flatten(1, 2))

    def take_positions(self, tensor: Tensor, side: str, place: Place) -> Tensor:
        """Does the same for a tensor [B or 1, n, f] without heads: [cells, t or m, f], those of one sample if all
        samples have the same."""
        indices = self._position_indices(tensor, side, place)
        if indices is None:
            return tensor[_of_samples(tensor, place), place.rows if side == "queries" else slice(None)]
        taken = tensor.flatten(0, 1).index_select(0, indices.flatten())
        return taken.view(-1, indices.shape[2], tensor.shape[2])

    def add_positions(self, total: Tensor, side: str, place: Place, values: Tensor) -> None:
        """Adds values [cells, t or m, f] to the rows of ``total`` that :meth:`take_positions` takes."""
        indices = self._position_indices(total, side, place)
        if indices is None:
            values = values if len(total) == self.batch else values.sum(0, keepdim=True)
            total[_of_samples(total, place), place.rows if side == "queries" else slice(None)] += values
        else:
            total.flatten(0, 1).index_add_(0, indices.flatten(), values.flatten(0, 1))

    def _position_indices(self, tensor: Tensor, side: str, place: Place) -> Tensor | None:
        if self.lists is None:
            return None
        rows = place.rows if side == "queries" else slice(None)
        lists = self.lists[side] if len(tensor) == 1 else self.flat[side]
        return lists[slice(0, 1) if self.is_shared else place.samples, place.blocks, rows]


def _of_samples(tensor: Tensor, place: Place) -> slice:
    return slice(0, 1) if len(tensor) == 1 else place.samples
