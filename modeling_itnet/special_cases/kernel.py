# SPDX-License-Identifier: Apache-2.0
"""Says what a kernel is: any kappa(x, y, u(x), u(y)), evaluated on one tile of pairs at a time."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from itnet_kernels import KernelWeights, kernel_matrices


class Pairs(NamedTuple):
    """A tile of pairs: queries x with features u(x) against keys y with features u(y).

    Features are in G groups (heads, groups of channels) that do not mix: a kernel is block-diagonal with G blocks.
    """

    x: Tensor  # [B or 1, t_q, s]
    y: Tensor  # [B or 1, t_k, s]
    u_x: Tensor  # [B, t_q, G, c_x]
    u_y: Tensor  # [B, t_k, G, c_y]
    rows: slice  # of the tile among all queries
    columns: slice  # of the tile among all keys
    prepared: Any  # what `Kernel.prepare` returned


class Kernel(nn.Module, ABC):
    """kappa on a tile of pairs. Subclasses implement ``forward``; the other methods have defaults.

    The number of axes that ``forward`` returns says what kind of block each group has:

    - scalar times the identity: ``[B or 1, t_q, t_k, G or 1]``
    - diagonal: ``[B or 1, t_q, t_k, G or 1, c]``
    - matrix: ``[B or 1, t_q, t_k, G or 1, a, c]``, which maps the c values of a group to a
    """

    # Numbers per pair that `forward` holds in memory, and whether each sample has its own: they set the tile size.
    entries_per_pair: int = 1
    depends_on_sample: bool = True

    def prepare(self, u_x: Tensor, u_y: Tensor, x: Tensor, y: Tensor, context: Any) -> Any:
        """Returns what the kernel needs of the whole signal, once per call, such as a trajectory or a table."""
        return context

    def vanishes(self, x: Tensor, y: Tensor) -> bool:
        """Returns True if the kernel is 0 on the whole tile and need not be evaluated. It may always return False."""
        return False

    @abstractmethod
    def forward(self, pairs: Pairs) -> Tensor: ...


class FunctionKernel(Kernel):
    """kappa written as a formula: ``function(x, y, u_x, u_y)`` on tensors that broadcast over the pairs of a tile.

    The arguments are x [B or 1, t_q, 1, s], y [B or 1, 1, t_k, s], u_x [B, t_q, 1, c], u_y [B, 1, t_k, c]; the result
    has the axes of the pairs, then none ("scalar"), the features ("diagonal") or both sides ("matrix").

        FunctionKernel(lambda x, y, u_x, u_y: torch.exp(-(x - y).square().sum(-1)))
    """

    def __init__(self, function: Callable[..., Tensor], structure: Literal["scalar", "diagonal", "matrix"] = "scalar"):
        super().__init__()
        axes = {"scalar": 0, "diagonal": 1, "matrix": 2}
        if structure not in axes:
            raise ValueError(f"`structure` ({structure!r}) must be one of {tuple(axes)}")
        self.function, self.axes = function, axes[structure]

    def prepare(self, u_x, u_y, x, y, context) -> Any:
        self.entries_per_pair = u_y.shape[-1] ** self.axes
        return context

    def forward(self, pairs: Pairs) -> Tensor:
        if pairs.u_y.shape[2] != 1:
            raise ValueError(f"a FunctionKernel takes one group of features, [B, n, d]; got {pairs.u_y.shape[2]}")
        u_x, u_y = pairs.u_x[:, :, 0].unsqueeze(2), pairs.u_y[:, :, 0].unsqueeze(1)
        values = self.function(pairs.x.unsqueeze(2), pairs.y.unsqueeze(1), u_x, u_y)
        if values.dim() != 3 + self.axes:
            raise ValueError(f"the kernel function returned {list(values.shape)}: expected {3 + self.axes} axes")
        return values.unsqueeze(3)


class MLPKernel(Kernel):
    """The learned kernel of ITNet itself, K_ij = reshape(W2 GELU(W1 z_ij + b1) + b2), one matrix per head."""

    def __init__(self, weights: KernelWeights):
        super().__init__()
        self.weights = weights
        self.entries_per_pair = weights.b2.numel() + weights.w1.shape[0]

    def forward(self, pairs: Pairs) -> Tensor:
        return kernel_matrices(pairs.u_x, pairs.u_y, pairs.x, pairs.y, self.weights)
