"""Balls around positions in space, as blocks of pairs."""

import torch
from torch import Tensor

from ..positions import position_dtype
from ..transforms import has_values
from .blocks import Blocks, all_pairs

# Queries of a block.
_BLOCK = 8
# Up to this many keys every distance is computed; above, a KD-tree finds the near pairs, if there is one.
_MOST_DENSE = 1024
# Blocks that want about as many keys are computed together: in this many groups.
_GROUPS = 4


def ball_blocks(x: Tensor, y: Tensor, radius: float, real_x: Tensor | None = None, real_y: Tensor | None = None):
    """Returns the pairs with |x_i - y_j| <= radius, as a list of :class:`Blocks`.

    x ``[B or 1, n_q, s]`` and y ``[B or 1, n_k, s]`` are the positions of queries and keys; ``real_x`` [B, n_q] and
    ``real_y`` [B, n_k] say which of them exist. Distances are those of the given numbers in float64, so that neither
    the order of the points nor padding decides about a pair. Where values cannot be looked at, as in a compiled graph,
    there is one block of all pairs, and the cost is n_q n_k.
    """
    sets = max(part.shape[0] for part in (x, y, real_x, real_y) if part is not None)
    x, y = (part.detach().to(position_dtype(part.device)).expand(sets, -1, -1) for part in (x, y))
    real_x, real_y = (
        torch.ones(part.shape[:2], dtype=torch.bool, device=part.device) if real is None else real.expand(sets, -1)
        for part, real in ((x, real_x), (y, real_y))
    )
    if not (has_values(x) and has_values(y)):
        return [all_pairs(_is_near(x, y, radius) & real_x.unsqueeze(2) & real_y.unsqueeze(1))]
    order = _spatial_order(x, real_x)  # [sets, n_q]
    size = min(_BLOCK, x.shape[1])
    order = torch.nn.functional.pad(order, (0, -order.shape[1] % size), value=-1).unflatten(1, (-1, size))
    found = [_keys_of_blocks(x[k], y[k], real_x[k], real_y[k], order[k], radius) for k in range(sets)]
    return _grouped(order, found, x, y, real_x, real_y, radius)


def _is_near(x: Tensor, y: Tensor, radius: float) -> Tensor:
    """Compares [..., t, s] with [..., m, s]: [..., t, m], by coordinates, with no more memory than the result."""
    squared = sum((x[..., :, None, axis] - y[..., None, :, axis]).square() for axis in range(x.shape[-1]))
    return squared <= radius**2


def _spatial_order(points: Tensor, real: Tensor) -> Tensor:
    """Returns indices along a Morton curve, [sets, n, s] -> [sets, n]: its neighbours mostly are ones in space."""
    bits = min(16, 62 // points.shape[-1])
    low, high = points.amin(1, keepdim=True), points.amax(1, keepdim=True)
    cells = ((points - low) / (high - low).clamp(min=torch.finfo(points.dtype).tiny) * (2**bits - 1)).long()
    code = torch.zeros_like(cells[..., 0])
    for bit in reversed(range(bits)):
        for axis in range(points.shape[-1]):
            code = code * 2 + (cells[..., axis] >> bit & 1)
    code = code.masked_fill(~real, torch.iinfo(code.dtype).max)
    return code.argsort(dim=1, stable=True)


def _keys_of_blocks(x: Tensor, y: Tensor, real_x: Tensor, real_y: Tensor, order: Tensor, radius: float):
    """Returns blocks and keys, sorted by block, of a sample: the keys that some query of the block is near to."""
    count, slots = len(y), order.flatten()
    is_query = slots >= 0  # the last block may be filled up
    if count > _MOST_DENSE:
        query, key = _near_pairs(x, y, radius)
        counts = real_x[query] & real_y[key]
        block_of = torch.empty(len(x), dtype=torch.long, device=x.device)
        numbers = torch.arange(order.numel(), device=x.device) // order.shape[1]
        block_of[slots[is_query]] = numbers[is_query]
        wanted = torch.unique(block_of[query[counts]] * count + key[counts])
        return wanted // count, wanted % count
    rows = slots.clamp(min=0)
    near = _is_near(x[rows], y, radius) & (real_x[rows] & is_query).unsqueeze(1) & real_y
    return near.unflatten(0, order.shape).any(1).nonzero(as_tuple=True)


def _near_pairs(x: Tensor, y: Tensor, radius: float) -> tuple[Tensor, Tensor]:
    """Returns the indices of all pairs within a radius, and perhaps of some a little farther."""
    tree_class = _tree_class()
    if tree_class is None:  # strip by strip
        strips = x.split(max(1, 2**24 // len(y)))
        pairs = [_is_near(strip, y, radius).nonzero() for strip in strips]
        starts = [k * len(strips[0]) for k in range(len(strips))]
        query = torch.cat([part[:, 0] + start for part, start in zip(pairs, starts, strict=True)])
        return query, torch.cat([part[:, 1] for part in pairs])
    trees = (tree_class(points.cpu().numpy()) for points in (x, y))
    found = next(trees).sparse_distance_matrix(next(trees), radius * (1 + 1e-9), output_type="ndarray")
    return tuple(torch.as_tensor(found[name].copy(), dtype=torch.long, device=x.device) for name in "ij")


def _grouped(order, found, x, y, real_x, real_y, radius: float) -> list[Blocks]:
    """Returns blocks with their keys side by side. Those that want about as many keys stand together, so that few are
    filled up with keys that do not count."""
    sets, num_blocks = order.shape[:2]
    counts = torch.stack([torch.bincount(blocks, minlength=num_blocks) for blocks, _ in found])  # [sets, N]
    keys = order.new_zeros(sets, num_blocks, max(int(counts.max()), 1))
    for k, (blocks, numbers) in enumerate(found):
        starts = counts[k].cumsum(0) - counts[k]
        keys[k, blocks, torch.arange(len(blocks), device=blocks.device) - starts[blocks]] = numbers
    ranks = counts.argsort(dim=1, descending=True, stable=True)
    samples = torch.arange(sets, device=order.device)[:, None, None]
    groups = []
    for rank in ranks.split(-(-num_blocks // _GROUPS), dim=1):
        limit = int(counts.gather(1, rank).max())
        if limit == 0:
            continue
        blocks, kept = order[samples[..., 0], rank], keys[samples[..., 0], rank][..., :limit]
        rows = blocks.clamp(min=0)
        pairs = _is_near(x[samples, rows], y[samples, kept], radius)
        is_query = (blocks >= 0) & real_x[samples, rows]
        is_key = torch.arange(limit, device=order.device) < counts.gather(1, rank).unsqueeze(-1)
        pairs &= is_query.unsqueeze(-1) & (is_key & real_y[samples, kept]).unsqueeze(-2)
        groups.append(Blocks(rows, kept, pairs))
    nothing = Blocks(order[:, :1].clamp(min=0), keys[:, :1], torch.zeros_like(order[:, :1, :, None], dtype=torch.bool))
    return groups or [nothing]


@torch.no_grad()
def nearest_keys(x: Tensor, y: Tensor, real: Tensor, count: int) -> Tensor:
    """Returns the indices of the ``count`` real keys nearest to each query, the nearest first: [B, n_q, s], [B, n_k,
    s] and [B, n_k] -> [B, n_q, count]. Where there are fewer, keys that are not real follow."""
    x, y = (part.detach().to(position_dtype(part.device)) for part in (x, y))
    tree_class = _tree_class() if y.shape[1] > _MOST_DENSE and has_values(x) and has_values(y) else None
    if tree_class is None:
        distances = torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")
        return distances.masked_fill(~real.unsqueeze(1), torch.inf).topk(count, dim=-1, largest=False).indices
    found = []
    for queries, keys, is_real in zip(x, y, real, strict=True):
        numbers = (~is_real).int().argsort(stable=True)  # the real ones first
        num_real = int(is_real.sum())
        tree = tree_class(keys[numbers[:num_real]].cpu().numpy())
        nearest = torch.as_tensor(tree.query(queries.cpu().numpy(), k=range(1, count + 1))[1], device=numbers.device)
        others = torch.arange(count, device=numbers.device)
        found.append(numbers[torch.where(others < num_real, nearest, others)])
    return torch.stack(found)


def _tree_class() -> type | None:
    """Returns SciPy's KD-tree, where it is installed."""
    try:
        from scipy.spatial import cKDTree
    except ImportError:
        return None
    return cKDTree
