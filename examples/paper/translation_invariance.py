"""Theorem 5 of the paper, measured: does gradient descent on translation-invariant data find a convolution?

python examples/paper/translation_invariance.py

A circle of n points, signals with every translate of every signal in the data set, so that the distribution is exactly
invariant, and a target that commutes with translations. Measured over training: the share of the gradient with respect
to the kernel that is orthogonal to the translation-invariant (TI) kernels, and the share of the kernel that is. The
theorem says that the first is 0 at every step.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from itnet_kernels import KernelWeights, kernel_matrices

ROOT = Path(__file__).resolve().parents[2]


def translates(u: Tensor) -> Tensor:
    """Returns every shift of every signal: [B, n] -> [B n, n]."""
    return torch.cat([u.roll(k, -1) for k in range(u.shape[-1])])


def invariant_part(kernel: Tensor) -> Tensor:
    """Returns the nearest kernel that depends on x - y only: the mean over each wrapped diagonal, [n, n] -> [n, n]."""
    count = len(kernel)
    index = torch.arange(count)
    shifted = torch.stack([kernel[(index + k) % count][:, (index + k) % count] for k in range(count)])
    return shifted.mean(0)


def orthogonal_share(kernel: Tensor) -> float:
    """Returns |K - K^TI| / |K|."""
    return float((kernel - invariant_part(kernel)).norm() / kernel.norm().clamp(min=1e-300))


def signals(count: int, samples: int) -> Tensor:
    """Returns smooth random functions on the circle: [samples, n]."""
    spectrum = torch.randn(samples, count // 2 + 1, dtype=torch.complex128) / (1 + torch.arange(count // 2 + 1))
    return torch.fft.irfft(spectrum, count, norm="forward")


def target(u: Tensor) -> Tensor:
    """Applies a nonlinear operator that commutes with translations: a blurred and a sharpened part."""
    return torch.tanh(u.roll(1, -1) + 0.5 * u) - 0.3 * u.roll(-2, -1)


def descend(
    kernel: Callable[[], Tensor], parameters: list[Tensor], loss: Callable[[Tensor], Tensor], steps: int, rate: float
) -> list[tuple[float, float]]:
    """Descends along the gradient of the parameters; returns, every tenth step, the orthogonal shares of the gradient
    and the kernel."""
    history = []
    for step in range(steps):
        values = kernel()
        gradient = torch.autograd.grad(loss(values), values, retain_graph=True)[0]
        if step % 10 == 0 or step == steps - 1:
            history.append((orthogonal_share(gradient), orthogonal_share(values.detach())))
        updates = torch.autograd.grad(values, parameters, gradient)
        with torch.no_grad():
            for parameter, update in zip(parameters, updates, strict=True):
                parameter -= rate * update
    return history


def mlp_kernel(inputs: tuple[str, ...], count: int, width: int = 32, frequencies: int = 4):
    """Takes ITNet's own kernel on the circle, content left out: whole frequencies make it periodic."""
    sizes = {"x": 2 * frequencies, "y": 2 * frequencies, "x-y": 2 * frequencies}
    w1 = (0.3 * torch.randn(width, sum(sizes[name] for name in inputs))).requires_grad_()
    b1 = torch.zeros(width, requires_grad=True)
    w2 = (0.3 * torch.randn(1, 1, width)).requires_grad_()
    b2 = torch.zeros(1, 1, requires_grad=True)
    fourier = torch.arange(1.0, frequencies + 1).unsqueeze(1)
    x = (torch.arange(count) / count).view(1, count, 1)
    features = torch.zeros(1, count, 1, 1)

    def kernel() -> Tensor:
        weights = KernelWeights(w1, b1, w2, b2, fourier, inputs)
        return kernel_matrices(features, features, x, x, weights)[0, :, :, 0, 0, 0]

    return kernel, [w1, b1, w2, b2]


def experiments(count: int, samples: int, steps: int, rate: float) -> dict[str, list[tuple[float, float]]]:
    base = signals(count, samples)
    orbit = translates(base)

    def equivariant(data: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda kernel: (data @ kernel.T / count - target(data)).square().mean()

    # A label that translations do not change, read off at one point: the data are invariant, the loss is not.
    label = orbit.amax(-1)

    def at_one_point(kernel: Tensor) -> Tensor:
        return (orbit @ kernel[0] / count - label).square().mean()

    first = torch.randn(count)
    invariant = torch.stack([first.roll(k) for k in range(count)])
    random = torch.randn(count, count)
    runs = {}
    for name, start, loss in (
        ("free kernel, TI at the start", invariant, equivariant(orbit)),
        ("free kernel, random at the start", random, equivariant(orbit)),
        ("free kernel, TI at the start, no translates in the data", invariant, equivariant(base)),
        ("free kernel, TI at the start, loss at one point", invariant, at_one_point),
    ):
        kernel = start.clone().requires_grad_()
        runs[name] = descend(lambda kernel=kernel: kernel * 1, [kernel], loss, steps, rate * count**2)
    for inputs in (("x-y",), ("x", "y", "x-y")):
        torch.manual_seed(1)
        kernel, parameters = mlp_kernel(inputs, count)
        runs[f"kernel MLP of {', '.join(inputs)}"] = descend(kernel, parameters, equivariant(orbit), steps, rate * 20)
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--points", type=int, default=16, help="of the circle")
    parser.add_argument("--samples", type=int, default=8, help="signals before their translates")
    parser.add_argument("--steps", type=int, default=2000, help="of gradient descent")
    parser.add_argument("--rate", type=float, default=0.02, help="learning rate, in units of the measure")
    parser.add_argument("--output_dir", type=Path, default=ROOT / "outputs" / "translation_invariance", help="figure")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    runs = experiments(arguments.points, arguments.samples, arguments.steps, arguments.rate)

    print("| run | gradient outside TI: first step, largest, last step | kernel outside TI: start, end |")
    print("|---|---|---|")
    for name, history in runs.items():
        gradients, kernels = zip(*history, strict=True)
        cells = f"{gradients[0]:.1e}, {max(gradients):.1e}, {gradients[-1]:.1e} | {kernels[0]:.1e}, {kernels[-1]:.1e}"
        print(f"| {name} | {cells} |")

    figure = Figure(figsize=(9, 3.6), layout="constrained", dpi=150)
    for axis, column, title in zip(figure.subplots(1, 2), (0, 1), ("gradient", "kernel"), strict=True):
        for name, history in runs.items():
            axis.semilogy([max(row[column], 1e-18) for row in history], label=name)
        axis.set(title=f"share of the {title} outside of the TI kernels", xlabel="step / 10")
    axis.legend(fontsize=6)
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.output_dir / "shares.png")
    print(f"\nfigure: {arguments.output_dir / 'shares.png'}")


if __name__ == "__main__":
    main()
