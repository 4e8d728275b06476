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
r"""Theorem 3: nn.RNN, nn.LSTM and nn.GRU as integrals with trajectory-dependent kernels (App. proof_rnn).

Along the trajectory of a given signal, each recurrence is a linear system z_t = A_t z_(t-1) + B_t [u_t; 1], because an
activation is a product with its secant slope: tanh(a) = (tanh(a) / a) a. Unrolled, that is the integral of
:class:`~modeling_itnet.special_cases.state_space.TransitionKernel`, exactly. The paper has tanh'(a) in the place of
tanh(a) / a, which makes it a linearisation; :func:`tangent_slope` is there to measure by how much.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.utils.rnn import PackedSequence

from .convert import Conversion, register
from .operator import IntegralOperator
from .state_space import Trajectory, TransitionKernel

Slope = Callable[[str, Tensor], Tensor]
Weights = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]  # W_ih, W_hh, b_ih, b_hh (0 if there are none), W_hr


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


def rnn_trajectory(u: Tensor, weights: Weights, state: tuple[Tensor, ...], slope: Slope, activation: str):
    """h_t = phi(a_t), a_t = W_ih u_t + W_hh h_(t-1) + b: A_t = phi_t W_hh, B_t = phi_t [W_ih, b]."""
    w_ih, w_hh, b_ih, b_hh, _ = weights
    (hidden,) = state
    a, b = [], []
    for t, u_t in enumerate(u.unbind(1)):
        pre = linear(u_t, w_ih, b_ih) + linear(hidden, w_hh, b_hh)
        phi = slope(activation, pre).unsqueeze(-1)  # [B, n, 1]
        constant = b_ih + b_hh + (linear(hidden, w_hh) if t == 0 else 0)
        a.append(phi * w_hh)
        b.append(phi * _columns(w_ih, constant, len(u)))
        hidden = {"tanh": torch.tanh, "relu": torch.relu, "linear": lambda x: x}[activation](pre)
    identity = torch.eye(w_hh.shape[0], dtype=u.dtype, device=u.device).expand(len(u), len(a), -1, -1)
    return Trajectory(torch.stack(a, 1), torch.stack(b, 1), identity)


def lstm_trajectory(u: Tensor, weights: Weights, state: tuple[Tensor, ...], slope: Slope, activation: str):
    """The state is the cell, h_t = C_t c_t with C_t = W_hr diag(o_t tanh(c_t) / c_t), so that

    A_t = diag(f_t) + diag(i_t phi_t) W_hg C_(t-1),  B_t = diag(i_t phi_t) [W_ig, b_g],  phi_t = tanh(a_t) / a_t.
    """
    w_ih, w_hh, b_ih, b_hh, w_hr = weights
    hidden, cell = state
    w_ig, w_hg = w_ih.chunk(4)[2], w_hh.chunk(4)[2]
    output = None  # C_(t-1)
    a, b, c = [], [], []
    for t, u_t in enumerate(u.unbind(1)):
        gates = (linear(u_t, w_ih, b_ih) + linear(hidden, w_hh, b_hh)).chunk(4, dim=-1)
        i, f, o = (gates[k].sigmoid() for k in (0, 1, 3))
        write = (i * slope(activation, gates[2])).unsqueeze(-1)  # i_t phi_t [B, n, 1]
        constant = (b_ih + b_hh).chunk(4)[2].expand(len(u), -1)
        if t == 0:
            # The initial state is part of the constant; what multiplies z_(-1) = 0 does not matter.
            a.append(torch.diag_embed(f))
            b.append(write * _columns(w_ig, constant + linear(hidden, w_hg), len(u)))
            b[0] = torch.cat([b[0][..., :-1], b[0][..., -1:] + (f * cell).unsqueeze(-1)], -1)
        else:
            a.append(torch.diag_embed(f) + write * (w_hg @ output))
            b.append(write * _columns(w_ig, constant, len(u)))
        cell = f * cell + i * gates[2].tanh()
        output = torch.diag_embed(o * slope(activation, cell))  # [B, n, n]
        hidden = o * cell.tanh()
        if w_hr is not None:
            output, hidden = w_hr @ output, linear(hidden, w_hr)
        c.append(output)
    return Trajectory(torch.stack(a, 1), torch.stack(b, 1), torch.stack(c, 1))


def gru_trajectory(u: Tensor, weights: Weights, state: tuple[Tensor, ...], slope: Slope, activation: str):
    """A_t = diag(z_t) + diag((1 - z_t) phi_t r_t) W_hn,  B_t = diag((1 - z_t) phi_t) [W_in, b_in + r_t b_hn].

    z_t is torch's update gate, which keeps the state; the paper's is 1 - z_t.
    """
    w_ih, w_hh, b_ih, b_hh, _ = weights
    (hidden,) = state
    w_in, w_hn = w_ih.chunk(3)[2], w_hh.chunk(3)[2]
    a, b = [], []
    for t, u_t in enumerate(u.unbind(1)):
        from_input = linear(u_t, w_ih, b_ih).chunk(3, dim=-1)
        from_state = linear(hidden, w_hh, b_hh).chunk(3, dim=-1)
        r, z = ((from_input[k] + from_state[k]).sigmoid() for k in (0, 1))
        pre = from_input[2] + r * from_state[2]
        write = ((1 - z) * slope(activation, pre)).unsqueeze(-1)
        a.append(torch.diag_embed(z) + write * r.unsqueeze(-1) * w_hn)
        constant = b_ih.chunk(3)[2] + r * b_hh.chunk(3)[2]
        b.append(write * _columns(w_in, constant, len(u)))
        if t == 0:
            initial = a[0] @ hidden.unsqueeze(-1)  # [B, n, 1]
            b[0] = torch.cat([b[0][..., :-1], b[0][..., -1:] + initial], -1)
        hidden = (1 - z) * pre.tanh() + z * hidden
    identity = torch.eye(w_hn.shape[0], dtype=u.dtype, device=u.device).expand(len(u), len(a), -1, -1)
    return Trajectory(torch.stack(a, 1), torch.stack(b, 1), identity)


class RecurrentOperator(Conversion):
    """nn.RNN, nn.LSTM or nn.GRU as one integral per layer and direction; returns the sequence of hidden states.

    Args:
        module: the recurrent module.
        nonlinearity: for nn.RNN, "linear" takes its weights without the activation (Theorem 3 (b)).
        slope: what replaces an activation along the trajectory; :func:`secant_slope` is exact.
    """

    num_outputs = 2

    def __init__(self, module: nn.RNNBase, *, nonlinearity: str | None = None, slope: Slope = secant_slope):
        super().__init__(module)
        known = ("linear", "tanh", "relu") if isinstance(module, nn.RNN) else ()
        if nonlinearity is not None and nonlinearity not in known:
            raise ValueError(
                f"`nonlinearity` ({nonlinearity!r}) is for nn.RNN, and must be 'linear', 'tanh' or 'relu'; "
                f"the module is {type(module).__name__}"
            )
        self.activation = nonlinearity or getattr(module, "nonlinearity", "tanh")
        self.slope = slope
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
        system = self.trajectory(u, weights, state, self.slope, self.activation)
        kernel = TransitionKernel(system.c.shape[2], system.b.shape[3], system.a.shape[2])
        operator = IntegralOperator(kernel, is_causal=True, measure="counting")
        augmented = torch.cat([u, u.new_ones(*u.shape[:2], 1)], -1)  # App. proof_rnn, augmented input
        times = torch.arange(u.shape[1], device=u.device).unsqueeze(1)
        return operator(augmented, times, context=system)

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


def _columns(matrix: Tensor, constant: Tensor, batch: int) -> Tensor:
    """[W, constant] for each sample: W [n, d], constant [n] or [B, n] -> [B, n, d + 1]."""
    constant = constant.expand(batch, -1).unsqueeze(-1)
    return torch.cat([matrix.expand(batch, -1, -1), constant], -1)


for _module_class in (nn.RNN, nn.LSTM, nn.GRU):
    register(_module_class)(RecurrentOperator)
