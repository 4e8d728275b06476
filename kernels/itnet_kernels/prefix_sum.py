"""Sums over everything up to here, with the same bits in every run."""

from torch import Tensor
from torch.nn.functional import pad

from .positions import position_dtype

_BLOCK = 128


def prefix_sum(tensor: Tensor, dim: int = 1) -> Tensor:
    """sum_{j <= i} t_j along one dimension, in the shape and dtype of the tensor: ``torch.cumsum`` on a CPU.

    On a GPU, cumsum adds floating-point numbers in an order that changes from run to run, and
    ``torch.use_deterministic_algorithms(True)`` refuses it. There, blocks meet a triangular matrix of ones.
    """
    return tensor.cumsum(dim) if tensor.device.type == "cpu" else blocked_prefix_sum(tensor, dim)


def blocked_prefix_sum(tensor: Tensor, dim: int = 1) -> Tensor:
    """:func:`prefix_sum` by matrix products, in float64 where the device has it: n * 128 multiply-adds, any mode of
    differentiation, no lower precision from autocast or TF32."""
    rows = tensor.movedim(dim, 0)
    sums = _blocked(rows.reshape(len(rows), -1).to(position_dtype(tensor.device)))
    return sums.reshape(rows.shape).movedim(0, dim).to(tensor.dtype)


def _blocked(rows: Tensor) -> Tensor:
    """Over the first dimension of [n, c]: within blocks, then the totals of the blocks before."""
    count = len(rows)
    size = min(count, _BLOCK)
    triangle = rows.new_ones(size, size).tril()
    if count == size:
        return triangle @ rows
    blocks = pad(rows, (0, 0, 0, -count % size)).unflatten(0, (-1, size))  # [blocks, size, c]
    before = pad(_blocked(blocks.sum(1)), (0, 0, 1, -1))  # of the totals, one block later
    return (triangle @ blocks + before.unsqueeze(1)).flatten(0, 1)[:count]
