# SPDX-License-Identifier: Apache-2.0
r"""Theorem 3: nn.RNN, nn.LSTM and nn.GRU as integrals with trajectory-dependent kernels (App. proof_rnn).

Along the trajectory of a given signal, each recurrence is a linear system z_t = A_t z_(t-1) + B_t [u_t; 1]. Unrolled,
that is the integral of :class:`~modeling_itnet.special_cases.state_space.TransitionKernel`. There are two exact ways
to write an activation along the trajectory as a linear map of its argument a:

- by its tangent, tanh(a) = p a + q with p = tanh'(a) and q = tanh(a) - p a. The rest q joins the bias in the column
  that multiplies the constant channel. For nn.RNN the products of A_t are then the derivatives dh_t / dh_s, so that
  the integral is as well conditioned as the recurrence itself. This is the default.
- by its secant, tanh(a) = (tanh(a) / a) a, which leaves no rest. The products of secant slopes can grow exponentially
  where those of tangents do not (W_hh with a spectral radius of 1.5 and 200 steps: 1e16 against 1e2), and the
  integral then loses all digits. :func:`secant_slope` asks for it.

The paper's kernels have the tangent without the rest: :func:`tangent_slope` asks for that, to measure the difference.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.utils.rnn import PackedSequence

from .convert import Conversion, register
from .operator import IntegralOperator
from .state_space import Trajectory, TransitionKernel

Slope = Callable[[str, Tensor], Tensor]
Weights = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]  # W_ih, W_hh, b_ih, b_hh (0 if there are none), W_hr
Unrolled = tuple[Trajectory, Tensor]  # the linear system, and the hidden states [B, T, m] along which it was made


def secant_slope(activation: str, a: Tensor) -> Tensor:
    """phi(a) / a for phi in tanh, relu, linear; the limit at 0."""
    if activation == "linear":
        return torch.ones_like(a)
    if activation == "relu":
        return (a > 0).to(a.dtype)
    safe = a.where(a != 0, 1)
    return (safe.tanh() / safe).where(a != 0, 1)


def tangent_slope(activation: str, a: Tensor) -> Tensor:
    """phi'(a): what the paper's kernels have where equality needs the secant slope."""
    return 1 - a.tanh().square() if activation == "tanh" else secant_slope(activation, a)


@dataclass(frozen=True)
class Activation:
    """phi(a) = p a + q along a trajectory: the slope p and the rest q of an activation at the values a."""

    name: str  # tanh, relu or linear
    slope: Slope | None = None  # None for the tangent with its rest; otherwise p = slope(name, a) and q = 0

    def __call__(self, a: Tensor) -> Tensor:
        return {"tanh": torch.tanh, "relu": torch.relu, "linear": lambda x: x}[self.name](a)

    def line(self, a: Tensor) -> tuple[Tensor, Tensor]:
        """p and q, both with the shape of a."""
        if self.slope is not None:
            return self.slope(self.name, a), torch.zeros_like(a)
        # p may be a constant for autograd: p a + (phi(a) - p a) is phi(a) for any p, with all its derivatives. The
        # derivatives of p would cancel, and leave rounding errors that grow as the square of the gradient does.
        slope = tangent_slope(self.name, a).detach()
        return slope, self(a) - slope * a


def rnn_trajectory(u: Tensor, weights: Weights, state: tuple[Tensor, ...], phi: Activation) -> Unrolled:
    """h_t = phi(a_t) = p_t a_t + q_t with a_t = W_ih u_t + W_hh h_(t-1) + b.

    A_t = p_t W_hh,  B_t = [p_t W_ih, p_t b + q_t].
    """
    w_ih, w_hh, b_ih, b_hh, _ = weights
    (hidden,) = state
    a, b, states = [], [], []
    for t, u_t in enumerate(u.unbind(1)):
        pre = linear(u_t, w_ih, b_ih) + linear(hidden, w_hh, b_hh)
        slope, rest = phi.line(pre)  # [B, n]
        constant = b_ih + b_hh + (linear(hidden, w_hh) if t == 0 else 0)
        a.append(slope.unsqueeze(-1) * w_hh)
        b.append(_columns(slope, w_ih, constant, rest))
        hidden = phi(pre)
        states.append(hidden)
    identity = torch.eye(w_hh.shape[0], dtype=u.dtype, device=u.device).expand(len(u), len(a), -1, -1)
    return Trajectory(torch.stack(a, 1), torch.stack(b, 1), identity), torch.stack(states, 1)


def lstm_trajectory(u: Tensor, weights: Weights, state: tuple[Tensor, ...], phi: Activation) -> Unrolled:
    """With tanh(g_t) = p_t g_t + q_t for the candidate and tanh(c_t) = P_t c_t + Q_t, and the gates as they are,

    c_t = f_t c_(t-1) + i_t (p_t g_t + q_t),  g_t = W_ig u_t + W_hg h_(t-1) + b_g,  h_t = W_hr (o_t (P_t c_t + Q_t)).

    The state is [c; 1], whose last entry carries the rests Q_t from the output to the next candidate; it is 0 before
    the first step, which adds 1 to it, and stays 1.
    """
    w_ih, w_hh, b_ih, b_hh, w_hr = weights
    hidden, cell = state
    w_ig, w_hg = w_ih.chunk(4)[2], w_hh.chunk(4)[2]
    bias = (b_ih + b_hh).chunk(4)[2]
    size = cell.shape[-1]
    output = None  # C_(t-1) [B, m, n + 1]
    a, b, c, states = [], [], [], []
    for t, u_t in enumerate(u.unbind(1)):
        gates = (linear(u_t, w_ih, b_ih) + linear(hidden, w_hh, b_hh)).chunk(4, dim=-1)
        i, f, o = (gates[k].sigmoid() for k in (0, 1, 3))
        slope, rest = phi.line(gates[2])
        keep = nn.functional.pad(torch.diag_embed(f), (0, 1, 0, 1))  # diag(f_t, 0) [B, n + 1, n + 1]
        if t == 0:
            # The initial state is part of the constant; what multiplies z_(-1) = 0 does not matter.
            column = _columns(i * slope, w_ig, bias + linear(hidden, w_hg), i * rest + f * cell)
            one = torch.ones_like(column[:, :1, -1])
        else:
            keep = keep + nn.functional.pad((i * slope).unsqueeze(-1) * (w_hg @ output), (0, 0, 0, 1))
            column = _columns(i * slope, w_ig, bias, i * rest)
            one = torch.zeros_like(column[:, :1, -1])
            keep = keep + nn.functional.pad(torch.ones_like(keep[:, :1, :1]), (size, 0, size, 0))
        a.append(keep)
        b.append(torch.cat([column, nn.functional.pad(one.unsqueeze(-1), (column.shape[-1] - 1, 0))], 1))
        cell = f * cell + i * phi(gates[2])
        slope, rest = phi.line(cell)
        output = torch.cat([torch.diag_embed(o * slope), (o * rest).unsqueeze(-1)], -1)  # [B, n, n + 1]
        hidden = o * phi(cell)
        if w_hr is not None:
            output, hidden = w_hr @ output, linear(hidden, w_hr)
        c.append(output)
        states.append(hidden)
    return Trajectory(torch.stack(a, 1), torch.stack(b, 1), torch.stack(c, 1)), torch.stack(states, 1)


def gru_trajectory(u: Tensor, weights: Weights, state: tuple[Tensor, ...], phi: Activation) -> Unrolled:
    """h_t = z_t h_(t-1) + (1 - z_t) (p_t a_t + q_t) with a_t = W_in u_t + b_in + r_t (W_hn h_(t-1) + b_hn).

    A_t = diag(z_t) + diag((1 - z_t) p_t r_t) W_hn,
    B_t = [(1 - z_t) p_t W_in, (1 - z_t) (p_t (b_in + r_t b_hn) + q_t)].

    z_t is torch's update gate, which keeps the state; the paper's is 1 - z_t. The gates are taken as they are.
    """
    w_ih, w_hh, b_ih, b_hh, _ = weights
    (hidden,) = state
    w_in, w_hn = w_ih.chunk(3)[2], w_hh.chunk(3)[2]
    a, b, states = [], [], []
    for t, u_t in enumerate(u.unbind(1)):
        from_input = linear(u_t, w_ih, b_ih).chunk(3, dim=-1)
        from_state = linear(hidden, w_hh, b_hh).chunk(3, dim=-1)
        r, z = ((from_input[k] + from_state[k]).sigmoid() for k in (0, 1))
        pre = from_input[2] + r * from_state[2]
        slope, rest = phi.line(pre)
        write = (1 - z) * slope
        a.append(torch.diag_embed(z) + (write * r).unsqueeze(-1) * w_hn)
        initial = (a[0] @ hidden.unsqueeze(-1)).squeeze(-1) if t == 0 else 0  # part of the constant
        b.append(_columns(write, w_in, b_ih.chunk(3)[2] + r * b_hh.chunk(3)[2], (1 - z) * rest + initial))
        hidden = (1 - z) * phi(pre) + z * hidden
        states.append(hidden)
    identity = torch.eye(w_hn.shape[0], dtype=u.dtype, device=u.device).expand(len(u), len(a), -1, -1)
    return Trajectory(torch.stack(a, 1), torch.stack(b, 1), identity), torch.stack(states, 1)


class RecurrentOperator(Conversion):
    """nn.RNN, nn.LSTM or nn.GRU as one integral per layer and direction; returns the sequence of hidden states.

    Args:
        module: the recurrent module.
        nonlinearity: for nn.RNN, "linear" takes its weights without the activation (Theorem 3 (b)).
        slope: None for tangents with their rests, which is exact and as well conditioned as the module. A function
            such as :func:`secant_slope` or :func:`tangent_slope` is used in the place of the tangent, without a rest.
    """

    num_outputs = 2

    def __init__(self, module: nn.RNNBase, *, nonlinearity: str | None = None, slope: Slope | None = None):
        super().__init__(module)
        known = ("linear", "tanh", "relu") if isinstance(module, nn.RNN) else ()
        if nonlinearity is not None and nonlinearity not in known:
            raise ValueError(
                f"`nonlinearity` ({nonlinearity!r}) is for nn.RNN, and must be 'linear', 'tanh' or 'relu'; "
                f"the module is {type(module).__name__}"
            )
        self.activation = Activation(nonlinearity or getattr(module, "nonlinearity", "tanh"), slope)
        self.trajectory = {"LSTM": lstm_trajectory, "GRU": gru_trajectory}.get(module.mode, rnn_trajectory)

    def dropout(self) -> float:
        return self.module.dropout if self.module.num_layers > 1 else 0.0

    def forward(self, input: Tensor, hx: Tensor | tuple[Tensor, Tensor] | None = None) -> Tensor:
        self.check_dropout()
        module = self.module
        if isinstance(input, PackedSequence):
            raise TypeError("`input` is a PackedSequence: pad it, as the domain of an integral is one for the batch")
        batched = input.dim() == 3
        u = input if batched else input.unsqueeze(1)
        u = u if batched and module.batch_first else u.transpose(0, 1)  # [B, T, d]
        directions = 2 if module.bidirectional else 1
        states = self._initial_states(hx, u, batched)
        for layer in range(module.num_layers):
            out = []
            for direction in range(directions):
                index = layer * directions + direction
                signal = u.flip(1) if direction else u
                part = self._integrate(signal, self._weights(layer, direction), tuple(s[index] for s in states))
                out.append(part.flip(1) if direction else part)
            u = torch.cat(out, -1)
        if not batched:
            return u.squeeze(0)
        return u if module.batch_first else u.transpose(0, 1)

    def _integrate(self, u: Tensor, weights: Weights, state: tuple[Tensor, ...]) -> Tensor:
        """Sum over s <= t of kappa(t, s; u) [u_s; 1]: [B, T, d] -> [B, T, m]."""
        system, states = self.trajectory(u, weights, state, self.activation)
        kernel = TransitionKernel(system.c.shape[2], system.b.shape[3], system.a.shape[2])
        operator = IntegralOperator(kernel, is_causal=True, measure="counting")
        augmented = torch.cat([u, u.new_ones(*u.shape[:2], 1)], -1)  # App. proof_rnn, augmented input
        times = torch.arange(u.shape[1], device=u.device).unsqueeze(1)
        integral = operator(augmented, times, context=system)
        self._check_conditioning(integral.detach(), states.detach())
        return integral

    def _check_conditioning(self, integral: Tensor, states: Tensor) -> None:
        """Raises where the integral and the states that its kernel was made along have lost each other.

        The module's own rounding errors grow as the products of A_t do: where these exceed 1 / eps, the recurrence is
        chaotic, and neither it nor its integral has any correct digits.
        """
        if self.activation.slope is not None or not states.numel():
            return
        error, scale = float((integral - states).abs().max()), float(states.abs().max())
        tolerance = max(0.01, 64 * torch.finfo(states.dtype).eps)  # half precision has few digits to lose
        if states.isfinite().all() and not error <= tolerance * scale:
            raise ArithmeticError(
                f"{type(self.module).__name__} amplifies rounding errors too much for {states.dtype} over "
                f"{states.shape[1]} steps: its integral is off by {error:.1e} at states of size {scale:.1e}. Convert "
                "it in a higher precision (`.double()`), or integrate shorter signals"
            )

    def _weights(self, layer: int, direction: int) -> Weights:
        suffix = f"_l{layer}" + "_reverse" * direction
        found = {name: getattr(self.module, name + suffix, None) for name in
                 ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")}  # fmt: skip
        w_ih, w_hh, b_ih, b_hh, w_hr = found.values()
        zero = w_ih.new_zeros(len(w_ih))
        return w_ih, w_hh, zero if b_ih is None else b_ih, zero if b_hh is None else b_hh, w_hr

    def _initial_states(self, hx, u: Tensor, batched: bool) -> tuple[Tensor, ...]:
        """Hidden state, and the cell of an LSTM: [layers * directions, B, size] each; zeros if not given."""
        module = self.module
        count = module.num_layers * (2 if module.bidirectional else 1)
        is_lstm = module.mode == "LSTM"
        if hx is None:
            sizes = [module.proj_size or module.hidden_size] + [module.hidden_size] * is_lstm
            return tuple(u.new_zeros(count, len(u), size) for size in sizes)
        states = tuple(hx) if is_lstm else (hx,)
        return tuple(state if batched else state.unsqueeze(1) for state in states)


def _columns(slope: Tensor, matrix: Tensor, constant: Tensor, rest: Tensor) -> Tensor:
    """[p W, p constant + rest] for each sample: p, rest [B, n], W [n, d], constant [n] or [B, n] -> [B, n, d + 1]."""
    return torch.cat([slope.unsqueeze(-1) * matrix, (slope * constant + rest).unsqueeze(-1)], -1)


for _module_class in (nn.RNN, nn.LSTM, nn.GRU):
    register(_module_class)(RecurrentOperator)
