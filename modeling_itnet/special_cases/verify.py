# SPDX-License-Identifier: Apache-2.0
"""The theorems of the paper as numbers: ``theorem_table()`` measures each of them, ``itnet verify`` prints it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.utils import logging

from . import witnesses
from .convert import from_module
from .kernel import FunctionKernel
from .modules import LinearAttention, LinearStateSpace
from .operator import IntegralOperator
from .quadrature import gauss_legendre
from .recurrence import secant_slope, tangent_slope
from .state_space import ExponentialKernel

TOLERANCE = 1e-10


@dataclass(frozen=True)
class TheoremRow:
    """One statement and what was measured for it, in float64."""

    name: str  # its label in the paper
    statement: str
    error: float
    tolerance: float
    relation: Literal["<=", ">"] = "<="  # ">" for statements that two things differ

    @property
    def holds(self) -> bool:
        return self.error <= self.tolerance if self.relation == "<=" else self.error > self.tolerance


def theorem_table(seed: int = 0) -> list[TheoremRow]:
    """Measures every statement on random weights and signals. Takes a few seconds; no data is needed."""
    rows = []
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            for part in (_convolution, _attention, _recurrence, _linearisations, _pair_forms, _strictness):
                torch.manual_seed(seed)
                rows.extend(part())
        finally:
            torch.set_default_dtype(default)
    return rows


def _equal(name: str, statement: str, actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> TheoremRow:
    return TheoremRow(name, statement, float((actual - expected).abs().max()), tolerance)


def _module_row(name: str, module: nn.Module, *inputs: Tensor, call: Callable | None = None, **options) -> TheoremRow:
    """from_module(module, **options) against the module itself."""
    module.eval()
    expected = module(*inputs) if call is None else call(module)
    expected = expected[0] if isinstance(expected, tuple) else expected
    operator = from_module(module, **options)
    actual = operator(*inputs) if call is None else call(operator)
    return _equal(name, f"{_signature(module)} as an integral", actual, expected)


def _signature(module: nn.Module) -> str:
    return f"{type(module).__name__}({module.extra_repr()})" if module.extra_repr() else type(module).__name__


def _convolution() -> Iterator[TheoremRow]:
    count = 24
    x, u, taps = torch.arange(count).unsqueeze(1), torch.randn(2, count, 3), torch.randn(count)
    residual = nn.Linear(3, 3, bias=False)
    kernel = FunctionKernel(lambda x, y, u_x, u_y: taps[((x - y) % count).squeeze(-1)])
    operator = IntegralOperator(kernel, measure="counting", residual=residual)
    expected = torch.fft.ifft(torch.fft.fft(taps)[:, None] * torch.fft.fft(u, dim=1), dim=1).real + residual(u)
    yield _equal("Theorem 1", "κ = w(x−y) I on a circle is circular convolution (by FFT)", operator(u, x), expected)
    for module, shape in (
        (nn.Conv1d(4, 6, 3, padding="same", padding_mode="circular"), (2, 4, 11)),
        (nn.Conv2d(4, 6, (3, 2), stride=(2, 1), dilation=(1, 2), padding=1, padding_mode="reflect"), (2, 4, 8, 9)),
        (nn.Conv2d(4, 8, 3, groups=4, padding="valid"), (2, 4, 7, 7)),
        (nn.Conv3d(2, 2, 2, groups=2, padding=1, padding_mode="replicate"), (1, 2, 4, 5, 4)),
        (nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2), (2, 4, 5, 6)),
    ):
        yield _module_row("Theorem 1", module, torch.randn(shape))


def _attention() -> Iterator[TheoremRow]:
    d, u = 6, torch.randn(2, 9, 6)
    w_q, w_k, w_v = torch.randn(3, d, d)

    def eq_attn_kernel(x, y, u_x, u_y):
        """alpha(x, y) W_V, a matrix per pair, with Z(x) over all keys: the tile is the whole domain."""
        alpha = ((u_x @ w_q.T) * (u_y @ w_k.T)).sum(-1).div(d**0.5).softmax(2) * u_y.shape[2]
        return alpha[..., None, None] * w_v

    operator = IntegralOperator(FunctionKernel(eq_attn_kernel, "matrix"), tile=(16, 16))
    expected = scaled_dot_product_attention(u @ w_q.T, u @ w_k.T, u @ w_v.T)
    actual = operator(u, torch.rand(9, 1))
    yield _equal("Theorem 2", "κ = α(x,y) W_V (Eq. attn_kernel), μ = 1/n, is softmax attention", actual, expected)

    module = nn.MultiheadAttention(12, 3, batch_first=True)
    query, memory = torch.randn(2, 7, 12), torch.randn(2, 5, 12)
    padding, causal = torch.zeros(2, 5).bool(), torch.ones(7, 7).triu(1).bool()
    padding[1, 3:] = True
    for statement, call in (
        ("multi-head self-attention", lambda m: m(query, query, query)),
        ("cross-attention with padding", lambda m: m(query, memory, memory, key_padding_mask=padding)),
        ("causal attention (Prop. causal_attn)", lambda m: m(query, query, query, attn_mask=causal)),
    ):
        row = _module_row("Theorem 2", module, call=call)
        yield TheoremRow(row.name, f"nn.MultiheadAttention, {statement}", row.error, row.tolerance)
    for is_causal in (False, True):
        row = _module_row("Prop. linear_attn", LinearAttention(12, 3, is_causal), query)
        kind = "causal " * is_causal
        yield TheoremRow(row.name, f"{kind}linear attention, φ = elu + 1, against its O(n) form", row.error, TOLERANCE)


def _recurrence() -> Iterator[TheoremRow]:
    error = continuous_error()
    yield TheoremRow("Theorem 3 (a)", "κ = C exp(A(t−s)) B solves ḣ = Ah + Bu (Gauss quadrature)", error, TOLERANCE)
    for discretization in ("euler", "zoh"):
        row = _module_row("Theorem 3 (d)", LinearStateSpace(4, 3, 2, 0.1, discretization), torch.randn(2, 40, 3))
        yield TheoremRow(row.name, f"linear SSM, {discretization}: κ = C Ā^(t−s) B̄", row.error, TOLERANCE)
    u = torch.randn(2, 10, 3)
    rnn = nn.RNN(3, 4, batch_first=True)
    hidden, states = u.new_zeros(2, 4), []
    for u_t in u.unbind(1):
        hidden = u_t @ rnn.weight_ih_l0.T + rnn.bias_ih_l0 + hidden @ rnn.weight_hh_l0.T + rnn.bias_hh_l0
        states.append(hidden)
    actual = from_module(rnn, nonlinearity="linear")(u)
    yield _equal("Theorem 3 (b)", "linear RNN: κ = W_h^(t−s) W_u", actual, torch.stack(states, 1))
    for name, module in (
        ("Theorem 3 (b)", rnn),
        ("Theorem 3 (c)", nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True)),
        ("Prop. gru", nn.GRU(3, 4, num_layers=2, bidirectional=True, batch_first=True)),
    ):
        for kind, options in (("tangents with their rests", {}), ("secant slopes", {"slope": secant_slope})):
            row = _module_row(name, module, u, **options)
            yield TheoremRow(name, f"{_signature(module)}: {kind} along the trajectory", row.error, TOLERANCE)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # Transformers warns of the slow form of the mixer, which is the one compared with
    try:
        row = _module_row("Theorem 3 (d)", _mamba_mixer(), torch.randn(2, 12, 8))
    finally:
        logging.set_verbosity(verbosity)
    yield row


def continuous_error(state_size: int = 4, segments: int = 8, nodes: int = 12) -> float:
    """The kernel of Theorem 3 (a) on [0, 2] against the exact solution for u(t) = (sin 3t, cos 3t).

    The input solves w' = Sw, so that (h, w) is a linear system without input, solved by one matrix exponential. The
    keys are Gauss-Legendre nodes in each of the segments between the queries.
    """
    module = LinearStateSpace(state_size, 2, 2)
    a, b, c, d = (p.detach() for p in (module.a, module.b, module.c, module.d))
    rotation = torch.tensor([[0.0, 3.0], [-3.0, 0.0]])
    start = torch.tensor([0.0, 1.0])  # sin 0, cos 0
    block = torch.cat([torch.cat([a, b], 1), torch.cat([torch.zeros(2, state_size), rotation], 1)])
    times = torch.linspace(0, 2, segments + 1)[1:]
    solved = torch.linalg.matrix_exp(times[:, None, None] * block) @ torch.cat([torch.zeros(state_size), start])
    signal = torch.stack([torch.sin(3 * times), torch.cos(3 * times)], -1)
    expected = solved[:, :state_size] @ c.T + signal @ d.T

    keys, weights = gauss_legendre(nodes, 0, 2, segments)
    u = torch.stack([torch.sin(3 * keys), torch.cos(3 * keys)], -1).unsqueeze(0)
    residual = nn.Linear(2, 2, bias=False)
    residual.weight = nn.Parameter(d)
    operator = IntegralOperator(ExponentialKernel(a, b, c), is_causal=True, residual=residual)
    actual = operator(
        u,
        keys.unsqueeze(1),
        measure=weights,
        queries=signal.unsqueeze(0),
        query_positions=times.unsqueeze(1),
    )
    return float((actual - expected).detach().abs().max())


def _mamba_mixer() -> nn.Module:
    from transformers.models.mamba.modeling_mamba import MambaConfig, MambaMixer

    config = MambaConfig(hidden_size=8, state_size=3, num_hidden_layers=1, conv_kernel=4, vocab_size=10)
    return MambaMixer(config, 0).to(torch.float64)


def _linearisations() -> Iterator[TheoremRow]:
    """The kernels with tanh' wherever the exact ones have the secant slope tanh(a) / a, as the paper prints them."""
    u = torch.randn(2, 10, 3)
    for name, module in (
        ("Eq. discrete_nonlinear_kernel", nn.RNN(3, 4, batch_first=True)),
        ("Eq. lstm_kernel", nn.LSTM(3, 4, batch_first=True)),
        ("Prop. gru", nn.GRU(3, 4, batch_first=True)),
    ):
        statement = f"{type(module).__name__}: with tanh′ for tanh(a)/a it is no equality; relative error"
        yield TheoremRow(name, statement, tangent_error(module, u), 1e-3, ">")


def tangent_error(module: nn.Module, u: Tensor) -> float:
    """Relative L2 error of the exact kernel with phi'(a) in the place of phi(a)/a."""
    with torch.no_grad():
        return relative_error(from_module(module, slope=tangent_slope)(u), module(u)[0])


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).detach().norm() / expected.detach().norm())


def _pair_forms() -> Iterator[TheoremRow]:
    """Which of the operators have a kernel of (x, y, u(x), u(y)) alone: mixed second differences in two keys."""
    for form in witnesses.pair_forms():
        if form.needs:
            statement = f"{form.name}: not additive over keys; its kernel also contains {form.needs}"
            yield TheoremRow("Def. itnet_operator", statement, form.difference, 1e-6, ">")
        else:
            statement = f"{form.name}: additive over keys, as ∫ κ(x, y, u(x), u(y)) u(y) dμ(y) is"
            yield TheoremRow("Def. itnet_operator", statement, form.difference, TOLERANCE)


def _strictness() -> Iterator[TheoremRow]:
    for witness in witnesses.all_witnesses():
        statement = f"ITNet represents it: {witness.formula}"
        yield TheoremRow(witness.name, statement, witness.representation_error, TOLERANCE)
        yield TheoremRow(witness.name, witness.obstruction, witness.gap, witness.threshold, ">")
