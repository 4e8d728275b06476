"""The operators that separate ITNet from convolution, attention and recurrence (Corollary ordering of the paper).

python examples/paper/witnesses.py

The first table has, for each witness, how far the integral with its kernel is from the operator's own formula, and by
how much the operator violates a property that all members of the smaller class have. The second table tells operators
whose kernel depends on x, y, u(x) and u(y) alone from those whose kernel contains more: a normalisation over all keys,
or the trajectory between its two ends.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from itnet_kernels import KernelWeights, integral_transform
from modeling_itnet.special_cases import FunctionKernel, IntegralOperator, LinearAttention, LinearStateSpace
from modeling_itnet.special_cases.verify import gauss_legendre


@dataclass(frozen=True)
class Witness:
    name: str
    formula: str
    representation_error: float  # largest difference between the integral and the formula
    obstruction: str  # the property of the class, and how the witness violates it
    gap: float  # size of the violation


def all_witnesses() -> Iterator[Witness]:
    yield content_dependent()
    yield gaussian()
    yield position_weighted()
    yield bidirectional()
    yield from (high_rank(states) for states in (1, 4))


def content_dependent(count: int = 16, features: int = 3) -> Witness:
    """Takes T(u)(x) = sigma(u(x) . u(x_0)) u(x), which is not linear, so no convolution (App. proof_conv (c)).

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
    )


def gaussian(count: int = 64, length: float = 0.5) -> Witness:
    """Takes G_l(u)(x) = integral of exp(-|x - y|^2 / l^2) u(y), which is not an average, so no attention
    (App. strict1).

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
    )


def position_weighted(count: int = 12, features: int = 3) -> Witness:
    """Takes T_pos(u)(x) = integral of |x - y| u(y), which is not permutation-equivariant: no attention without
    positions.

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
    )


def bidirectional(count: int = 32, length: float = 0.3) -> Witness:
    """Takes S(u)(t) = integral of exp(-|t - s| / l) u(s), which sees the future: no causal recurrence
    (App. strictness1_rnn).

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
    )


def high_rank(states: int, count: int = 64) -> Witness:
    """Takes H_n(u)(t) = integral of sum over k <= n+1 of phi_k(t) phi_k(s) u(s), of rank n+1, on cosines of period T.

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
    )


@dataclass(frozen=True)
class PairForm:
    """Whether an operator is an integral of kappa(x, y, u(x), u(y)) u(y), and nothing more, as it stands."""

    name: str
    difference: float  # of the operator, see `mixed_difference`
    needs: str  # what its kernel contains that kappa has no argument for; "" for nothing


def mixed_difference(operator: Callable[[Tensor], Tensor], u: Tensor, query: int, keys: tuple[int, int]) -> float:
    """Returns |F(u + a + b) - F(u + a) - F(u + b) + F(u)| / |F(u)| at one query, with a and b changes at two other
    points.

    An integral of kappa(x, y, u(x), u(y)) u(y) adds up what each y contributes by itself, so that this is 0 for every
    kappa. It is not 0 where the kernel of a pair depends on a third point: Z(x) of a softmax, gates, a sum of steps.
    """
    first, second = torch.zeros_like(u), torch.zeros_like(u)
    first[:, keys[0]], second[:, keys[1]] = torch.randn(2, u.shape[-1])
    values = [operator(u + change)[:, query] for change in (first + second, first, second, torch.zeros_like(u))]
    return float((values[0] - values[1] - values[2] + values[3]).norm() / values[3].norm())


def pair_forms(features: int = 4, count: int = 8) -> Iterator[PairForm]:
    """Yields the operators of Theorems 1 to 3, the query last, so that causal ones see the two keys."""
    u, x = torch.randn(1, count, features), torch.rand(count, 1)
    weights = KernelWeights(
        w1=torch.randn(16, 6 * 2 + 1 + 3 * features) / 3,
        b1=torch.randn(16),
        w2=torch.randn(1, features**2, 16),
        b2=torch.randn(1, features**2),
        fourier=torch.randn(2, 1),
    )
    convolution = nn.Conv1d(features, features, 5, padding="same", padding_mode="circular")
    attention = nn.MultiheadAttention(features, 1, batch_first=True)
    recurrences = {"nn.RNN": nn.RNN, "nn.LSTM": nn.LSTM, "nn.GRU": nn.GRU}
    recurrences = {name: made(features, features, batch_first=True) for name, made in recurrences.items()}
    slopes = "the state between its two ends (slopes of the activation)"
    cases: list[tuple[str, Callable[[Tensor], Tensor], str]] = [
        ("the ITNet operator", lambda u: integral_transform(u.unsqueeze(2), x, weights).squeeze(2), ""),
        ("nn.Conv1d", lambda u: convolution(u.transpose(1, 2)).transpose(1, 2), ""),
        ("softmax attention", lambda u: attention(u, u, u)[0], "Z(x), over all keys"),
        ("linear attention, normalised", LinearAttention(features, 1), "Z(x), over all keys"),
        ("linear state space", LinearStateSpace(features, features, features), ""),
        ("nn.RNN", lambda u: recurrences["nn.RNN"](u)[0], slopes),
        ("nn.LSTM", lambda u: recurrences["nn.LSTM"](u)[0], slopes.replace("slopes", "gates and slopes")),
        ("nn.GRU", lambda u: recurrences["nn.GRU"](u)[0], slopes.replace("slopes", "gates and slopes")),
        ("Mamba's scan", _selective_scan(features), "the sum of the steps Δ between its two ends"),
    ]
    for name, operator, needs in cases:
        yield PairForm(name, mixed_difference(operator, u, count - 1, (count - 4, count - 2)), needs)


def _selective_scan(features: int) -> Callable[[Tensor], Tensor]:
    """Returns the scan h_t = exp(A Delta(u_t)) h_(t-1) + Delta(u_t) B(u_t) u_t, y_t = C(u_t) h_t in each channel, one
    state each."""
    step, b, c = (nn.Linear(features, size) for size in (features, 1, 1))

    def scan(u: Tensor) -> Tensor:
        state, out = torch.zeros_like(u[:, 0]), []
        for u_t in u.unbind(1):
            delta = nn.functional.softplus(step(u_t))
            state = torch.exp(-delta) * state + delta * b(u_t) * u_t
            out.append(c(u_t) * state)
        return torch.stack(out, 1)

    return scan


def _difference(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of the random signals")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    torch.set_default_dtype(torch.float64)
    print("| witness | operator | integral − formula | property of the class; violation | size |")
    print("|---|---|---|---|---|")
    for witness in all_witnesses():
        cells = (witness.name, witness.formula, f"{witness.representation_error:.1e}", witness.obstruction)
        print("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + f" | {witness.gap:.3g} |")

    print("\n| operator | mixed second difference in two keys | κ would need, beside x, y, u(x), u(y) |")
    print("|---|---|---|")
    with torch.no_grad():
        for form in pair_forms():
            print(f"| {form.name} | {form.difference:.1e} | {form.needs or 'nothing'} |")


if __name__ == "__main__":
    main()
