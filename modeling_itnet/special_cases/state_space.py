# SPDX-License-Identifier: Apache-2.0
"""Theorem 3: systems that are linear in their state are integrals with the causal kernel C Phi(t, s) B.

These are linear state space models, and Transformers' MambaMixer, whose coefficients depend on the signal (Theorem 3
(d)).
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, silu, softplus

from itnet_kernels import prefix_sum

from .convert import Conversion, from_module, register
from .kernel import Kernel, Pairs
from .operator import IntegralOperator


class Trajectory(NamedTuple):
    """Coefficients of z_t = A_t z_(t-1) + B_t u_t, y_t = C_t z_t along one signal. Batch axes may be 1."""

    a: Tensor  # [B, T, n, n]
    b: Tensor  # [B, T, n, d]
    c: Tensor  # [B, T, m, n]


class TransitionKernel(Kernel):
    """kappa(t, s) = 1[s <= t] C_t A_t A_(t-1) ... A_(s+1) B_s: trajectory-dependent, a matrix per pair.

    ``context`` of a call is the :class:`Trajectory`. Times are the indices 0..T-1.
    """

    def __init__(self, out_features: int, in_features: int, state_size: int):
        super().__init__()
        self.entries_per_pair = max(out_features * in_features, state_size**2)

    def forward(self, pairs: Pairs) -> Tensor:
        system: Trajectory = pairs.prepared
        rows, columns = pairs.rows, pairs.columns
        phi = transitions(system.a, rows, columns)  # [B, t_q, t_k, n, n]
        left = torch.einsum("bimn,bijnk->bijmk", system.c[:, rows], phi)
        return torch.einsum("bijmk,bjkd->bijmd", left, system.b[:, columns]).unsqueeze(3)


def transitions(a: Tensor, rows: slice, columns: slice) -> Tensor:
    """Returns Phi(t, s) = A_t ... A_(s+1), 0 for t < s, of one tile: a [B, T, n, n] -> [B, t_q, t_k, n, n].

    It takes one step of the recurrence Phi(t, s) = A_t Phi(t-1, s) at a time, for all s of the tile at once.
    """
    s = torch.arange(columns.start, columns.stop, device=a.device).view(-1, 1, 1)
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    phi, kept = a.new_zeros(len(a), len(s), *identity.shape), []
    for t in range(min(columns.start, rows.start), rows.stop):
        phi = a[:, t : t + 1] @ phi + (s == t) * identity
        if t >= rows.start:
            kept.append(phi)
    return torch.stack(kept, 1)


class ExponentialKernel(Kernel):
    """kappa(t, s) = 1[s <= t] C exp(A (t - s)) B at any times (Eq. rnn_kernel): A [n, n], B [n, d], C [m, n].

    Causality is the operator's: ``IntegralOperator(ExponentialKernel(a, b, c), is_causal=True)``, with the weights of
    a quadrature rule as measure.
    """

    depends_on_sample = False

    def __init__(self, a: Tensor, b: Tensor, c: Tensor):
        super().__init__()
        self.a, self.b, self.c = a, b, c
        self.entries_per_pair = max(a.numel(), len(c) * b.shape[1])

    def forward(self, pairs: Pairs) -> Tensor:
        time = (pairs.x[:, :, None, 0] - pairs.y[:, None, :, 0]).clamp(min=0)  # [B or 1, t_q, t_k]
        flow = torch.linalg.matrix_exp(time[..., None, None] * self.a)
        return (self.c @ flow @ self.b).unsqueeze(3)


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
        """Returns Abar [n, n] and Bbar [n, d]."""
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


@register(LinearStateSpace)
class LinearStateSpaceOperator(Conversion):
    """Computes a discretised linear SSM as an integral against C Abar^(t-s) Bbar, with W_theta = D.

    The transition kernel of constant coefficients is a function of t - s: a causal convolution (Remark ssm_conv).
    """

    def __init__(self, module: LinearStateSpace):
        super().__init__(module)
        kernel = TransitionKernel(*module.d.shape, len(module.a))
        self.integral = IntegralOperator(kernel, is_causal=True, measure="counting")

    def forward(self, u: Tensor) -> Tensor:
        module = self.module
        system = Trajectory(*(t.expand(1, u.shape[1], -1, -1) for t in (*module.discrete(), module.c)))
        signal = pad(u, (0, 0, 1, -1)) if module.delayed else u  # u_(t-1) enters at t
        return self.integral(signal, context=system) + u @ module.d.T


class SelectiveScanKernel(Kernel):
    """kappa(t, s) = 1[s <= t] sum_n C_n(t) exp(A_cn (S_c(t) - S_c(s))) Delta_c(s) B_n(s), diagonal in the channels c.

    S is the running sum of the time steps Delta, so that the exponential is the product of exp(Delta(tau) A) over
    s < tau <= t: the kernel depends on the signal between its two ends. S is summed in float64, because it grows with
    T and only its differences matter. ``context`` of a call is (A [c, n], Delta [B, T, c], B [B, T, n], C [B, T, n]).
    """

    def __init__(self, channels: int, state_size: int):
        super().__init__()
        self.entries_per_pair = channels * state_size

    def prepare(self, u_x, u_y, x, y, context):
        a, step, b, c = context
        return a, step, prefix_sum(step.double()), b, c

    def forward(self, pairs: Pairs) -> Tensor:
        a, step, total, b, c = pairs.prepared
        elapsed = total[:, pairs.rows].unsqueeze(2) - total[:, pairs.columns].unsqueeze(1)  # [B, t_q, t_k, c]
        decay = (elapsed.clamp(min=0).to(step.dtype).unsqueeze(-1) * a).exp()  # [B, t_q, t_k, c, n]
        weight = c[:, pairs.rows].unsqueeze(2) * b[:, pairs.columns].unsqueeze(1)  # C_n(t) B_n(s)
        kappa = torch.einsum("bijcn,bijn->bijc", decay, weight.to(decay.dtype))
        return (kappa * step[:, None, pairs.columns]).unsqueeze(3)


@register("transformers.models.mamba.modeling_mamba.MambaMixer")
class MambaMixerOperator(Conversion):
    """Computes the mixer: projection, a causal convolution as an integral, gate, selection, and the integral above.

    The mixer rounds A, D, B, the bias of Delta and the scanned signal to float32, whatever its dtype; so does this.
    """

    def __init__(self, module):
        super().__init__(module)
        self.convolution = from_module(module.conv1d)
        kernel = SelectiveScanKernel(module.intermediate_size, module.ssm_state_size)
        self.integral = IntegralOperator(kernel, is_causal=True, measure="counting")

    def forward(self, hidden_states: Tensor, cache_params=None, attention_mask=None, **kwargs) -> Tensor:
        if cache_params is not None:
            raise ValueError("`cache_params` cannot be used: the keys are those of this call; pass `use_cache=False`")
        module, length = self.module, hidden_states.shape[1]
        mask = 1 if attention_mask is None else attention_mask.unsqueeze(-1).to(hidden_states.dtype)
        signal, gate = module.in_proj(hidden_states * mask).chunk(2, dim=-1)
        signal = self.convolution(signal.transpose(1, 2))[..., :length].transpose(1, 2)
        signal = module.act(signal) * mask  # [B, T, c]
        sizes = [module.time_step_rank, module.ssm_state_size, module.ssm_state_size]
        step, b, c = module.x_proj(signal).split(sizes, dim=-1)
        step = softplus(step @ module.dt_proj.weight.T + _rounded(module.dt_proj.bias))  # Delta [B, T, c]
        a = -module.A_log.float().exp().to(signal.dtype)  # [c, n]
        out = self.integral(_rounded(signal), context=(a, step, _rounded(b), c)) + signal * _rounded(module.D)
        return module.out_proj(out * silu(gate))


def _rounded(tensor: Tensor) -> Tensor:
    return tensor.float().to(tensor.dtype)
