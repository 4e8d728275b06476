"""The measure omega: uniform weights, and what a causal operator makes of it."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from .positions import position_dtype

_BLOCK = 128
_WIDE = 32  # numbers of a position that are many, and positions of a block of such


def uniform_measure(features: Tensor, mask: Tensor | None = None) -> Tensor:
    """Returns 1/n on the n positions of each sample: features [B, n, ...] -> [B, n], float32 at least.

    With a mask [B, n] of zeros and ones, 1/n on the n positions that it marks and 0 on the others.
    """
    batch, count = features.shape[:2]
    dtype = torch.promote_types(features.dtype, torch.float32)
    if mask is None:
        return torch.full((batch, count), 1 / count, dtype=dtype, device=features.device)
    mask = mask.to(dtype)
    return mask / mask.sum(1, keepdim=True).clamp(min=1)


def visible_sum(tensor: Tensor, num_queries: int) -> Tensor:
    """Sums over the keys j <= i + n_k - n_q that query i of a causal operator sees: [B, n_k, ...] -> [B, n_q, ...].

    That of the measure is the visible mass, which a causal operator divides by (:func:`over_mass`).
    """
    return prefix_sum(tensor)[:, tensor.shape[1] - num_queries :]


def over_mass(value: Tensor, mass: Tensor, otherwise: float = 0) -> Tensor:
    """Returns value / mass, and ``otherwise`` where there is no mass; the gradients are finite there too."""
    has_mass = mass > 0
    return torch.where(has_mass, value / mass.where(has_mass, 1), otherwise)


def prefix_sum(tensor: Tensor, dim: int = 1) -> Tensor:
    """Returns sum_{j <= i} t_j along one dimension, in the shape and dtype of the tensor: ``torch.cumsum`` on a CPU.

    On a GPU, cumsum adds floating-point numbers in an order that changes from run to run, and
    ``torch.use_deterministic_algorithms(True)`` refuses it. There, blocks meet a triangular matrix of ones.
    """
    return tensor.cumsum(dim) if tensor.device.type == "cpu" else blocked_prefix_sum(tensor, dim)


def prefix_sum_of_rows(rows: Tensor) -> Tensor:
    """Computes :func:`prefix_sum` of [B, n, ...] along n, where every position has many numbers.

    On a CPU, cumsum takes such rows number by number. Blocks of them meet a triangular matrix of ones instead, in
    their own dtype, which takes an eighth of the time.
    """
    count = rows.shape[1]
    if rows.device.type != "cpu" or rows[:1, :1].numel() < _WIDE:
        return prefix_sum(rows)
    size = min(count, _WIDE)
    triangle = rows.new_ones(size, size).tril()
    blocks = pad(rows.flatten(2), (0, 0, 0, -count % size)).unflatten(1, (-1, size))  # [B, blocks, size, f]
    within = triangle @ blocks
    before = pad(within[:, :-1, -1].cumsum(1), (0, 0, 1, 0))  # the totals of the blocks before
    return (within + before.unsqueeze(2)).flatten(1, 2)[:, :count].view(rows.shape)


def blocked_prefix_sum(tensor: Tensor, dim: int = 1) -> Tensor:
    """Computes :func:`prefix_sum` by matrix products, in float64 where the device has it: n * 128 multiply-adds, any
    mode of differentiation, no lower precision from autocast or TF32."""
    rows = tensor.movedim(dim, 0)
    sums = _blocked(rows.reshape(len(rows), -1).to(position_dtype(tensor.device)))
    return sums.reshape(rows.shape).movedim(0, dim).to(tensor.dtype)


def _blocked(rows: Tensor) -> Tensor:
    """Sums over the first dimension of [n, c]: within blocks, then with the totals of the blocks before."""
    count = len(rows)
    size = min(count, _BLOCK)
    triangle = rows.new_ones(size, size).tril()
    if count == size:
        return triangle @ rows
    blocks = pad(rows, (0, 0, 0, -count % size)).unflatten(0, (-1, size))  # [blocks, size, c]
    before = pad(_blocked(blocks.sum(1)), (0, 0, 1, -1))  # of the totals, one block later
    return (triangle @ blocks + before.unsqueeze(1)).flatten(0, 1)[:count]
