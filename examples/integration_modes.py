"""What the approximate integration modes cost in accuracy, on the model of the quickstart.

python examples/quickstart.py && python examples/integration_modes.py

Prints two tables, the error and accuracy of low-rank models of every rank and of Monte Carlo integration with every
number of anchors, and draws how the error of the Monte Carlo estimate falls with the number of samples.
"""

import argparse
import copy
import sys
from pathlib import Path

import torch
from datasets import load_dataset
from matplotlib.figure import Figure
from quickstart import ROOT, to_tensors
from torch import Tensor

from itnet_kernels import monte_carlo_transform
from modeling_itnet import ITNetForImageClassification, ITNetImageProcessor, kernel_spectrum
from modeling_itnet.integration.capture import operator_inputs
from modeling_itnet.integration.choice import integrating
from modeling_itnet.integration.proposal import draw_from_measure


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    data_dir = ROOT / "examples" / "data" / "fashion_mnist_small"
    parser.add_argument("--model", type=Path, default=ROOT / "outputs" / "quickstart", help="folder of an image model")
    parser.add_argument("--data_dir", type=Path, default=data_dir, help="folder with train.parquet and test.parquet")
    parser.add_argument("--output_dir", type=Path, default=ROOT / "outputs" / "integration_modes", help="for the plot")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], help="ranks per head to fit")
    parser.add_argument("--samples", type=int, nargs="+", default=[4, 8, 16, 32, 64, 128, 256], help="values of M")
    parser.add_argument("--calibration", type=int, default=256, help="training images that the factors are fitted to")
    parser.add_argument("--test", type=int, default=2000, help="test images")
    parser.add_argument("--steps", type=int, default=300, help="Adam steps per layer and rank")
    return parser.parse_args()


def stack(examples: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
    return tuple(torch.stack([example[name] for example in examples]) for name in ("pixel_values", "labels"))


@torch.no_grad()
def logits(model: ITNetForImageClassification, pixels: Tensor) -> Tensor:
    return torch.cat([model.eval()(pixel_values=part).logits for part in pixels.split(200)])


def cells(model, pixels: Tensor, labels: Tensor, expected: Tensor) -> str:
    """Returns two cells of a table: relative error of the logits, and accuracy."""
    actual = logits(model, pixels)
    error = float((actual - expected).norm() / expected.norm())
    return f"{error:.4f} | {float((actual.argmax(1) == labels).float().mean()):.2%}"


def low_rank_table(model, ranks: list[int], calibration: list[dict[str, Tensor]], steps: int, *test: Tensor) -> None:
    energies = kernel_spectrum(model, {"pixel_values": test[0][:4]}, centred=True)
    print("\n| rank per head | error of the layers | energy kept | error of the logits | accuracy |")
    print("|---|---|---|---|---|")
    for rank in ranks:
        converted = copy.deepcopy(model)
        report = converted.to_low_rank(rank, calibration, steps=steps, hold_out=0)  # the test images are unseen
        layers = ", ".join(f"{error:.3f}" for error in report.layer_errors)
        energy = float(energies.energy(rank).mean())
        print(f"| {rank} | {layers} | {energy:.3f} | {cells(converted, *test)} |")


def anchor_table(model, counts: list[int], *test: Tensor) -> None:
    converted = copy.deepcopy(model)
    print("\n| anchors | error of the logits | accuracy |\n|---|---|---|")
    for count in counts:
        converted.to_monte_carlo(num_samples=count)
        print(f"| {count} | {cells(converted, *test)} |")


@torch.no_grad()
def monte_carlo_errors(model, counts: list[int], pixels: Tensor) -> list[float]:
    """Returns relative errors of the first layer's integral with samples from the measure, over 20 draws each."""
    operator = model.itnet.layers[0].operator
    with integrating("exact"):
        features, domain = operator_inputs(model, {"pixel_values": pixels})[0]
        exact = operator.integral(features, domain)
    heads, kernel = features.unflatten(-1, (operator.num_heads, -1)), operator.kernel(domain.frequencies)
    torch.manual_seed(0)
    errors = []
    for count in counts:
        total = 0.0
        for _ in range(20):
            drawn = draw_from_measure(domain.measure, count, is_causal=False)
            given = {"indices": drawn.indices, "probabilities": drawn.probabilities, "measure": domain.measure}
            estimate = monte_carlo_transform(heads, domain.coordinates, kernel, **given).flatten(-2)
            total += float((estimate - exact).square().sum())
        errors.append((total / 20) ** 0.5 / float(exact.norm()))
    return errors


def plot(counts: list[int], errors: list[float], path: Path) -> None:
    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.loglog(counts, errors, "o-", label="measured")
    axes.loglog(counts, [errors[0] * (counts[0] / count) ** 0.5 for count in counts], "k--", label="1/√M")
    axes.set(xlabel="samples per query M", ylabel="relative error", title="Monte Carlo estimate of one layer")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    args = parse_arguments()
    if not (args.model / "config.json").exists():
        sys.exit(
            f"--model {args.model} holds no model: train one with `python examples/quickstart.py`, or name another"
        )
    model = ITNetForImageClassification.from_pretrained(args.model).eval()
    files = {name: str(args.data_dir / f"{name}.parquet") for name in ("train", "test")}
    data = load_dataset("parquet", data_files=files)
    processor = ITNetImageProcessor.from_pretrained(args.model)
    images, _ = stack(to_tensors(data["train"].select(range(args.calibration)), processor))
    calibration = [{"pixel_values": part} for part in images.split(64)]
    pixels, labels = stack(to_tensors(data["test"].select(range(args.test)), processor))
    expected = logits(model, pixels)
    print(f"exact: accuracy {float((expected.argmax(1) == labels).float().mean()):.2%} on {len(labels)} images")

    ranks = [rank for rank in args.ranks if rank <= model.config.head_dim]
    low_rank_table(model, ranks, calibration, args.steps, pixels, labels, expected)
    anchor_table(model, args.samples, pixels, labels, expected)
    errors = monte_carlo_errors(model, args.samples, pixels[:32])
    print("\n| samples | error of the first layer | times √M |\n|---|---|---|")
    for count, error in zip(args.samples, errors, strict=True):
        print(f"| {count} | {error:.4f} | {error * count**0.5:.3f} |")
    path = args.output_dir / "monte_carlo_error.png"
    plot(args.samples, errors, path)
    print(f"\nError against the number of samples drawn in {path}")


if __name__ == "__main__":
    main()
