"""The kernel MLP's weights and the layout of its input.

The kernel sees a pair of positions x (query) and y (key) through seven groups (Eq. kernel_input of the paper):

    z_xy = [ gamma(x); gamma(y); gamma(x-y); |x-y|; u(x); u(y); u(x)*u(y) ]

Any subset may be used; the columns of ``w1`` are the chosen groups in the order above.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

#: The seven input groups, in the order of Eq. kernel_input.
KERNEL_INPUTS = ("x", "y", "x-y", "distance", "u_x", "u_y", "u_x*u_y")


class KernelWeights(NamedTuple):
    """Weights of the matrix-valued kernel K_xy = reshape(W2 GELU(W1 z_xy + b1) + b2), one matrix per head.

    ``K[a, c] = (w2 h + b2)[a * d_h + c]`` (row-major). ``w2`` and ``b2`` are per head, or have a leading size of 1,
    which shares them. Heads share the hidden layers, unless each has its own: then ``w1``, ``b1``, ``w_mid`` and
    ``b_mid`` have a leading dimension H. With ``w_mid`` the MLP has a second hidden layer:
    ``h = GELU(w_mid GELU(w1 z + b1) + b_mid)``.

    With ``w2_directions`` and ``b2_directions`` the kernel is affine in the displacement beside what its MLP makes of
    it: ``K_xy`` is the matrix above plus ``sum_k (x_k - y_k) reshape(W2_k h + b2_k)``, one term per coordinate.
    """

    w1: Tensor  # [w, kernel_input_size] or [H, w, kernel_input_size]
    b1: Tensor  # [w]
    w2: Tensor  # [H or 1, d_h * d_h, w]
    b2: Tensor  # [H or 1, d_h * d_h]
    fourier: Tensor  # [L, s] frequencies B of gamma; L = 0 gives the raw coordinates (Eq. kernel_input_raw)
    inputs: tuple[str, ...] = KERNEL_INPUTS
    w_mid: Tensor | None = None  # [w, w]
    b_mid: Tensor | None = None  # [w]
    w2_directions: Tensor | None = None  # [H or 1, s, d_h * d_h, w]
    b2_directions: Tensor | None = None  # [H or 1, s, d_h * d_h]

    def to(self, dtype: torch.dtype) -> "KernelWeights":
        """Returns the weights in ``dtype``. Frequencies stay: far from the origin, phases feel every digit."""
        cast = {name: t.to(dtype) for name, t in self._asdict().items() if isinstance(t, Tensor) and name != "fourier"}
        return self._replace(**cast)

    @property
    def has_own_hidden(self) -> bool:
        """Says whether each head has hidden layers of its own."""
        return self.w1.dim() == 3

    def of_head(self, head: int) -> "KernelWeights":
        """Returns the weights of one head, with all their layers to itself."""
        own = {name: getattr(self, name) for name in ("w1", "b1", "w_mid", "b_mid")}
        own = {name: value if value is None else value[head] for name, value in own.items()}
        outer = slice(None) if len(self.w2) == 1 else slice(head, head + 1)
        for name in ("w2", "b2", "w2_directions", "b2_directions"):
            value = getattr(self, name)
            own[name] = value if value is None else value[outer]
        return self._replace(**own)

    def with_constant_unit(self) -> "KernelWeights":
        """Returns the same kernel with one hidden unit more, the constant 1, in place of b2."""
        w2 = torch.cat([self.w2, self.b2.unsqueeze(-1)], dim=-1)
        grown = self._replace(
            w1=pad(self.w1, (0, 0, 0, 1)), b1=pad(self.b1, (0, 1)), w2=w2, b2=torch.zeros_like(self.b2)
        )
        if self.w_mid is None:
            return grown
        return grown._replace(w_mid=pad(self.w_mid, (0, 1, 0, 1)), b_mid=pad(self.b_mid, (0, 1)))

    def output_weight(self, head_dim: int) -> Tensor:
        """Returns W2 as it meets the moments A: [H or 1, w * d_h, d_h], rows (k, c), columns a."""
        return self.w2.unflatten(1, (head_dim, head_dim)).permute(0, 3, 2, 1).flatten(1, 2)

    def output_bias(self, head_dim: int) -> Tensor:
        """Returns b2 as it meets the mean of the signal: [H or 1, d_h, d_h], rows c, columns a."""
        return self.b2.unflatten(1, (head_dim, head_dim)).mT


def kernel_group_sizes(num_frequencies: int, position_dim: int, head_dim: int) -> dict[str, int]:
    """Returns the number of columns of each input group: 2L or s, 1 for the distance, d_h for content."""
    position = 2 * num_frequencies or position_dim
    sizes = (position, position, position, 1, head_dim, head_dim, head_dim)
    return dict(zip(KERNEL_INPUTS, sizes, strict=True))


def kernel_input_size(inputs: tuple[str, ...], num_frequencies: int, position_dim: int, head_dim: int) -> int:
    """Returns the number of columns of ``w1``; 6L + 1 + 3 d_h when all seven groups are used."""
    sizes = kernel_group_sizes(num_frequencies, position_dim, head_dim)
    return sum(sizes[name] for name in inputs)


def split_input_weights(weights: KernelWeights, head_dim: int) -> dict[str, Tensor | None]:
    """Returns the columns of ``w1`` by group: name -> [w, group size], or None for a group that is not used."""
    sizes = kernel_group_sizes(*weights.fourier.shape, head_dim)
    used = [name for name in KERNEL_INPUTS if name in weights.inputs]
    parts = weights.w1.split([sizes[name] for name in used], dim=1)
    return dict.fromkeys(KERNEL_INPUTS) | dict(zip(used, parts, strict=True))
