# SPDX-License-Identifier: Apache-2.0
"""Theorem 1: convolutions of torch.nn are integrals with a kernel that depends on x - y only (App. proof_conv)."""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from .convert import Conversion, register
from .kernel import Kernel, Pairs
from .operator import IntegralOperator

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class ConvolutionKernel(Kernel):
    """kappa(x, y) = F[m] where m = (y - x) / dilation is the index of a tap of the filter F, and 0 elsewhere.

    Points have integer coordinates. A transposed convolution has m = (x - y) / dilation. The groups of a grouped
    convolution are the blocks of a block-diagonal kernel; a depthwise one has a scalar per channel.
    """

    depends_on_sample = False

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        self.transposed = isinstance(module, _TRANSPOSED)
        self.register_buffer("size", torch.tensor(module.kernel_size), persistent=False)  # [s]
        self.register_buffer("dilation", torch.tensor(module.dilation), persistent=False)  # [s]
        self.entries_per_pair = module.weight[..., :1].numel() // math.prod(module.kernel_size[:-1])

    def prepare(self, u_x, u_y, x, y, context) -> Tensor:
        """Returns the taps in row-major order and a last one of 0: [K + 1, G, a, c], or [K + 1, G] if a = c = 1."""
        weight, groups = self.module.weight, self.module.groups
        taps = weight.flatten(2).unflatten(0, (groups, -1))  # [G, a, c, K]; transposed: [G, c, a, K]
        taps = taps.permute(3, 0, 2, 1) if self.transposed else taps.permute(3, 0, 1, 2)
        taps = torch.cat([taps, taps.new_zeros(1, *taps.shape[1:])])
        return taps[..., 0, 0] if taps.shape[2:] == (1, 1) else taps

    def forward(self, pairs: Pairs) -> Tensor:
        steps = (pairs.y.unsqueeze(1) - pairs.x.unsqueeze(2)) * (-1 if self.transposed else 1)  # [1, t_q, t_k, s]
        tap = steps.div(self.dilation, rounding_mode="floor")
        inside = ((tap * self.dilation == steps) & (tap >= 0) & (tap < self.size)).all(-1)
        flat = torch.zeros_like(inside, dtype=torch.long)
        for axis, size in enumerate(self.module.kernel_size):
            flat = flat * size + tap[..., axis]
        return pairs.prepared[flat.where(inside, len(pairs.prepared) - 1)]

    def vanishes(self, x: Tensor, y: Tensor) -> bool:
        """Compares the box around the tile's displacements with the box of the filter."""
        x, y = (y, x) if self.transposed else (x, y)
        smallest, largest = y.amin(1) - x.amax(1), y.amax(1) - x.amin(1)
        return bool(((largest < 0) | (smallest > self.dilation * (self.size - 1))).any())


@register(*_CONVOLUTIONS, *_TRANSPOSED)
class ConvolutionOperator(Conversion):
    """Computes a convolution of torch.nn as an integral over the grid: [B, C, *size] -> [B, C', *size']."""

    def __init__(self, module: nn.Module):
        super().__init__(module)
        self.integral = IntegralOperator(ConvolutionKernel(module), measure="counting")

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        module, axes = self.module, len(self.module.kernel_size)
        is_batched, is_transposed = input.dim() == axes + 2, isinstance(module, _TRANSPOSED)
        if not (is_batched or input.dim() == axes + 1) or input.shape[-axes - 1] != module.in_channels:
            expected = f"[B, {module.in_channels}, " + ", ".join("*" * axes) + "], with or without B"
            raise ValueError(f"`input` {list(input.shape)} must be {expected}")
        if output_size is not None and not is_transposed:
            raise ValueError(f"`output_size` ({output_size}) is for transposed convolutions only")
        signal = input if is_batched else input.unsqueeze(0)
        if is_transposed:
            key_axes, query_axes = self._transposed_domains(signal, output_size)
        else:
            signal, key_axes, query_axes = self._domains(signal)
        keys = signal.flatten(2).transpose(1, 2).unflatten(2, (module.groups, -1))  # [B, n, G, c]
        y, x = (torch.cartesian_prod(*parts).view(-1, axes).to(input.device) for parts in (key_axes, query_axes))
        out = self.integral(keys, y, query_positions=x).flatten(2)  # [B, n', C']
        out = out if module.bias is None else out + module.bias
        out = out.transpose(1, 2).unflatten(2, [len(part) for part in query_axes])
        return out if is_batched else out.squeeze(0)

    def _domains(self, signal: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Returns the signal on its own or the extended domain, and the domains of keys and queries, axis by axis.

        With padding by zeros the domain stays as it is: outside there is nothing to integrate. The other paddings
        extend the domain, and the signal with it (App. boundary_handling).
        """
        module, query_axes, key_axes = self.module, [], []
        padding = module._reversed_padding_repeated_twice  # as torch's pad takes it: the last axis comes first
        extends = module.padding_mode != "zeros" and any(padding)
        paddings = list(zip(padding[::2], padding[1::2], strict=True))[::-1]
        for axis, (size, (before, after)) in enumerate(zip(signal.shape[2:], paddings, strict=True)):
            room = size + before + after - self._span(axis)
            if room < 0:
                raise ValueError(
                    f"`input` has {size} points along axis {axis}, and {before + after} of padding: fewer than "
                    f"the {self._span(axis)} that the filter spans"
                )
            query_axes.append(torch.arange(0, room + 1, module.stride[axis]) - before)
            key_axes.append(torch.arange(-before, size + after) if extends else torch.arange(size))
        return pad(signal, padding, mode=module.padding_mode) if extends else signal, key_axes, query_axes

    def _transposed_domains(self, signal: Tensor, output_size) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the finer grid of App. ext_transposed: keys every `stride` points, queries at every point."""
        module, key_axes, query_axes = self.module, [], []
        sizes = signal.shape[2:]
        settings = module.stride, module.padding, module.kernel_size, len(sizes), module.dilation
        extra = module._output_padding(signal, output_size, *settings)
        for axis, size in enumerate(sizes):
            stride, padding = module.stride[axis], module.padding[axis]
            count = (size - 1) * stride - 2 * padding + self._span(axis) + extra[axis]
            key_axes.append(torch.arange(size) * stride)
            query_axes.append(torch.arange(count) + padding)
        return key_axes, query_axes

    def _span(self, axis: int) -> int:
        """Returns the points from the first to the last tap of the filter."""
        return self.module.dilation[axis] * (self.module.kernel_size[axis] - 1) + 1
