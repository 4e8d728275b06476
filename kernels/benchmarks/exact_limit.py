"""Up to how many positions exact integration is predicted to train as fast as Monte Carlo integration on a GPU.

    python kernels/benchmarks/exact_limit.py

The sums of one layer of the paper's B model (12 heads, 128 samples per query drawn from the measure), forward and
backward, 16384 positions in a batch, by the static models. Nothing is measured.
"""

import argparse

from gpu_model import DEVICES, Device, layer_work, predict
from mode_model import list_seconds
from report import table
from sass import KernelReport
from static_counts import static_counts

HEADS, SAMPLES, TOKENS = 12, 128, 16384
LENGTHS = (128, 196, 256, 384, 512, 768, 1024, 2048, 4096, 8192)


def exact_seconds(device: Device, n: int) -> float:
    kernels = {name: KernelReport(**report) for name, report in static_counts(device.arch)["exact"].items()}
    work = layer_work(kernels, HEADS, n, max(1, TOKENS // n), shared_positions=True)
    return sum(predict(work[kind], device, 1).seconds for kind in ("forward", "backward"))


def monte_carlo_seconds(device: Device, n: int) -> float:
    found = list_seconds(static_counts(device.arch), device, HEADS, n, max(1, TOKENS // n), SAMPLES)
    return sum(prediction.seconds for prediction in found)


def break_even(device: Device, step: int = 16) -> int:
    """Returns the most positions, up to 1024, at which exact integration is not slower."""
    lengths = range(step, 1025, step)
    return max((n for n in lengths if exact_seconds(device, n) <= monte_carlo_seconds(device, n)), default=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", nargs="+", default=[device.name for device in DEVICES])
    options = parser.parse_args()
    devices = [device for device in DEVICES if device.name in options.gpu]
    rows = [
        [device.name, *(f"{exact_seconds(device, n) / monte_carlo_seconds(device, n):.2f}" for n in LENGTHS),
         str(break_even(device))]
        for device in devices
    ]  # fmt: skip
    head = ["exact over Monte Carlo", *(f"n = {n}" for n in LENGTHS), "as fast up to n ="]
    print(table(head, rows))


if __name__ == "__main__":
    main()
