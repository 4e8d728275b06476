# SPDX-License-Identifier: Apache-2.0
r"""Theorem 3: nn.RNN, nn.LSTM and nn.GRU as integrals with trajectory-dependent kernels (App. proof_rnn).

Along the trajectory of a given signal, each recurrence is a linear system z_t = A_t z_(t-1) + B_t [u_t; 1]. Unrolled,
that is the integral of :class:`~modeling_itnet.special_cases.state_space.TransitionKernel`. There are two exact ways
to write an activation along the trajectory as a linear map of its argument a:

- by its tangent, tanh(a) = p a + q with p = tanh'(a) and q = tanh(a) - p a, the default. The rest q joins the bias in
  the column that multiplies the constant channel. The integral is as well conditioned as the recurrence itself.
- by its secant, tanh(a) = (tanh(a) / a) a, which leaves no rest, but may lose all digits: :func:`secant_slope`.

The paper's kernels have the tangent without the rest: :func:`tangent_slope`. docs/special_cases.md compares them.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from torch.nn.utils.rnn import PackedSequence

from .convert import Conversion, register
from .operator import IntegralOperator
from .state_space import Trajectory, TransitionKernel

Slope = Callable[[str, Tensor], Tensor]
Phi = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]  # `linearized` for one activation and slope
Weights = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]  # W_ih, W_hh, b_ih, b_hh (0 if there are none), W_hr
State = tuple[Tensor, ...]  # the hidden state [B, m], and what else the module carries on
Step = tuple[Tensor, Tensor, Tensor, State]  # A_t [B, n, n], B_t [B, n, d + 1], C_t [B, m, n], and the next state


def secant_slope(activation: str, a: Tensor) -> Tensor:
    """Returns phi(a) / a for phi in tanh, relu, linear; the limit at 0."""
    if activation == "linear":
        return torch.ones_like(a)
    if activation == "relu":
        return (a > 0).to(a.dtype)
    safe = a.where(a != 0, 1)
    return (safe.tanh() / safe).where(a != 0, 1)


def tangent_slope(activation: str, a: Tensor) -> Tensor:
    """Returns phi'(a), which the paper's kernels have where equality needs the secant slope."""
    return 1 - a.tanh().square() if activation == "tanh" else secant_slope(activation, a)


def linearized(name: str, slope: Slope | None, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns phi(a) and the p and q of phi(a) = p a + q, each with the shape of a, for phi in tanh, relu, linear.

    p is the tangent's slope if ``slope`` is None; otherwise p = slope(name, a) and q = 0.
    """
    value = a if name == "linear" else getattr(torch, name)(a)
    if slope is not None:
        return value, slope(name, a), torch.zeros_like(a)
    # p may be a constant for autograd: p a + (phi(a) - p a) is phi(a) for any p, with all its derivatives. The
    # derivatives of p would cancel, and leave rounding errors that grow as the square of the gradient does.
    p = tangent_slope(name, a).detach()
    return value, p, value - p * a


def rnn_step(u: Tensor, state: State, weights: Weights, phi: Phi) -> Step:
    """Computes h_t = phi(a_t) = p_t a_t + q_t with a_t = W_ih u_t + W_hh h_(t-1) + b.

    A_t = p_t W_hh,  B_t = [p_t W_ih, p_t b + q_t].
    """
    w_ih, w_hh, b_ih, b_hh, _ = weights
    (hidden,) = state
    pre = linear(u, w_ih, b_ih) + linear(hidden, w_hh, b_hh)
    value, slope, rest = phi(pre)  # [B, n]
    a = slope.unsqueeze(-1) * w_hh
    return a, _columns(slope, w_ih, b_ih + b_hh, rest), torch.eye(len(w_hh)).to(a).expand_as(a), (value,)


def lstm_step(u: Tensor, state: State, weights: Weights, phi: Phi) -> Step:
    """Takes tanh(g_t) = p_t g_t + q_t for the candidate and tanh(c_t) = P_t c_t + Q_t, and the gates as they are:

    c_t = f_t c_(t-1) + i_t (p_t g_t + q_t),  g_t = W_ig u_t + W_hg h_(t-1) + b_g,  h_t = W_hr (o_t (P_t c_t + Q_t)).

    The state of the linear system is z = [c; 1], whose last entry carries the rests Q_t from the output h_t = C_t z_t
    to the next candidate. ``state`` is h, c and C.
    """
    w_ih, w_hh, b_ih, b_hh, w_hr = weights
    hidden, cell, output = state  # output: C_(t-1) [B, m, n + 1]
    gates = (linear(u, w_ih, b_ih) + linear(hidden, w_hh, b_hh)).chunk(4, dim=-1)
    i, f, o = (gates[k].sigmoid() for k in (0, 1, 3))
    value, slope, rest = phi(gates[2])
    keep = pad(torch.diag_embed(f), (0, 1)) + (i * slope).unsqueeze(-1) * (w_hh.chunk(4)[2] @ output)
    one = pad(torch.ones_like(keep[:, :1, :1]), (cell.shape[-1], 0))  # stays as it is
    columns = _columns(i * slope, w_ih.chunk(4)[2], (b_ih + b_hh).chunk(4)[2], i * rest)
    cell = f * cell + i * value
    value, slope, rest = phi(cell)
    output = torch.cat([torch.diag_embed(o * slope), (o * rest).unsqueeze(-1)], -1)  # [B, n, n + 1]
    hidden = o * value
    if w_hr is not None:
        output, hidden = w_hr @ output, linear(hidden, w_hr)
    return torch.cat([keep, one], 1), pad(columns, (0, 0, 0, 1)), output, (hidden, cell, output)


def gru_step(u: Tensor, state: State, weights: Weights, phi: Phi) -> Step:
    """Computes h_t = z_t h_(t-1) + (1 - z_t) (p_t a_t + q_t) with a_t = W_in u_t + b_in + r_t (W_hn h_(t-1) + b_hn).

    A_t = diag(z_t) + diag((1 - z_t) p_t r_t) W_hn,
    B_t = [(1 - z_t) p_t W_in, (1 - z_t) (p_t (b_in + r_t b_hn) + q_t)].

    z_t is torch's update gate, which keeps the state; the paper's is 1 - z_t. The gates are taken as they are.
    """
    w_ih, w_hh, b_ih, b_hh, _ = weights
    (hidden,) = state
    from_input, from_state = linear(u, w_ih, b_ih).chunk(3, -1), linear(hidden, w_hh, b_hh).chunk(3, -1)
    r, z = ((from_input[k] + from_state[k]).sigmoid() for k in (0, 1))
    pre = from_input[2] + r * from_state[2]
    value, slope, rest = phi(pre)
    write = (1 - z) * slope
    a = torch.diag_embed(z) + (write * r).unsqueeze(-1) * w_hh.chunk(3)[2]
    b = _columns(write, w_ih.chunk(3)[2], b_ih.chunk(3)[2] + r * b_hh.chunk(3)[2], (1 - z) * rest)
    return a, b, torch.eye(a.shape[-1]).to(a).expand_as(a), ((1 - z) * value + z * hidden,)


def unroll(step: Callable[..., Step], u: Tensor, weights: Weights, state: State, phi: Phi):
    """Returns the linear system along u [B, T, d], and the hidden states [B, T, m].

    The system starts from 0: A_0 z_(-1), what the initial state adds to z_0, is part of the constant column of B_0.
    """
    z = state[-1]
    if step is lstm_step:
        hidden, cell = state
        z = pad(cell, (0, 1), value=1.0)
        state = hidden, cell, pad(hidden.unsqueeze(-1), (cell.shape[-1], 0))  # C_(-1) z_(-1) = h_(-1)
    systems, states = [], []
    for u_t in u.unbind(1):
        a, b, c, state = step(u_t, state, weights, phi)
        if not systems:
            b = torch.cat([b[..., :-1], b[..., -1:] + a @ z.unsqueeze(-1)], -1)
        systems.append((a, b, c))
        states.append(state[0])
    return Trajectory(*(torch.stack(parts, 1) for parts in zip(*systems, strict=True))), torch.stack(states, 1)


@register(nn.RNN, nn.LSTM, nn.GRU)
class RecurrentOperator(Conversion):
    """Computes nn.RNN, nn.LSTM or nn.GRU as one integral per layer and direction; returns all hidden states.

    ``nonlinearity="linear"`` takes the weights of an nn.RNN without its activation (Theorem 3 (b)). ``slope``, a
    function such as :func:`secant_slope` or :func:`tangent_slope`, takes the place of the tangent and leaves no rest.
    """

    num_outputs = 2

    def __init__(self, module: nn.RNNBase, *, nonlinearity: str | None = None, slope: Slope | None = None):
        super().__init__(module)
        is_known = isinstance(module, nn.RNN) and nonlinearity in ("linear", "tanh", "relu")
        if nonlinearity is not None and not is_known:
            raise ValueError(
                f"`nonlinearity` ({nonlinearity!r}) is for nn.RNN, and must be 'linear', 'tanh' or 'relu'; "
                f"the module is {type(module).__name__}"
            )
        self.slope = slope
        self.phi = partial(linearized, nonlinearity or getattr(module, "nonlinearity", "tanh"), slope)
        self.step = {"LSTM": lstm_step, "GRU": gru_step}.get(module.mode, rnn_step)

    def dropout(self) -> float:
        return self.module.dropout if self.module.num_layers > 1 else 0.0

    def forward(self, input: Tensor, hx: Tensor | tuple[Tensor, Tensor] | None = None) -> Tensor:
        self.check_dropout()
        module = self.module
        if isinstance(input, PackedSequence):
            raise TypeError("`input` is a PackedSequence: pad it, as the domain of an integral is one for the batch")
        u = self.with_batch_first(input)  # [B, T, d]
        states = self._initial_states(hx, u, input.dim() == 3)
        for layer in range(module.num_layers):
            out = [self._integrate(u, self._weights(layer, ""), states.pop(0))]
            if module.bidirectional:
                out.append(self._integrate(u.flip(1), self._weights(layer, "_reverse"), states.pop(0)).flip(1))
            u = torch.cat(out, -1)
        return self.as_given(u, input)

    def _integrate(self, u: Tensor, weights: Weights, state: State) -> Tensor:
        """Returns the sum over s <= t of kappa(t, s; u) [u_s; 1]: [B, T, d] -> [B, T, m]."""
        system, states = unroll(self.step, u, weights, state, self.phi)
        kernel = TransitionKernel(system.c.shape[2], system.b.shape[3], system.a.shape[2])
        operator = IntegralOperator(kernel, is_causal=True, measure="counting")
        integral = operator(pad(u, (0, 1), value=1.0), context=system)  # App. proof_rnn, augmented input
        self._check_conditioning(integral.detach(), states.detach())
        return integral

    def _check_conditioning(self, integral: Tensor, states: Tensor) -> None:
        """Raises where the products of A_t exceed 1 / eps: rounding errors grow as they do, in the module itself too.

        The recurrence is then chaotic, and neither it nor its integral has any correct digits.
        """
        if self.slope is not None or not states.numel():
            return
        error, scale = float((integral - states).abs().max()), float(states.abs().max())
        tolerance = max(0.01, 64 * torch.finfo(states.dtype).eps)  # half precision has few digits to lose
        if states.isfinite().all() and not error <= tolerance * scale:
            raise ArithmeticError(
                f"{type(self.module).__name__} amplifies rounding errors too much for {states.dtype} over "
                f"{states.shape[1]} steps: its integral is off by {error:.1e} at states of size {scale:.1e}. Convert "
                "it in a higher precision (`.double()`), or integrate shorter signals"
            )

    def _weights(self, layer: int, suffix: str) -> Weights:
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
        w_ih, w_hh, *biases, w_hr = (getattr(self.module, f"{name}_l{layer}{suffix}", None) for name in names)
        return w_ih, w_hh, *(w_ih.new_zeros(len(w_ih)) if bias is None else bias for bias in biases), w_hr

    def _initial_states(self, hx, u: Tensor, batched: bool) -> list[State]:
        """Returns per layer and direction the hidden state and the cell of an LSTM, [B, size] each; 0 if not given."""
        module, is_lstm = self.module, self.module.mode == "LSTM"
        if hx is None:
            count = module.num_layers * (2 if module.bidirectional else 1)
            sizes = [module.proj_size or module.hidden_size] + [module.hidden_size] * is_lstm
            return [tuple(u.new_zeros(len(u), size) for size in sizes)] * count
        states = hx if is_lstm else (hx,)  # [layers * directions, B, size] each, or without B
        return list(zip(*(state if batched else state.unsqueeze(1) for state in states), strict=True))


def _columns(slope: Tensor, matrix: Tensor, constant: Tensor, rest: Tensor) -> Tensor:
    """Returns [p W, p constant + rest] [B, n, d + 1] of p, rest [B, n], W [n, d], constant [n] or [B, n]."""
    return torch.cat([slope.unsqueeze(-1) * matrix, (slope * constant + rest).unsqueeze(-1)], -1)
