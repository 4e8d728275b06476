# SPDX-License-Identifier: Apache-2.0
"""The factors of a low-rank kernel (§lowrank_impl of the paper)."""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear
from transformers import initialization as init

from configuration_itnet import ITNetConfig
from itnet_kernels import Factor, LowRankState, low_rank_transform

from ..domain import Domain


class ITNetFactor(nn.Module):
    """Phi or Psi: W2 GELU(W1 [gamma(x); u^(h)] + b1) + b2, a rank x d_h matrix per head. The heads share W1."""

    def __init__(self, config: ITNetConfig, init_scale: float):
        super().__init__()
        self.position_size = config.position_size
        self.init_std, self.init_scale = config.initializer_range, init_scale
        heads, rank, width = config.num_attention_heads, config.rank, config.factor_hidden_size
        self.w1 = nn.Parameter(torch.empty(width, config.position_size + config.head_dim))
        self.b1 = nn.Parameter(torch.empty(width))
        self.w2 = nn.Parameter(torch.empty(heads, rank, config.head_dim, width))
        self.b2 = nn.Parameter(torch.empty(heads, rank, config.head_dim))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        init.normal_(self.w1, std=self.init_std)
        init.normal_(self.w2, std=self.init_scale / math.sqrt(self.w2.shape[-1]))
        init.zeros_(self.b1)
        init.zeros_(self.b2)

    def forward(self, heads: Tensor, gamma: Tensor) -> Factor:
        """heads [B, n, H, d_h], gamma [n, F] or [B, n, F]; the output layer is left to the operator."""
        w_position, w_content = self.w1.split([self.position_size, heads.shape[-1]], dim=1)
        shared = linear(gamma, w_position, self.b1).unsqueeze(-2)  # [(B,) n, 1, w]
        return Factor(gelu(linear(heads, w_content) + shared), self.w2, self.b2)


class ITNetFactors(nn.Module):
    """K_ij^(h) = Phi_i^T Psi_j + bias, rank r plus a constant matrix per head.

    The constant is what ``b2`` is to the exact kernel: it starts as the identity, which no rank below d_h could hold,
    and costs next to nothing. Phi starts at ``kernel_init_scale``, so that the initial head is the mean of the signal.
    """

    def __init__(self, config: ITNetConfig):
        super().__init__()
        self.config = config
        self.phi = ITNetFactor(config, init_scale=config.kernel_init_scale)
        self.psi = ITNetFactor(config, init_scale=1.0)
        self.bias = nn.Parameter(torch.empty(config.num_attention_heads, config.head_dim, config.head_dim))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.phi.reset_parameters()
        self.psi.reset_parameters()
        init.copy_(self.bias, torch.eye(self.bias.shape[-1], device="cpu").expand(self.bias.shape))

    def forward(self, heads: Tensor, domain: Domain, state: LowRankState | None = None) -> tuple[Tensor, LowRankState]:
        """The integral of heads [B, n, H, d_h] with this kernel, [B, n, H, d_h], and the state after the last key."""
        phi, psi = self.factors(heads, domain)
        given = {"measure": domain.measure, "is_causal": self.config.is_causal, "state": state, "bias": self.bias}
        return low_rank_transform(heads, phi, psi, **given, return_state=True)

    def factors(self, heads: Tensor, domain: Domain) -> tuple[Factor, Factor]:
        """Phi and Psi at all positions."""
        gamma = domain.gamma(heads.dtype)
        return self.phi(heads, gamma), self.psi(heads, gamma)
