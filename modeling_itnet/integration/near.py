# SPDX-License-Identifier: Apache-2.0
"""Near fields: the neighbourhood of every position as a region, and the measure on it."""

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from configuration_itnet import ITNetConfig
from itnet_kernels import Blocks, Coordinates, ball_blocks, listed_blocks, window_blocks
from itnet_kernels.measure import over_mass
from itnet_kernels.transforms import may_look_at

if TYPE_CHECKING:
    from ..domain import Domain


class Near(NamedTuple):
    """The neighbourhoods N(i) of all queries. The near field is scale_i sum_{j in N(i)} omega_j K_ij u_j."""

    blocks: list[Blocks]
    scale: Tensor  # [B, n_q]
    window: int | None = None  # N(i) is i and the window - 1 positions before it, for every query

    def pairs(self, num_keys: int) -> Tensor:
        """Returns which pairs are near, as a table of all: [B or 1, n_q, n_k]."""
        num_queries = self.scale.shape[1]
        table = torch.zeros(1, num_queries, num_keys, dtype=torch.bool, device=self.scale.device)
        for blocks in self.blocks:
            table = table | blocks.dense(num_queries, num_keys)
        return table


def find_near(config: ITNetConfig, domain: "Domain") -> Near:
    """Returns the neighbourhoods of the positions of a domain.

    On grids they are windows, with a measure that is normalised to 1, and so they are wherever positions have an
    order, which is all that those of a causal operator share with a grid. On a graph they are the ends of the edges of
    a node and the node itself, with the measure restricted to them, times what makes it 1 on average over the graph,
    :func:`region_scale`. Everywhere else they are balls, with the restricted measure times a constant,
    :func:`ball_scale`.
    """
    measure, neighbors, layout = domain.measure, domain.neighbors, domain.layout
    if domain.past is not None:
        return _windows_with_past(config, domain.keys.measure, measure.shape[1])
    if layout is None and config.is_causal:
        layout = ((measure.shape[1],),)
    if layout is not None:
        return _windows(config, measure, layout, domain.is_padded)
    if neighbors is None:
        if config.near_radius is None:
            raise ValueError("`near_radius` (None) must be given: these positions form no grid, and have no windows")
        x, real = domain.coordinates.exact, measure > 0 if domain.is_padded else None
        blocks = ball_blocks(x, x, config.near_radius, real, real)
        return Near(blocks, torch.full_like(measure, ball_scale(config.near_radius, x.shape[-1])))
    own = torch.arange(neighbors.shape[1], device=neighbors.device)[:, None].expand(neighbors.shape[0], -1, 1)
    blocks = [listed_blocks(torch.cat([own, neighbors.where(neighbors != own, -1)], dim=2))]  # no node twice
    return Near(blocks, region_scale(blocks, measure).expand_as(measure))


def find_near_keys(config: ITNetConfig, queries: Coordinates, domain: "Domain") -> Near:
    """Returns the balls of queries that are no keys. Those of a causal operator are its keys, and have its windows."""
    if config.is_causal:
        return domain.near(config)
    real = domain.measure > 0 if domain.is_padded else None
    x, y = queries.exact, domain.coordinates.exact
    blocks = ball_blocks(x, y, config.near_radius, None, real)
    shape = domain.measure.shape[0], x.shape[1]
    return Near(blocks, domain.measure.new_full(shape, ball_scale(config.near_radius, x.shape[-1])))


def ball_scale(radius: float, dimension: int) -> float:
    """Returns 1 over the volume of a ball, of at most 1: its measure where positions fill the unit cube evenly.

    It is a constant, unlike the mean measure of the balls of a sample: that one varies with the positions, by 10 % for
    32 random points in the unit square and balls of radius 0.3, and every integral would vary with it.
    """
    volume = math.pi ** (dimension / 2) / math.gamma(dimension / 2 + 1) * radius**dimension
    return 1 / min(volume, 1.0)


def region_scale(blocks: list[Blocks], measure: Tensor) -> Tensor:
    """Returns 1 over the mean measure of a neighbourhood, 1 / sum_i omega_i mu(N(i)): [B, 1].

    It converges as a mesh is refined, is 1 where every neighbourhood holds everything, and is a property of the
    sample: neither padding nor which queries are asked for change it.
    """
    mass = sum(part.mass(measure, measure.shape[1]) for part in blocks)  # mu(N(i)) [B, n]
    total, mean = measure.sum(1, keepdim=True), (measure * mass).sum(1, keepdim=True)
    return over_mass(total, mean)


def _windows(config: ITNetConfig, measure: Tensor, layout: tuple[tuple[int, ...], ...], is_padded: bool) -> Near:
    """Returns the windows of the grids, which lie one after the other.

    A position without a grid, (), sees the whole domain. It lies in the middle of the planes, in the windows that
    extend to there, and far from lines of text.
    """
    sizes = [math.prod(shape) for shape in layout]
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    loose = [start for start, shape in zip(starts, layout, strict=True) if not shape]
    everywhere = torch.tensor(loose, dtype=torch.long, device=measure.device)
    blocks, window = [], None
    for start, shape in zip(starts, layout, strict=True):
        reach = window_reach(config.near_size, len(shape), config.is_causal)
        settings = {"first": start, "is_causal": config.is_causal, "device": measure.device}
        if len(shape) == 1:
            windows = window_blocks(shape, reach, **settings)[0]
            blocks.append(_by_rank(windows, measure, start, shape[0]) if is_padded else windows)
            if config.is_causal and len(layout) == 1 and blocks[0] is windows:
                window = config.near_size
        elif shape:
            blocks += window_blocks(shape, reach, **settings, middle=everywhere)
    if loose:
        keys = torch.arange(measure.shape[1], device=measure.device)[None, None]
        blocks.append(
            Blocks(everywhere[None, None], keys, torch.ones_like(keys, dtype=torch.bool).expand(1, 1, len(loose), -1))
        )
    mass = sum(part.mass(measure, measure.shape[1]) for part in blocks)
    return Near(blocks, over_mass(torch.ones_like(mass), mass), window)


def _windows_with_past(config: ITNetConfig, measure: Tensor, num_queries: int) -> Near:
    """Returns the windows of a causal operator whose queries are the last of its keys, with measure [B, n_k].

    A window is a list of the last ``near_size`` real keys: few queries would share a block.
    """
    real = measure > 0
    order = real.int().argsort(dim=1, descending=True, stable=True)  # the real keys first, in their order
    reach = torch.arange(config.near_size, device=measure.device)
    ranks = (real.cumsum(1) - 1)[:, -num_queries:, None] - reach  # [B, n_q, near_size]
    keys = order.gather(1, ranks.clamp(min=0).flatten(1)).view(ranks.shape)
    blocks = listed_blocks(keys.where((ranks >= 0) & real[:, -num_queries:, None], -1))
    mass = blocks.mass(measure, num_queries)
    return Near([blocks], over_mass(torch.ones_like(mass), mass))


def window_reach(near_size: int, dimension: int, is_causal: bool) -> int:
    """Returns how many positions a window of ``near_size`` reaches to each side along an axis, or to the past."""
    return near_size - 1 if is_causal else (round(near_size ** (1 / max(dimension, 1))) - 1) // 2


def _by_rank(blocks: Blocks, measure: Tensor, start: int, count: int) -> Blocks:
    """Makes windows count real positions: where padding lies between, blocks name these by their place among them."""
    real = measure[:, start : start + count] > 0
    if may_look_at(real):
        gaps = real[:, 1:] != real[:, :-1]  # a run of real positions has at most a beginning and an end
        has_holes = (gaps.sum(1) + real[:, 0] + real[:, -1]) > 2
        if not bool(has_holes.any()):
            return blocks
    order = real.int().argsort(dim=1, descending=True, stable=True) + start  # the real ones first, in their order
    queries, keys = (order[:, part[0] - start] for part in (blocks.queries, blocks.keys))
    return Blocks(queries, keys, blocks.pairs)
