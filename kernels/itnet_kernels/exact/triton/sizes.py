"""Head sizes and kernel widths of the Triton kernels, and how other sizes become one of them. Needs no Triton.

The kernels' tiles are powers of two. Smaller sizes are filled up with zeros, which is exact: a feature that is 0
changes neither a pre-activation nor a moment, and a hidden unit without weights is GELU(0) = 0.
"""

from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import pad

TRITON_HEAD_DIMS = (16, 32, 64, 128)
TRITON_WIDTHS = (32, 64, 128, 256)

# Trailing sizes of the pair sum's arguments: "d" is the head size, "w" the kernel's width; w2 is [H, w, d, d] here.
_TRAILING = {
    "queries": "d",
    "keys": "d",
    "row": "w",
    "w_y": "w.",
    "w_relative": "w.",
    "w_distance": "w.",
    "w_key": "wd",
    "w_product": "wd",
    "w2": "wdd",
}


class KernelSizes(NamedTuple):
    """Head size and width of a problem."""

    head_dim: int
    width: int

    def supported(self) -> "KernelSizes":
        """Returns the smallest sizes of the kernels that hold these."""
        return KernelSizes(
            next(size for size in TRITON_HEAD_DIMS if size >= self.head_dim),
            next(size for size in TRITON_WIDTHS if size >= self.width),
        )


def resize(name: str, tensor: Tensor | None, given: KernelSizes, wanted: KernelSizes) -> Tensor | None:
    """Fills argument ``name`` of the pair sum, or its gradient, up with zeros, or cuts it where sizes shrink."""
    if tensor is None or name not in _TRAILING or given == wanted:
        return tensor
    more = {"d": wanted.head_dim - given.head_dim, "w": wanted.width - given.width, ".": 0}
    tensor = tensor.unflatten(1, (given.width, given.head_dim)) if name == "w2" else tensor
    amounts = [amount for size in reversed(_TRAILING[name]) for amount in (0, more[size])]
    tensor = pad(tensor, amounts)
    return tensor.flatten(1, 2) if name == "w2" else tensor
