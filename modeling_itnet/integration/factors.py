# SPDX-License-Identifier: Apache-2.0
"""The factors of a low-rank kernel (§lowrank_impl of the paper)."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear
from transformers import initialization as init

from configuration_itnet import ITNetConfig
from itnet_kernels import (
    Coordinates,
    Factor,
    LowRankState,
    low_rank_matrix_transform,
    low_rank_transform,
    sampled_low_rank_matrix_transform,
    sampled_low_rank_transform,
)

from ..domain import Domain


class ITNetFactor(nn.Module):
    """Phi or Psi: W2 GELU(W1 [gamma(x); u^(h)] + b1) + b2. The heads share W1.

    At every position and per head it is a rank x d_h matrix in the vector form, and ``rank`` numbers, f or g, in the
    matrix form. The latter start close to 1: small M make the kernel small, and the gradient of M is not.
    """

    def __init__(self, config: ITNetConfig, init_scale: float):
        super().__init__()
        self.position_size = config.position_size
        self.init_std, self.init_scale = config.initializer_range, init_scale
        self.is_matrix = config.factor_form == "matrix"
        width = config.factor_hidden_size
        outputs = (config.num_attention_heads, config.rank, *(() if self.is_matrix else (config.head_dim,)))
        self.w1 = nn.Parameter(torch.empty(width, config.position_size + config.head_dim))
        self.b1 = nn.Parameter(torch.empty(width))
        self.w2 = nn.Parameter(torch.empty(*outputs, width))
        self.b2 = nn.Parameter(torch.empty(outputs))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        init.normal_(self.w1, std=self.init_std)
        init.normal_(self.w2, std=self.init_scale / math.sqrt(self.w2.shape[-1]))
        init.zeros_(self.b1)
        init.constant_(self.b2, float(self.is_matrix))

    def forward(self, heads: Tensor, gamma: Tensor) -> Factor | Tensor:
        """Maps heads [B, n, H, d_h] and gamma [n, F] or [B, n, F] to f or g [B, n, H, r], or in the vector form Phi or
        Psi, whose output layer is left to the operator."""
        w_position, w_content = self.w1.split([self.position_size, heads.shape[-1]], dim=1)
        shared = linear(gamma, w_position, self.b1).unsqueeze(-2)  # [(B,) n, 1, w]
        hidden = gelu(linear(heads, w_content) + shared)
        if self.is_matrix:
            return torch.einsum("bnhk,hrk->bnhr", hidden, self.w2) + self.b2
        return Factor(hidden, self.w2, self.b2)


class ITNetFactors(nn.Module):
    r"""The low-rank kernel of all heads, a constant matrix per head included.

        factor_form="vector":  K_ij = sum_r d_ij[r] Phi_i[r] Psi_j[r]^T + bias     keys amount to r numbers
        factor_form="matrix":  K_ij = sum_r d_ij[r] f_i[r] g_j[r] M_r + bias       keys amount to r x d_h numbers

    where d_ij[r] is 1, or with ``factor_decay`` e^(-lambda_r (x_i - x_j)).

    The constant is what ``b2`` is to the exact kernel: it starts as the identity, which no rank below d_h could hold,
    and costs next to nothing. Phi, or M, starts at ``kernel_init_scale``, so that the initial head is the mean of the
    signal. The rates lambda start between 1 and 2 pi ``fourier_scale``, evenly in their logarithm, from a decay over
    the unit of length to one over what gamma(x) resolves.
    """

    def __init__(self, config: ITNetConfig):
        super().__init__()
        self.config = config
        heads, size = config.num_attention_heads, config.head_dim
        self.is_matrix = config.factor_form == "matrix"
        self.phi = ITNetFactor(config, init_scale=1.0 if self.is_matrix else config.kernel_init_scale)
        self.psi = ITNetFactor(config, init_scale=1.0)
        self.matrices = nn.Parameter(torch.empty(heads, config.rank, size, size)) if self.is_matrix else None
        self.log_decay = nn.Parameter(torch.empty(heads, config.rank)) if config.factor_decay else None
        self.bias = nn.Parameter(torch.empty(heads, size, size))

    def reset_parameters(self) -> None:
        self.phi.reset_parameters()
        self.psi.reset_parameters()
        self.reset_own_parameters(self.config)

    @torch.no_grad()
    def reset_own_parameters(self, config: ITNetConfig) -> None:
        """Leaves the two factors alone, which a model initialises by themselves."""
        init.copy_(self.bias, torch.eye(self.bias.shape[-1], device="cpu").expand(self.bias.shape))
        if self.matrices is not None:
            init.normal_(self.matrices, std=config.kernel_init_scale / math.sqrt(self.matrices[0, :, 0].numel()))
        if self.log_decay is not None:
            self.reset_decay()

    @torch.no_grad()
    def reset_decay(self) -> None:
        fastest = math.log(2 * math.pi * max(self.config.fourier_scale, 1))
        rates = torch.linspace(0, fastest, self.log_decay.shape[1], device="cpu")
        init.copy_(self.log_decay, rates.expand(self.log_decay.shape))

    def forward(
        self,
        heads: Tensor,
        domain: Domain,
        *,
        queries: Tensor | None = None,
        query_domain: Domain | Coordinates | None = None,
        state: LowRankState | None = None,
    ) -> tuple[Tensor, LowRankState]:
        """Returns the integral of heads [B, n, H, d_h] with this kernel, of the same shape, and the state after it.

        The queries are the keys, unless ``queries`` [B, m, H, d_h] with a domain of their own are given. Those of a
        causal operator are the last of its keys.
        """
        phi, psi = self.factors(heads, domain, queries, query_domain)
        given = self.settings(domain) | {"state": state, "bias": self.bias, "return_state": True}
        if self.is_matrix:
            return low_rank_matrix_transform(heads, phi, psi, self.matrices, **given)
        return low_rank_transform(heads, phi, psi, **given)

    def sampled(self, heads: Tensor, domain: Domain, indices: Tensor, coefficients: Tensor) -> Tensor:
        """Returns the sum over chosen keys of each query: indices and coefficients [B, n, M] -> [B, n, H, d_h]."""
        if self.log_decay is not None:
            raise ValueError(
                "`factor_decay` (True) does not go with edges: a kernel decays along one line of positions"
            )
        phi, psi = self.factors(heads, domain)
        given = {"indices": indices, "coefficients": coefficients, "bias": self.bias}
        if self.is_matrix:
            return sampled_low_rank_matrix_transform(heads, phi, psi, self.matrices, **given)
        return sampled_low_rank_transform(heads, phi, psi, **given)

    def factors(
        self,
        heads: Tensor,
        domain: Domain,
        queries: Tensor | None = None,
        query_domain: Domain | Coordinates | None = None,
    ) -> tuple[Factor, Factor] | tuple[Tensor, Tensor]:
        """Returns Phi at all queries and Psi at all keys, or f and g."""
        if (queries is None) != (query_domain is None):
            raise ValueError("`queries` and `query_domain` go together: a query domain needs features and positions")
        gamma = domain.gamma(heads.dtype)
        if queries is None:
            return self.phi(heads, gamma), self.psi(heads, gamma)
        where = query_domain if isinstance(query_domain, Coordinates) else query_domain.coordinates
        return self.phi(queries, where.features_in(queries.dtype)), self.psi(heads, gamma)

    def settings(self, domain: Domain) -> dict[str, Any]:
        """Returns what the operator takes beside features and factors."""
        given = {"measure": domain.measure, "is_causal": self.config.is_causal, "backend": self.config.backend}
        if self.log_decay is None:
            return given
        return given | {"decay": self.log_decay.exp(), "positions": domain.coordinates}
