"""
The operator in your own module
===============================

``ITNetOperator`` is a layer like others of torch, and ``integral_transform`` is a function of tensors, without
Transformers. Convolution, attention and recurrence are special cases, and ``from_module`` converts these.
"""

# %%
# A layer
# -------
#
# Features ``[B, n, d]`` and positions go in, features come out. It initialises itself: at first it is close to the
# mean of the features plus a linear map of each.
import torch

from modeling_itnet import ITNetConfig, ITNetOperator

torch.manual_seed(0)


class Block(torch.nn.Module):
    """u + K[LN(u)] on positions in the plane."""

    def __init__(self, size: int):
        super().__init__()
        config = ITNetConfig(
            modality="signal",
            position_dim=2,
            hidden_size=size,
            num_attention_heads=4,
            kernel_hidden_size=16,
            fourier_scale=1.0,
            integration_mode="exact",
        )
        self.norm, self.operator = torch.nn.LayerNorm(size), ITNetOperator(config)

    def forward(self, features, positions, measure=None):
        return features + self.operator(self.norm(features), positions, measure)


block = Block(64)
out = block(torch.randn(2, 30, 64), torch.rand(30, 2))  # positions [n, s] for all samples, or [B, n, s]
print(out.shape)

# %%
# ``measure [B, n]`` holds what each position stands for: 0 for padding, areas on a mesh. None is uniform.
measure = torch.tensor([[1.0] * 30, [1.0] * 20 + [0.0] * 10])
features, positions = torch.randn(2, 30, 64), torch.rand(2, 30, 2)
whole = block(features, positions, measure / measure.sum(1, keepdim=True))
short = block(features[1:, :20], positions[1:, :20])
print(f"padding changes nothing: {(whole[1, :20] - short[0]).abs().max():.1e}")

# %%
# A function
# ----------
#
# The integral alone, for weights that you hold yourself. The columns of ``w1`` are those of the seven inputs of the
# kernel: ``γ(x)``, ``γ(y)``, ``γ(x - y)`` with ``2L`` each; ``|x - y|``; ``u(x)``, ``u(y)``, ``u(x) * u(y)`` with
# ``d_h`` each.
from itnet_kernels import KernelWeights, integral_transform

heads, size, width, frequencies = 4, 16, 32, 8
weights = KernelWeights(
    w1=0.02 * torch.randn(width, 3 * 2 * frequencies + 1 + 3 * size),
    b1=torch.zeros(width),  # shared by the heads
    w2=0.01 * torch.randn(heads, size * size, width),
    b2=torch.eye(size).flatten().repeat(heads, 1),  # one kernel per head
    fourier=torch.randn(frequencies, 3),  # frozen
)
u, x = torch.randn(2, 50, heads, size), torch.rand(50, 3)  # [B, n, H, d_h], [n, s] or [B, n, s]
out = integral_transform(u, x, weights, measure=None, is_causal=False, backend="auto")
print(out.shape)

# %%
# All backends compute the same number: ``reference`` is the definition, which forms every kernel matrix; ``tiled``
# sums before the last layer of the kernel, and is what runs on a CPU.
slow = integral_transform(u, x, weights, backend="reference")
print(f"tiled and reference: {(out - slow).abs().max():.1e}")

# %%
# Derivatives of any order go through it, also in forward mode (``torch.func.jvp``, ``jacfwd``, ``hessian``).
direction = torch.randn_like(u)
value, slope = torch.func.jvp(lambda u: integral_transform(u, x, weights), (u,), (direction,))
step = 1e-3
difference = (integral_transform(u + step * direction, x, weights) - value) / step
print(f"slope, relative to a difference quotient: {((slope - difference).norm() / slope.norm()):.1e}")

# %%
# From a module of torch
# ----------------------
#
# ``from_module`` gives the operator that equals a module: the same integral, with the kernel that the paper's theorems
# name and the module's own weights.
from modeling_itnet.special_cases import from_module

convolution = torch.nn.Conv2d(3, 8, 3, stride=2, padding=1, padding_mode="reflect")  # κ depends on x - y
images = torch.randn(2, 3, 9, 9)
print(f"convolution: {(from_module(convolution)(images) - convolution(images)).abs().max():.1e}")

attention = torch.nn.MultiheadAttention(16, 4, batch_first=True).eval()  # κ depends on u(x), u(y); normalised over y
tokens = torch.randn(2, 7, 16)
same = from_module(attention)(tokens, tokens, tokens)
print(f"attention: {(same - attention(tokens, tokens, tokens)[0]).abs().max():.1e}")

lstm = torch.nn.LSTM(16, 8, bidirectional=True, batch_first=True)  # κ is causal and follows the trajectory
print(f"LSTM: {(from_module(lstm)(tokens) - lstm(tokens)[0]).abs().max():.1e}")

# %%
# :doc:`/special_cases` has what else can be converted, and how; :doc:`/mathematics` derives the sums and their
# backward.
