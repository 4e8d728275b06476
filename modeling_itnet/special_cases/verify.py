# SPDX-License-Identifier: Apache-2.0
"""``theorem_table()`` measures Theorems 1 to 3 of the paper, and ``itnet verify`` prints the table."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.utils import logging

from .attention import LinearAttention
from .convert import from_module
from .kernel import FunctionKernel
from .operator import IntegralOperator
from .recurrence import secant_slope
from .state_space import ExponentialKernel, LinearStateSpace


@dataclass(frozen=True)
class TheoremRow:
    """One statement and what was measured for it, in float64."""

    name: str  # its label in the paper
    statement: str
    error: float
    tolerance: float = 1e-10

    @property
    def holds(self) -> bool:
        return self.error <= self.tolerance


def theorem_table(seed: int = 0) -> list[TheoremRow]:
    """Measures every statement on random weights and signals. Takes a few seconds; no data is needed."""
    rows, dtype, verbosity = [], torch.get_default_dtype(), logging.get_verbosity()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.set_default_dtype(torch.float64)
        logging.set_verbosity_error()  # Transformers warns of Mamba's slow form, which is the one compared with
        try:
            for part in (_convolution, _attention, _recurrence):
                torch.manual_seed(seed)
                rows.extend(part())
        finally:
            torch.set_default_dtype(dtype)
            logging.set_verbosity(verbosity)
    return rows


def _equal(name: str, statement: str, actual: Tensor, expected: Tensor) -> TheoremRow:
    return TheoremRow(name, statement, float((actual - expected).abs().max()))


def _converted(name: str, statement: str, module: nn.Module, *inputs: Tensor, options=None, **masks) -> TheoremRow:
    """Compares from_module(module, **options) with the module itself. {} in the statement stands for its settings."""
    expected = module.eval()(*inputs, **masks)
    expected = expected[0] if isinstance(expected, tuple) else expected
    statement = statement.format(f"{type(module).__name__}({module.extra_repr()})")
    return _equal(name, statement, from_module(module, **(options or {}))(*inputs, **masks), expected)


def _convolution() -> Iterator[TheoremRow]:
    count = 24
    u, taps = torch.randn(2, count, 3), torch.randn(count)
    residual = nn.Linear(3, 3, bias=False)
    kernel = FunctionKernel(lambda x, y, u_x, u_y: taps[((x - y) % count).squeeze(-1)])
    actual = IntegralOperator(kernel, measure="counting", residual=residual)(u)
    expected = torch.fft.ifft(torch.fft.fft(taps)[:, None] * torch.fft.fft(u, dim=1), dim=1).real + residual(u)
    yield _equal("Theorem 1", "κ = w(x−y) I on a circle is circular convolution (by FFT)", actual, expected)
    for module, shape in (
        (nn.Conv1d(4, 6, 3, padding="same", padding_mode="circular"), (2, 4, 11)),
        (nn.Conv2d(4, 6, (3, 2), stride=(2, 1), dilation=(1, 2), padding=1, padding_mode="reflect"), (2, 4, 8, 9)),
        (nn.Conv2d(4, 8, 3, groups=4, padding="valid"), (2, 4, 7, 7)),
        (nn.Conv3d(2, 2, 2, groups=2, padding=1, padding_mode="replicate"), (1, 2, 4, 5, 4)),
        (nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2), (2, 4, 5, 6)),
    ):
        yield _converted("Theorem 1", "{} as an integral", module, torch.randn(shape))


def _attention() -> Iterator[TheoremRow]:
    d, u = 6, torch.randn(2, 9, 6)
    w_q, w_k, w_v = torch.randn(3, d, d)

    def eq_attn_kernel(x, y, u_x, u_y):
        """Computes alpha(x, y) W_V, a matrix per pair, with Z(x) over all keys: the tile is the whole domain."""
        alpha = ((u_x @ w_q.T) * (u_y @ w_k.T)).sum(-1).div(d**0.5).softmax(2) * u_y.shape[2]
        return alpha[..., None, None] * w_v

    actual = IntegralOperator(FunctionKernel(eq_attn_kernel, "matrix"), tile=(16, 16))(u)
    expected = scaled_dot_product_attention(u @ w_q.T, u @ w_k.T, u @ w_v.T)
    yield _equal("Theorem 2", "κ = α(x,y) W_V (Eq. attn_kernel), μ = 1/n, is softmax attention", actual, expected)

    module = nn.MultiheadAttention(12, 3, batch_first=True)
    u, memory = torch.randn(2, 7, 12), torch.randn(2, 5, 12)
    padding = torch.arange(5) >= torch.tensor([[5], [3]])
    for kind, keys, masks in (
        ("multi-head self-attention", u, {}),
        ("cross-attention with padding", memory, {"key_padding_mask": padding}),
        ("causal attention (Prop. causal_attn)", u, {"attn_mask": torch.ones(7, 7).triu(1).bool()}),
    ):
        yield _converted("Theorem 2", f"nn.MultiheadAttention, {kind}", module, u, keys, keys, **masks)
    for kind, is_causal in (("", False), ("causal ", True)):
        statement = f"{kind}linear attention, φ = elu + 1, against its O(n) form"
        yield _converted("Prop. linear_attn", statement, LinearAttention(12, 3, is_causal), u)


def _recurrence() -> Iterator[TheoremRow]:
    from transformers.models.mamba.modeling_mamba import MambaConfig, MambaMixer

    statement = "κ = C exp(A(t−s)) B solves ḣ = Ah + Bu (Gauss quadrature)"
    yield TheoremRow("Theorem 3 (a)", statement, continuous_error())
    for method in ("euler", "zoh"):
        module = LinearStateSpace(4, 3, 2, 0.1, method)
        yield _converted("Theorem 3 (d)", f"linear SSM, {method}: κ = C Ā^(t−s) B̄", module, torch.randn(2, 40, 3))
    u, states = torch.randn(2, 10, 3), [torch.zeros(2, 4)]
    rnn = nn.RNN(3, 4, batch_first=True)
    for u_t in u.unbind(1):
        from_state = states[-1] @ rnn.weight_hh_l0.T + rnn.bias_hh_l0
        states.append(u_t @ rnn.weight_ih_l0.T + rnn.bias_ih_l0 + from_state)
    actual = from_module(rnn, nonlinearity="linear")(u)
    yield _equal("Theorem 3 (b)", "linear RNN: κ = W_h^(t−s) W_u", actual, torch.stack(states[1:], 1))
    for name, module in (
        ("Theorem 3 (b)", rnn),
        ("Theorem 3 (c)", nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True)),
        ("Prop. gru", nn.GRU(3, 4, num_layers=2, bidirectional=True, batch_first=True)),
    ):
        for kind, options in (("tangents with their rests", {}), ("secant slopes", {"slope": secant_slope})):
            yield _converted(name, f"{{}}: {kind} along the trajectory", module, u, options=options)
    mixer = MambaMixer(MambaConfig(hidden_size=8, state_size=3, num_hidden_layers=1, conv_kernel=4, vocab_size=10), 0)
    yield _converted("Theorem 3 (d)", "MambaMixer as an integral", mixer.double(), torch.randn(2, 12, 8))


def continuous_error(state_size: int = 4, segments: int = 8, nodes: int = 12) -> float:
    """Compares the kernel of Theorem 3 (a) on [0, 2] with the exact solution for u(t) = (sin 3t, cos 3t).

    The input solves w' = Sw, so that (h, w) is a linear system without input, solved by one matrix exponential. The
    keys are Gauss-Legendre nodes in each of the segments between the queries.
    """

    def signal(time: Tensor) -> Tensor:
        return torch.stack([torch.sin(3 * time), torch.cos(3 * time)], -1)

    module = LinearStateSpace(state_size, 2, 2)
    a, b, c = (p.detach() for p in (module.a, module.b, module.c))
    rotation = torch.tensor([[0.0, 3.0], [-3.0, 0.0]])
    block = torch.cat([torch.cat([a, b], 1), torch.cat([torch.zeros(2, state_size), rotation], 1)])
    times = torch.linspace(0, 2, segments + 1)[1:]
    start = torch.cat([torch.zeros(state_size), signal(torch.zeros(()))])
    solved = torch.linalg.matrix_exp(times[:, None, None] * block) @ start
    keys, weights = gauss_legendre(nodes, 0, 2, segments)
    operator = IntegralOperator(ExponentialKernel(a, b, c), is_causal=True)
    points = {"positions": keys.unsqueeze(1), "query_positions": times.unsqueeze(1)}
    actual = operator(signal(keys).unsqueeze(0), **points, measure=weights)
    return float((actual - solved[:, :state_size] @ c.T).abs().max())


def gauss_legendre(nodes: int, start: float = 0.0, stop: float = 1.0, segments: int = 1) -> tuple[Tensor, Tensor]:
    """Returns points [n] of [start, stop] and their masses [n], ``nodes`` in each of equal segments, in float64."""
    roots, weights = (torch.from_numpy(array) for array in np.polynomial.legendre.leggauss(nodes))
    width = (stop - start) / segments
    points = start + (torch.arange(segments, dtype=torch.float64).unsqueeze(1) + (roots + 1) / 2) * width
    return points.flatten(), (weights * width / 2).repeat(segments)
