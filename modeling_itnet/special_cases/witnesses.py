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
"""The operators that separate ITNet from its special cases: represented by a kernel, and out of reach of the class.

Each witness has two numbers: how far the integral with its kernel is from the operator by its own formula, and by how
much it violates a property that every member of the smaller class has.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .kernel import FunctionKernel
from .operator import IntegralOperator
from .quadrature import gauss_legendre


@dataclass(frozen=True)
class Witness:
    name: str
    formula: str
    representation_error: float  # largest difference between the integral and the formula
    obstruction: str  # the property of the class, and how the witness violates it
    gap: float  # size of the violation
    threshold: float  # a violation counts above this


def all_witnesses() -> Iterator[Witness]:
    yield content_dependent()
    yield gaussian()
    yield position_weighted()
    yield bidirectional()
    yield from (high_rank(states) for states in (1, 4))


def content_dependent(count: int = 16, features: int = 3) -> Witness:
    """T(u)(x) = sigma(u(x) . u(x_0)) u(x): not linear, so no convolution (App. proof_conv (c)).

    The paper's kernel, a Dirac delta at y = x, contains u(x_0), which is not among the arguments of kappa. This one
    has its delta at y = x_0: sigma(u(x) . u(y)) u(x) u(y)^T / |u(y)|^2. On a finite domain a delta is n 1[y = x_0].
    """
    x, u = torch.arange(count).unsqueeze(1), torch.randn(1, count, features)

    def kappa(x, y, u_x, u_y):
        outer = u_x.unsqueeze(-1) * (u_y / u_y.square().sum(-1, keepdim=True)).unsqueeze(-2)  # [B, i, j, d, d]
        scalar = count * (y == 0).all(-1) * torch.sigmoid((u_x * u_y).sum(-1))
        return scalar[..., None, None] * outer

    def operator(u: Tensor) -> Tensor:
        return IntegralOperator(FunctionKernel(kappa, "matrix"))(u, x)

    formula = torch.sigmoid(u @ u[0, 0]).unsqueeze(-1) * u
    gap = (operator(2 * u) - 2 * operator(u)).norm() / operator(u).norm()
    return Witness(
        "Theorem 1, strictness: T",
        "T(u)(x) = σ(u(x)·u(x₀)) u(x)",
        _difference(operator(u), formula),
        "convolution is linear; ‖T(2u) − 2T(u)‖ / ‖T(u)‖",
        float(gap),
        1e-3,
    )


def gaussian(count: int = 64, length: float = 0.5) -> Witness:
    """G_l(u)(x) = integral of exp(-|x - y|^2 / l^2) u(y): not an average, so no attention (App. strict1).

    Attention maps a constant signal to a constant one. The closed form for u = 1 on [0, 1] is a difference of error
    functions; the operator integrates it by Gauss-Legendre quadrature.
    """
    y, weights = gauss_legendre(count)
    x = torch.linspace(0, 1, 33).unsqueeze(1)
    kernel = FunctionKernel(lambda x, y, u_x, u_y: torch.exp(-(x - y).square().sum(-1) / length**2))
    actual = IntegralOperator(kernel)(torch.ones(1, count, 1), y.unsqueeze(1), measure=weights, query_positions=x)[
        0, :, 0
    ]
    expected = length * torch.pi**0.5 / 2 * (torch.erf((1 - x) / length) + torch.erf(x / length)).squeeze(1)
    return Witness(
        "Theorem 2, strictness: G_ℓ",
        "G_ℓ(u)(x) = ∫ exp(−|x−y|²/ℓ²) u(y) dy, u = 1, ℓ = 0.5",
        _difference(actual, expected),
        "attention keeps constants constant; max − min of G_ℓ(1)",
        float(actual.max() - actual.min()),
        1e-3,
    )


def position_weighted(count: int = 12, features: int = 3) -> Witness:
    """T_pos(u)(x) = integral of |x - y| u(y): not permutation-equivariant, so no attention without positions.

    The paper's own example does not show it (docs/paper_audit.md): its two points are symmetric, and swapping their
    features swaps the outputs. Any three points on a line do.
    """
    x, u = torch.rand(count, 1), torch.randn(1, count, features)
    operator = IntegralOperator(FunctionKernel(lambda x, y, u_x, u_y: (x - y).norm(dim=-1)))
    formula = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist") @ u / count
    order = torch.arange(count).roll(1)
    gap = (operator(u[:, order], x) - operator(u, x)[:, order]).norm() / operator(u, x).norm()
    return Witness(
        "Theorem 2, strictness: T_pos",
        "T_pos(u)(x) = ∫ |x−y| u(y) dμ(y)",
        _difference(operator(u, x), formula),
        "attention is permutation-equivariant; ‖T(πu) − πT(u)‖ / ‖T(u)‖",
        float(gap),
        1e-3,
    )


def bidirectional(count: int = 32, length: float = 0.3) -> Witness:
    """S(u)(t) = integral of exp(-|t - s| / l) u(s): sees the future, so no causal recurrence (App. strictness1_rnn).

    The formula is two recurrences, one in each direction, which is how exponentials are summed in O(n).
    """
    t, u = torch.linspace(0, 1, count).unsqueeze(1), torch.randn(1, count, 2)
    operator = IntegralOperator(FunctionKernel(lambda x, y, u_x, u_y: torch.exp(-(x - y).abs().squeeze(-1) / length)))
    decay = torch.exp(torch.tensor(-1 / (count - 1) / length))
    sums = []
    for signal in (u, u.flip(1)):
        state, out = torch.zeros_like(u[:, 0]), []
        for u_t in signal.unbind(1):
            state = decay * state + u_t
            out.append(state)
        sums.append(torch.stack(out, 1))
    formula = (sums[0] + sums[1].flip(1) - u) / count
    changed = u.clone()
    changed[:, -1] += 1  # the future of every other point
    gap = (operator(changed, t) - operator(u, t))[:, 0].norm()
    return Witness(
        "Theorem 3 (e): S",
        "S(u)(t) = ∫ exp(−|t−s|/ℓ) u(s) ds, ℓ = 0.3",
        _difference(operator(u, t), formula),
        "a causal system ignores the future; change of S(u)(0) when u(T) changes",
        float(gap),
        1e-6,
    )


def high_rank(states: int, count: int = 64) -> Witness:
    """H_n(u)(t) = integral of sum over k <= n+1 of phi_k(t) phi_k(s) u(s): rank n+1, on cosines of period T.

    A linear recurrence with n states has, between the past of a time and its future, a Hankel block of rank n at most
    (its state is all that the future knows of the past); H_n has n+1.
    """
    t, u = (torch.arange(count).unsqueeze(1) + 0.5) / count, torch.randn(1, count, 1)
    order = torch.arange(1, states + 2)

    def basis(t: Tensor) -> Tensor:
        return 2**0.5 * torch.cos(torch.pi * order * t)  # orthonormal on [0, 1]: [..., n + 1]

    operator = IntegralOperator(FunctionKernel(lambda x, y, u_x, u_y: (basis(x) * basis(y)).sum(-1)))
    phi = basis(t)
    formula = phi @ (phi.T @ u) / count
    matrix = operator(torch.eye(count).unsqueeze(0), t)[0]  # the operator as a matrix: [n, n]
    hankel = torch.linalg.svdvals(matrix[count // 2 :, : count // 2])  # future outputs of past inputs
    return Witness(
        f"Theorem 3, strictness: H_{states}",
        f"H_n(u)(t) = ∫ Σ_(k≤n+1) φ_k(t) φ_k(s) u(s) ds, n = {states}",
        _difference(operator(u, t), formula),
        f"a state of size {states} gives a Hankel block of rank ≤ {states}; σ_{states + 1} / σ_1 of H_{states}",
        float(hankel[states] / hankel[0]),
        1e-6,
    )


def _difference(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max())
