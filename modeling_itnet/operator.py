# Copyright 2026 The ITNet Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""The multi-head ITNet operator as a module, and the Fourier features of positions."""

import torch
from torch import Tensor, nn

from configuration_itnet import ITNetConfig
from itnet_kernels import KernelWeights, fourier_features, integral_transform


class ITNetFourierFeatures(nn.Module):
    """gamma(x) = [sin(2 pi B x); cos(2 pi B x)], with one frozen B ~ N(0, sigma^2) for the encoder and all layers.

    B is a persistent buffer, drawn from ``config.fourier_seed``. Casts of the model leave it in float32: rounding a
    frequency of 10 cycles to bfloat16 would move the phase at x = 1 by tenths of a radian.
    """

    def __init__(self, config: ITNetConfig):
        super().__init__()
        self.shape = (config.num_fourier_features, config.position_dim)
        self.scale, self.seed = config.fourier_scale, config.fourier_seed
        self.register_buffer("frequencies", self.draw())  # B [L, s]

    def draw(self) -> Tensor:
        generator = torch.Generator("cpu").manual_seed(self.seed)
        return self.scale * torch.randn(*self.shape, generator=generator, device="cpu")

    def forward(self, positions: Tensor) -> Tensor:
        """positions [..., s] -> [..., 2L] in float32 (the coordinates themselves if L = 0)."""
        return fourier_features(positions.float(), self.frequencies)

    @property
    def size(self) -> int:
        """Length of gamma(x)."""
        return 2 * self.shape[0] or self.shape[1]

    def _apply(self, fn, recurse=True):
        exact = self.frequencies
        super()._apply(fn, recurse)
        if self.frequencies.dtype != exact.dtype:
            self.frequencies = exact.to(self.frequencies.device)
        return self


class ITNetKernel(nn.Module):
    """Weights of the kernel MLP: W1 [w, kernel_input_size] shared by the heads, W2 [H, d_h^2, w] and b2 per head."""

    def __init__(self, config: ITNetConfig):
        super().__init__()
        self.inputs = tuple(config.kernel_inputs)
        self.head_dim = config.head_dim
        self.init_scale = config.kernel_init_scale
        width = config.kernel_hidden_size
        heads = config.num_attention_heads if config.kernel_output_sharing == "per_head" else 1
        self.w1 = nn.Parameter(torch.empty(width, config.kernel_input_size))
        self.b1 = nn.Parameter(torch.empty(width))
        if config.kernel_num_layers == 3:
            self.w_mid = nn.Parameter(torch.empty(width, width))
            self.b_mid = nn.Parameter(torch.empty(width))
        else:
            self.w_mid = self.b_mid = None
        self.w2 = nn.Parameter(torch.empty(heads, self.head_dim**2, width))
        self.b2 = nn.Parameter(torch.empty(heads, self.head_dim**2))

    def forward(self, frequencies: Tensor) -> KernelWeights:
        return KernelWeights(
            self.w1, self.b1, self.w2, self.b2, frequencies, self.inputs, w_mid=self.w_mid, b_mid=self.b_mid
        )


class ITNetOperator(nn.Module):
    r"""K[u](x) = W^O [ integral of kappa^(h)(x, y, u(x), u(y)) u^(h)(y) dmu(y) ]_h + W_theta u(x), Eq. multihead."""

    def __init__(self, config: ITNetConfig):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.is_causal = config.is_causal
        self.backend = config.backend
        self.kernel = ITNetKernel(config)
        self.output = nn.Linear(config.hidden_size, config.hidden_size, bias=False)  # W^O
        self.residual = nn.Linear(config.hidden_size, config.hidden_size, bias=False)  # W_theta

    def forward(self, features: Tensor, positions: Tensor, measure: Tensor, frequencies: Tensor) -> Tensor:
        """features [B, n, d], positions [n, s] or [B, n, s], measure [B, n] -> [B, n, d]."""
        return self.output(self.integral(features, positions, measure, frequencies)) + self.residual(features)

    def integral(self, features: Tensor, positions: Tensor, measure: Tensor, frequencies: Tensor) -> Tensor:
        """The heads' integrals side by side, before W^O: [B, n, d]."""
        heads = features.unflatten(-1, (self.num_heads, -1))  # [B, n, H, d_h]
        out = integral_transform(
            heads,
            positions,
            self.kernel(frequencies),
            measure=measure,
            is_causal=self.is_causal,
            backend=self.backend,
        )
        return out.flatten(-2)
