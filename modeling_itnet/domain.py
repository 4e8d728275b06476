# SPDX-License-Identifier: Apache-2.0
"""What every encoder returns and every layer takes: a signal on its domain."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from configuration_itnet import ITNetConfig
from itnet_kernels import Coordinates

from .integration.anchors import Anchors, find_anchors
from .integration.choice import integration_plan, requested_mode
from .integration.documents import Documents, take_rows
from .integration.near import Near, find_near


class Domain:
    """Where a signal lives: positions with a measure, and whatever follows from these alone.

    All layers of a forward share one domain. What they need of it is computed on first use and kept: gamma(x), the
    lattice of the positions, the weights of the edges, neighbourhoods, anchors, the way in which each sample is
    integrated. So a domain belongs to one forward. The measure of a sample sums to 1 over its real positions and is 0
    on padding, so that neither padding nor the other samples of a batch change anything.

    Args:
        positions: x ``[n, s]``, shared by the batch, or ``[B, n, s]``, in float32; or their :class:`Coordinates`.
        measure: omega ``[B, n]``; float32.
        frequencies: B ``[L, s]`` of gamma; goes with positions that are a tensor.
        neighbors: ``[B, n, m]``, the indices of the positions joined to each one by an edge, -1 for none.
        edge_gate: lambda, a scalar that goes with ``neighbors``: the kernel is multiplied by 1[edge] + lambda.
        is_padded: False promises that every measure is positive; the number of real positions is then known without
            a look at values, as a compiled graph needs it.
        layout: the grids that the positions form, one after the other, by their shapes; ``()`` is a position outside
            of grids, such as [CLS]. None: they form no grids.
        past: the domain of the keys that a cache holds and that come before these: the queries of a causal operator
            are at the positions of this domain, its keys at those of both.
        documents: the parts of the rows that do not see each other, if there are several in a row.
    """

    # Of a part of the batch (:meth:`resolve`):
    mode: str | None = None  # "exact", "near_far", "low_rank" or "monte_carlo"
    samples: Tensor | None = None  # the numbers [b] of its samples; None for all of them
    anchors: Anchors | None = None  # the only keys, if it is integrated over anchors
    rows: Tensor | None = None  # where its documents are in the rows of the batch, [D, L]: see Documents

    def __init__(
        self,
        positions: Tensor | Coordinates,
        measure: Tensor,
        frequencies: Tensor | None = None,
        *,
        neighbors: Tensor | None = None,
        edge_gate: Tensor | None = None,
        is_padded: bool = True,
        layout: tuple[tuple[int, ...], ...] | None = None,
        past: "Domain | None" = None,
        documents: Documents | None = None,
    ):
        is_prepared = isinstance(positions, Coordinates)
        self.coordinates = positions if is_prepared else Coordinates(positions, frequencies)
        self.measure, self.is_padded = measure, is_padded
        self.neighbors, self.edge_gate, self.layout = neighbors, edge_gate, layout
        self.past, self.documents = past, documents
        self._near: dict[tuple, Near] = {}
        self._edges: tuple[Tensor, Tensor] | None = None
        self._keys: Domain | None = None
        self._spans: dict[tuple[int, int], Domain] = {}
        self._parts: dict[tuple, list[Domain]] = {}
        self._moved: dict[torch.device, Domain] = {}

    @property
    def positions(self) -> Tensor:
        return self.coordinates.positions

    @property
    def frequencies(self) -> Tensor:
        return self.coordinates.frequencies

    def gamma(self, dtype: torch.dtype) -> Tensor:
        """Returns gamma(x), [B or 1, n, F]: computed in float64 where the device has it, then rounded to ``dtype``."""
        return self.coordinates.features_in(dtype)

    @property
    def keys(self) -> "Domain":
        """The domain of all keys: those that a cache holds, and then these."""
        if self.past is None:
            return self
        if self._keys is None:
            measure = torch.cat([self.past.measure, self.measure], dim=1)
            batch = measure.shape[0]  # not its len: that would be a constant of a traced graph
            places = [part.positions.expand(batch, *part.positions.shape[-2:]) for part in (self.past, self)]
            self._keys = Domain(torch.cat(places, dim=1), measure, self.frequencies, layout=((measure.shape[1],),))
        return self._keys

    def span(self, start: int, stop: int) -> "Domain":
        """Returns the domain of some neighbouring positions of all samples."""
        if (start, stop) not in self._spans:
            positions, measure = self.positions[..., start:stop, :], self.measure[:, start:stop]
            self._spans[start, stop] = Domain(positions, measure, self.frequencies)
        return self._spans[start, stop]

    @property
    def edges(self) -> tuple[Tensor, Tensor]:
        """The other ends of the edges of each position, and their measure, 0 where there is none: [B, n, m] each."""
        if self._edges is None or self.measure.requires_grad:  # a checkpoint that runs again must find the same graph
            ends = self.neighbors.clamp(min=0)
            omega = self.measure.gather(1, ends.flatten(1)).view(ends.shape)
            self._edges = ends, omega * (self.neighbors >= 0)
        return self._edges

    def near(self, config: ITNetConfig) -> Near:
        """Returns the neighbourhood of every position."""
        if _near_key(config) not in self._near or self.measure.requires_grad:
            self.set_near(config, find_near(config, self))
        return self._near[_near_key(config)]

    def set_near(self, config: ITNetConfig, near: Near) -> None:
        """Says what :meth:`near` is, to this domain and to what it resolves to."""
        self._near[_near_key(config)] = near

    def resolve(
        self, config: ITNetConfig, training: bool, find: Callable[..., Anchors] = find_anchors
    ) -> list["Domain"]:
        """Returns a domain for each way in which samples are integrated, with its ``mode`` and its ``samples``.

        Parts that are integrated over anchors have these too; ``find`` finds them. As many anchors as there are
        positions, padding included, are exact.
        """
        key = requested_mode(config), training, config.num_samples, config.is_causal
        if key not in self._parts:
            self._parts[key] = parts = []
            for mode, samples in integration_plan(config, self.measure, self.is_padded):
                for part in [self.select(samples)] if self.documents is None else self._documents():
                    part.mode, part.samples = mode, samples
                    keys = part.keys
                    if mode == "monte_carlo" and not training and config.num_samples < keys.measure.shape[1]:
                        part.anchors = find(keys.coordinates, keys.measure, config.num_samples, config.is_causal)
                    parts.append(part)
        return self._parts[key]

    def _documents(self) -> Iterator["Domain"]:
        """Yields domains of documents in place of the rows that they stand in."""
        batch = self.measure.shape[0]
        for rows in self.documents.rows:
            positions, measure = (
                take_rows(tensor, rows)
                for tensor in (self.positions.expand(batch, -1, -1), self.measure.unsqueeze(-1))
            )
            part = Domain(positions, measure[..., 0] * (rows >= 0), self.frequencies, layout=((rows.shape[1],),))
            part.rows = rows
            yield part

    def select(self, samples: Tensor | None) -> "Domain":
        """Returns the domain of some samples of the batch, by their numbers [b]; None for all of them."""
        if samples is None:
            same = self.replaced()
            same._near = self._near
            return same
        neighbors = None if self.neighbors is None else self.neighbors.index_select(0, samples)
        coordinates, measure = self.coordinates.select(samples), self.measure.index_select(0, samples)
        return self.replaced(coordinates=coordinates, measure=measure, neighbors=neighbors)

    def of(self, tensor: Tensor) -> Tensor:
        """Returns what belongs to this part of a tensor [B, n, d]: rows of it, or documents in these."""
        if self.rows is not None:
            return take_rows(tensor, self.rows)
        return tensor if self.samples is None else tensor.index_select(0, self.samples)

    def replaced(self, **parts: Tensor | Coordinates | None) -> "Domain":
        """Returns the same domain with other parts in some places. Nothing is kept but what the coordinates keep."""
        given = {name: parts.get(name, getattr(self, name)) for name in _PARTS}
        given |= {"is_padded": self.is_padded, "layout": self.layout, "documents": self.documents}
        return Domain(given.pop("coordinates"), **given, past=self.past)

    def to(self, device, non_blocking: bool = False) -> "Domain":
        """Returns the domain on another device, for models whose layers are on several."""
        device = torch.device(device)
        if device == self.positions.device:
            return self
        if device not in self._moved:
            tensors = [self.positions, self.frequencies, *(getattr(self, name) for name in _PARTS[1:])]
            moved = [None if t is None else t.to(device, non_blocking=non_blocking) for t in tensors]
            parts = dict(zip(_PARTS, [Coordinates(*moved[:2]), *moved[2:]], strict=True))
            self._moved[device] = self.replaced(**parts)
            self._moved[device].past = None if self.past is None else self.past.to(device, non_blocking)
        return self._moved[device]

    @property
    def differentiable(self) -> dict[str, Tensor]:
        """The tensors of the domain that require a gradient."""
        tensors = {name: getattr(self, name) for name in ("positions", "measure", "edge_gate")}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None and tensor.requires_grad}


def _near_key(config: ITNetConfig) -> tuple:
    """Returns what neighbourhoods depend on beside the domain."""
    return config.near_size, config.near_radius, config.is_causal


def merge(parts: list[Domain], tensors: list[Tensor], shape: torch.Size) -> Tensor:
    """Returns the tensors of all parts of a batch as one of the given shape [B, n, d], in the order of the batch."""
    if parts[0].rows is not None:
        rows = torch.cat([part.rows.flatten() for part in parts])
        slots = rows.argsort()[(rows < 0).sum() :]  # of every position in the documents, which lie one after the other
        return torch.cat([tensor.flatten(0, 1) for tensor in tensors]).index_select(0, slots).view(shape)
    if len(tensors) == 1:
        return tensors[0]
    order = torch.cat([part.samples for part in parts])
    return torch.cat(tensors).index_select(0, order.argsort())


_PARTS = ("coordinates", "measure", "neighbors", "edge_gate")


class Signal(NamedTuple):
    """A function u on a domain: what every encoder returns and the layers integrate."""

    features: Tensor  # u [B, n, d]
    domain: Domain

    @property
    def positions(self) -> Tensor:
        return self.domain.positions

    @property
    def measure(self) -> Tensor:
        return self.domain.measure
