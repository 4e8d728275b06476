"""The kernels of nonlinear recurrences exactly as the paper prints them, and how far they are from the modules.

python examples/paper/printed_kernels.py

Gates and states come from the true trajectory; one layer, one direction, no initial state, as in the paper. The
kernels that do equal the modules are those of `modeling_itnet.special_cases`; `itnet verify` measures them.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from modeling_itnet.special_cases import IntegralOperator, Trajectory, TransitionKernel, from_module, tangent_slope


def printed_rnn(module: nn.RNN, u: Tensor) -> Tensor:
    """Returns Eq. discrete_nonlinear_kernel: [product over s < tau <= t of diag(tanh'(a_tau)) W_h] W_u. u
    [B, T, d]."""
    w_ih, w_hh, bias = _weights(module)
    hidden = torch.cat([u.new_zeros(len(u), 1, module.hidden_size), module(u)[0][:, :-1]], 1)  # h_(t-1)
    slope = 1 - (u @ w_ih.T + hidden @ w_hh.T + bias).tanh().square()  # [B, T, n]
    identity = torch.eye(module.hidden_size).to(u).expand(*slope.shape, -1)
    return _integrate(u, Trajectory(slope.unsqueeze(-1) * w_hh, w_ih.expand(*u.shape[:2], -1, -1), identity))


def printed_lstm(module: nn.LSTM, u: Tensor) -> Tensor:
    """Returns Eq. lstm_kernel: diag(o_t) tanh'(c_t) diag(product of f) diag(i_s) W_c, with W_c u_s for the
    candidate."""
    w_ih, w_hh, bias = _weights(module)
    hidden = cell = u.new_zeros(len(u), module.hidden_size)
    a, b, c = [], [], []
    for u_t in u.unbind(1):
        i, f, candidate, o = (linear(u_t, w_ih) + linear(hidden, w_hh) + bias).chunk(4, dim=-1)
        i, f, o = i.sigmoid(), f.sigmoid(), o.sigmoid()
        cell = f * cell + i * candidate.tanh()
        hidden = o * cell.tanh()
        a.append(torch.diag_embed(f))
        b.append(i.unsqueeze(-1) * w_ih.chunk(4)[2])
        c.append(torch.diag_embed(o * (1 - cell.tanh().square())))
    return _integrate(u, Trajectory(*(torch.stack(t, 1) for t in (a, b, c))))


def printed_gru(module: nn.GRU, u: Tensor) -> Tensor:
    """Returns the kernel of Prop. gru: diag(product of (1 - z)) diag(z_s) W_h, with W_h u_s as candidate; the paper's
    z is 1 - torch's."""
    w_ih, w_hh, bias = _weights(module)
    hidden = torch.cat([u.new_zeros(len(u), 1, module.hidden_size), module(u)[0][:, :-1]], 1)
    gates = linear(u, w_ih) + linear(hidden, w_hh) + bias
    keep = gates.chunk(3, dim=-1)[1].sigmoid()  # [B, T, n]
    write = (1 - keep).unsqueeze(-1) * w_ih.chunk(3)[2]
    identity = torch.eye(module.hidden_size).to(u).expand(*keep.shape, -1)
    return _integrate(u, Trajectory(torch.diag_embed(keep), write, identity))


def _weights(module: nn.RNNBase) -> tuple[Tensor, Tensor, Tensor]:
    """Returns W_ih, W_hh and the sum of both biases, 0 if there are none."""
    w_ih, w_hh = module.weight_ih_l0, module.weight_hh_l0
    return w_ih, w_hh, module.bias_ih_l0 + module.bias_hh_l0 if module.bias else w_ih.new_zeros(len(w_ih))


def _integrate(u: Tensor, system: Trajectory) -> Tensor:
    kernel = TransitionKernel(system.c.shape[2], u.shape[2], system.a.shape[2])
    return IntegralOperator(kernel, is_causal=True, measure="counting")(u, context=system)


PRINTED = {nn.RNN: printed_rnn, nn.LSTM: printed_lstm, nn.GRU: printed_gru}
LABELS = {nn.RNN: "Eq. discrete_nonlinear_kernel", nn.LSTM: "Eq. lstm_kernel", nn.GRU: "Prop. gru"}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Returns the relative error in the L2 norm."""
    return float((actual - expected).detach().norm() / expected.detach().norm())


@torch.no_grad()
def tangent_error(module: nn.Module, u: Tensor) -> float:
    """Returns the relative error of the exact kernel with phi'(a), without its rest, in the place of phi(a) / a."""
    return relative_error(from_module(module, slope=tangent_slope)(u), module(u)[0])


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of the random weights and signals")
    torch.manual_seed(parser.parse_args().seed)
    u = torch.randn(2, 10, 3, dtype=torch.float64)
    modules = [module_class(3, 4, batch_first=True, dtype=torch.float64) for module_class in PRINTED]
    print("| kernel as printed | module | relative error | of the exact kernel with tanh′ for tanh(a)/a |")
    print("|---|---|---|---|")
    for module in modules:
        error = relative_error(PRINTED[type(module)](module, u), module(u)[0])
        print(
            f"| {LABELS[type(module)]} | nn.{type(module).__name__} | {error:.3g} | {tangent_error(module, u):.3g} |"
        )


if __name__ == "__main__":
    main()
