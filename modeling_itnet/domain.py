# SPDX-License-Identifier: Apache-2.0
"""What every encoder returns and every layer takes: a signal on its domain."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from configuration_itnet import ITNetConfig
from itnet_kernels import Coordinates

from .integration.anchors import Anchors, find_anchors
from .integration.choice import integration_plan, requested_mode
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
    """

    # Of a part of the batch (:meth:`resolve`):
    mode: str | None = None  # "exact", "near_far", "low_rank" or "monte_carlo"
    samples: Tensor | None = None  # the numbers [b] of its samples; None for all of them
    anchors: Anchors | None = None  # the only keys, if it is integrated over anchors

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
    ):
        is_prepared = isinstance(positions, Coordinates)
        self.coordinates = positions if is_prepared else Coordinates(positions, frequencies)
        self.measure, self.is_padded = measure, is_padded
        self.neighbors, self.edge_gate, self.layout = neighbors, edge_gate, layout
        self._near: dict[tuple, Near] = {}
        self._edges: tuple[Tensor, Tensor] | None = None
        self._parts: dict[tuple, list[Domain]] = {}
        self._moved: dict[torch.device, Domain] = {}

    @property
    def positions(self) -> Tensor:
        return self.coordinates.positions

    @property
    def frequencies(self) -> Tensor:
        return self.coordinates.frequencies

    def gamma(self, dtype: torch.dtype) -> Tensor:
        """gamma(x), [B or 1, n, F]: computed in float64 where the device has it, then rounded to ``dtype``."""
        return self.coordinates.features_in(dtype)

    @property
    def edges(self) -> tuple[Tensor, Tensor]:
        """The other ends of the edges of each position, and their measure, 0 where there is none: [B, n, m] each."""
        if self._edges is None or self.measure.requires_grad:  # a checkpoint that runs again must find the same graph
            ends = self.neighbors.clamp(min=0)
            omega = self.measure.gather(1, ends.flatten(1)).view(ends.shape)
            self._edges = ends, omega * (self.neighbors >= 0)
        return self._edges

    def near(self, config: ITNetConfig) -> Near:
        """The neighbourhood of every position."""
        if _near_key(config) not in self._near or self.measure.requires_grad:
            self.set_near(config, find_near(config, self))
        return self._near[_near_key(config)]

    def set_near(self, config: ITNetConfig, near: Near) -> None:
        """Says what :meth:`near` is, to this domain and to what it resolves to."""
        self._near[_near_key(config)] = near

    def resolve(
        self, config: ITNetConfig, training: bool, find: Callable[..., Anchors] = find_anchors
    ) -> list["Domain"]:
        """The samples by the way in which they are integrated: one domain for each, with ``mode`` and ``samples``.

        Parts that are integrated over anchors have these too; ``find`` finds them. As many anchors as there are
        positions, padding included, are exact.
        """
        key = requested_mode(config), training, config.num_samples, config.is_causal
        if key not in self._parts:
            self._parts[key] = parts = []
            for mode, samples in integration_plan(config, self.measure, self.is_padded):
                part = self.select(samples)
                part.mode, part.samples = mode, samples
                if mode == "monte_carlo" and not training and config.num_samples < self.measure.shape[1]:
                    part.anchors = find(part.coordinates, part.measure, config.num_samples, config.is_causal)
                parts.append(part)
        return self._parts[key]

    def select(self, samples: Tensor | None) -> "Domain":
        """The domain of some samples of the batch, by their numbers [b]; None for all of them."""
        if samples is None:
            same = self.replaced()
            same._near = self._near
            return same
        neighbors = None if self.neighbors is None else self.neighbors.index_select(0, samples)
        coordinates, measure = self.coordinates.select(samples), self.measure.index_select(0, samples)
        return self.replaced(coordinates=coordinates, measure=measure, neighbors=neighbors)

    def of(self, tensor: Tensor) -> Tensor:
        """The rows of a tensor [B, ...] that belong to the samples of this part."""
        return tensor if self.samples is None else tensor.index_select(0, self.samples)

    def replaced(self, **parts: Tensor | Coordinates | None) -> "Domain":
        """The same domain with other parts in some places, and with nothing kept but what the coordinates keep."""
        given = {name: parts.get(name, getattr(self, name)) for name in _PARTS}
        return Domain(given.pop("coordinates"), **given, is_padded=self.is_padded, layout=self.layout)

    def to(self, device, non_blocking: bool = False) -> "Domain":
        """The domain on another device, for models whose layers are on several."""
        device = torch.device(device)
        if device == self.positions.device:
            return self
        if device not in self._moved:
            tensors = [self.positions, self.frequencies, *(getattr(self, name) for name in _PARTS[1:])]
            moved = [None if t is None else t.to(device, non_blocking=non_blocking) for t in tensors]
            parts = dict(zip(_PARTS, [Coordinates(*moved[:2]), *moved[2:]], strict=True))
            self._moved[device] = self.replaced(**parts)
        return self._moved[device]

    @property
    def differentiable(self) -> dict[str, Tensor]:
        """The tensors of the domain that require a gradient."""
        tensors = {name: getattr(self, name) for name in ("positions", "measure", "edge_gate")}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None and tensor.requires_grad}


def _near_key(config: ITNetConfig) -> tuple:
    """What neighbourhoods depend on beside the domain."""
    return config.near_size, config.near_radius, config.is_causal


def merge(parts: list[Domain], tensors: list[Tensor]) -> Tensor:
    """The tensors [b, ...] of all parts of a batch as one [B, ...], in the order of the batch."""
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
