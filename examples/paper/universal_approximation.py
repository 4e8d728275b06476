"""Theorem 4 and Prop. rate of the paper, measured: fitting nonlinear operators with kernels of growing width.

python examples/paper/universal_approximation.py

One ITNet operator with a kernel MLP of w hidden units is fitted to operators on functions on [0, 1]; the error on
unseen functions is set against the bound's 1/sqrt(w). The second table integrates the true kernels on M points,
against 1/M, the bound's other term for s = 1.
"""

import argparse
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import gelu

from itnet_kernels import KernelWeights, integral_transform
from itnet_kernels.exact.reference import kernel_input
from modeling_itnet.special_cases import FunctionKernel, IntegralOperator


def selective_blur(x: Tensor, y: Tensor, u_x: Tensor, u_y: Tensor) -> Tensor:
    """Returns kappa* = exp(-(x-y)^2 / 0.18) / (1 + exp(-4 u(x) u(y))): smooth, content and position."""
    return torch.exp(-(x - y).square().squeeze(-1) / 0.18) * torch.sigmoid(4 * (u_x * u_y).sum(-1))


def running_energy(x: Tensor, y: Tensor, u_x: Tensor, u_y: Tensor) -> Tensor:
    """Returns kappa* = 1[y <= x] u(y), so that F(u)(x) = integral of u^2 over [0, x]: a kernel with a jump."""
    return (y <= x).squeeze(-1) * u_y.sum(-1)


OPERATORS = {"selective blur": selective_blur, "running energy": running_energy}


def functions(samples: int) -> Callable[[Tensor], Tensor]:
    """Returns smooth random functions from a bounded set: points [n] -> values [samples, n, 1]."""
    modes = torch.arange(5)
    amplitude = (2 * torch.rand(samples, 1, 5) - 1) / (1 + modes)
    phase = 2 * math.pi * torch.rand(samples, 1, 5)
    return lambda x: (amplitude * torch.sin(math.pi * modes * x.view(1, -1, 1) + phase)).sum(-1, keepdim=True)


def midpoints(count: int) -> Tensor:
    return (torch.arange(count) + 0.5) / count


def apply(
    kernel, u: Tensor, x: Tensor, query_positions: Tensor | None = None, queries: Tensor | None = None
) -> Tensor:
    operator = IntegralOperator(FunctionKernel(kernel))
    query_positions = None if query_positions is None else query_positions.unsqueeze(1)
    return operator(u, x.unsqueeze(1), query_positions=query_positions, queries=queries)


def fit(kernel, width: int, points: int, samples: int, steps: int, frequencies: int = 4) -> tuple[float, float]:
    """Fits by Adam, then the best output layer by least squares; returns the (sup, root mean square) error on
    functions not seen."""
    torch.manual_seed(0)
    x = midpoints(points)
    train, test = (functions(samples)(x) for _ in range(2))
    wanted, wanted_test = apply(kernel, train, x), apply(kernel, test, x)
    w1 = torch.randn(width, 6 * frequencies + 4) / 3
    weights = KernelWeights(
        w1=w1.requires_grad_(),
        b1=torch.randn(width).requires_grad_(),
        w2=(torch.randn(1, 1, width) / width**0.5).requires_grad_(),
        b2=torch.zeros(1, 1).requires_grad_(),
        fourier=0.5 * torch.arange(1.0, frequencies + 1).unsqueeze(1),
    )

    def integral(u: Tensor, weights: KernelWeights) -> Tensor:
        return integral_transform(u.unsqueeze(2), x.unsqueeze(1), weights, backend="reference").squeeze(2)

    optimizer = torch.optim.Adam([weights.w1, weights.b1, weights.w2, weights.b2], lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        rows = torch.randint(samples, (16,))
        loss = (integral(train[rows], weights) - wanted[rows]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        weights = KernelWeights(*(t.detach() if isinstance(t, Tensor) else t for t in weights))
        # The operator is linear in W2 and b2: what multiplies them are integrals of the hidden units, and of 1.

        def columns(u: Tensor) -> Tensor:
            parts = []
            for part in u.split(32):
                ends = part[:, :, None, None], part[:, None, :, None]  # u_x, u_y
                hidden = gelu(
                    kernel_input(*ends, x[None, :, None], x[None, :, None], weights) @ weights.w1.T + weights.b1
                )
                hidden = torch.cat([hidden[..., 0, :], torch.ones_like(hidden[..., 0, :1])], -1)  # [B, n, n, w + 1]
                parts.append((hidden * part[:, None]).mean(2).flatten(0, 1))
            return torch.cat(parts).double()

        solution = torch.linalg.lstsq(columns(train), wanted.flatten().double().unsqueeze(1), driver="gelsd").solution
        error = (columns(test) @ solution).squeeze(1) - wanted_test.flatten().double()
    scale = wanted_test.double().square().mean().sqrt()
    return float(error.abs().max() / scale), float(error.square().mean().sqrt() / scale)


def slope(sizes: list[int], errors: list[float]) -> float:
    """Returns the exponent of a power law, by least squares on logarithms."""
    x, y = torch.tensor(sizes).double().log(), torch.tensor(errors).double().log()
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--widths", type=int, nargs="+", default=[16, 32, 64, 128, 256], help="values of w")
    parser.add_argument("--steps", type=int, default=400, help="of Adam per width")
    parser.add_argument("--points", type=int, default=32, help="of the domain")
    parser.add_argument("--samples", type=int, default=256, help="functions to train on, and to test on")
    parser.add_argument("--quadrature", type=int, nargs="+", default=[8, 16, 32, 64, 128], help="values of M")
    arguments = parser.parse_args()

    print("| operator | w | sup error | rms error | 1/√w from the first |\n|---|---|---|---|---|")
    for name, kernel in OPERATORS.items():
        errors = []
        for width in arguments.widths:
            sup, rms = fit(kernel, width, arguments.points, arguments.samples, arguments.steps)
            errors.append((sup, rms))
            bound = errors[0][0] * (arguments.widths[0] / width) ** 0.5
            print(f"| {name} | {width} | {sup:.4f} | {rms:.5f} | {bound:.4f} |", flush=True)
        exponents = [slope(arguments.widths, list(column)) for column in zip(*errors, strict=True)]
        print(f"| {name} | exponent | {exponents[0]:.2f} | {exponents[1]:.2f} | −0.50 |")

    print("\n| operator | M | sup error of the quadrature | 1/M from the first |\n|---|---|---|---|")
    torch.manual_seed(0)
    drawn = functions(32)
    queries = torch.linspace(0.05, 0.95, 19)
    for name, kernel in OPERATORS.items():
        fine = midpoints(4096)
        exact = apply(kernel, drawn(fine), fine, queries, drawn(queries))
        errors = []
        for count in arguments.quadrature:
            x = midpoints(count)
            errors.append(float((apply(kernel, drawn(x), x, queries, drawn(queries)) - exact).abs().max()))
            bound = errors[0] * arguments.quadrature[0] / count
            print(f"| {name} | {count} | {errors[-1]:.2e} | {bound:.2e} |")
        print(f"| {name} | exponent | {slope(arguments.quadrature, errors):.2f} | −1 |")


if __name__ == "__main__":
    main()
