# SPDX-License-Identifier: Apache-2.0
"""Two modules that torch.nn does not have, by their fast algorithms: what the conversions are compared with."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import elu

from itnet_kernels import prefix_sum


class LinearAttention(nn.Module):
    """sum_y phi(q) . phi(k) v / sum_y phi(q) . phi(k) with phi = elu + 1, in O(n): the sums over y are taken first.

    Katharopoulos et al., 2020: "Transformers are RNNs". u [B, n, d] -> [B, n, d].
    """

    def __init__(self, embed_dim: int, num_heads: int, is_causal: bool = False):
        super().__init__()
        if embed_dim % num_heads:
            raise ValueError(f"`embed_dim` ({embed_dim}) must be a multiple of `num_heads` ({num_heads})")
        self.num_heads, self.is_causal = num_heads, is_causal
        self.query, self.key, self.value, self.output = (nn.Linear(embed_dim, embed_dim) for _ in range(4))

    def heads(self, u: Tensor) -> list[Tensor]:
        """Queries, keys and values: [B, n, H, c] each."""
        return [f(u).unflatten(2, (self.num_heads, -1)) for f in (self.query, self.key, self.value)]

    def forward(self, u: Tensor) -> Tensor:
        queries, keys, values = self.heads(u)
        queries, keys = elu(queries) + 1, elu(keys) + 1
        outer = keys.unsqueeze(-1) * values.unsqueeze(-2)  # [B, n, H, c, c]
        if self.is_causal:
            outer, keys = prefix_sum(outer), prefix_sum(keys)
        else:
            outer, keys = outer.sum(1, keepdim=True), keys.sum(1, keepdim=True)
        out = (queries.unsqueeze(-2) @ outer).squeeze(-2) / (queries * keys).sum(-1, keepdim=True)
        return self.output(out.flatten(2))


class LinearStateSpace(nn.Module):
    """h_t = Abar h_(t-1) + Bbar u_t, y_t = C h_t + D u_t: a discretised linear SSM, as a recurrence.

    - ``"euler"``: Abar = I + step A, Bbar = step B
    - ``"zoh"``: Abar = exp(step A), Bbar = A^-1 (exp(step A) - I) B, for any A: the integral of exp(tA) B over a step

    ``delayed`` has u_t enter h_(t+1) instead, as Eq. euler of the paper does. u [B, n, d] -> [B, n, d'].
    """

    def __init__(
        self,
        state_size: int,
        in_features: int,
        out_features: int,
        step: float = 0.1,
        discretization: Literal["euler", "zoh"] = "zoh",
        delayed: bool = False,
    ):
        super().__init__()
        if discretization not in ("euler", "zoh"):
            raise ValueError(f"`discretization` ({discretization!r}) must be 'euler' or 'zoh'")
        self.step, self.discretization, self.delayed = step, discretization, delayed
        skew = torch.randn(state_size, state_size) / state_size**0.5
        self.a = nn.Parameter(skew - skew.T - torch.eye(state_size))  # stable: eigenvalues with real part -1
        self.b = nn.Parameter(torch.randn(state_size, in_features) / in_features**0.5)
        self.c = nn.Parameter(torch.randn(out_features, state_size) / state_size**0.5)
        self.d = nn.Parameter(torch.randn(out_features, in_features) / in_features**0.5)

    def discrete(self) -> tuple[Tensor, Tensor]:
        """Abar [n, n] and Bbar [n, d]."""
        if self.discretization == "euler":
            return torch.eye(len(self.a)).to(self.a) + self.step * self.a, self.step * self.b
        # exp of [[A, B], [0, 0]] step holds both in its first row, without an inverse of A.
        size, inputs = self.b.shape
        block = torch.cat([torch.cat([self.a, self.b], 1), self.a.new_zeros(inputs, size + inputs)])
        block = torch.linalg.matrix_exp(block * self.step)
        return block[:size, :size], block[:size, size:]

    def forward(self, u: Tensor) -> Tensor:
        a, b = self.discrete()
        state, out = u.new_zeros(len(u), len(a)), []
        for u_t in u.unbind(1):
            before, state = state, state @ a.T + u_t @ b.T
            out.append((before if self.delayed else state) @ self.c.T)
        return torch.stack(out, 1) + u @ self.d.T
