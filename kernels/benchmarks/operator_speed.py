"""The exact operator: share of the machine's matrix-product rate, speed-up over the definition, backward, memory."""

from dataclasses import dataclass
from statistics import median

import torch
from report import table
from rich.progress import track
from timing import interleaved, median_ratio, peak_bytes
from torch import Tensor

from itnet_kernels import KERNEL_INPUTS, KernelWeights, integral_transform, kernel_input_size

SGEMM_SIZE = 2048


@dataclass(frozen=True)
class Shape:
    batch: int
    n: int
    heads: int
    head_dim: int
    width: int
    frequencies: int = 64

    @property
    def flops(self) -> int:
        """Of the reassociated form: two products per pair and the contraction with W2; nothing else is counted."""
        per_query = 4 * self.width * self.head_dim * self.n + 2 * self.width * self.head_dim**2
        return self.batch * self.heads * self.n * per_query


PAPER_SMALL = Shape(batch=4, n=196, heads=6, head_dim=64, width=128)  # one layer of ITNet-S on a 224-pixel image
LARGEST_REFERENCE = Shape(batch=1, n=144, heads=6, head_dim=64, width=128)  # K_ij alone takes 2 GB; ten seconds


def patch_grid(n: int) -> Tensor:
    """Returns patch centres of a square image, or a line of tokens where n is no square."""
    side = round(n**0.5)
    if side * side != n:
        return torch.nn.functional.pad(torch.arange(1, n + 1)[:, None] / n, (0, 1))
    centres = (torch.arange(side) + 0.5) / side
    return torch.cartesian_prod(centres, centres)


def make_inputs(shape: Shape, requires_grad: bool = False) -> tuple[Tensor, Tensor, KernelWeights]:
    torch.manual_seed(0)
    columns = kernel_input_size(KERNEL_INPUTS, shape.frequencies, 2, shape.head_dim)
    tensors = {
        "w1": 0.02 * torch.randn(shape.width, columns),
        "b1": torch.zeros(shape.width),
        "w2": 0.01 * torch.randn(shape.heads, shape.head_dim**2, shape.width),
        "b2": torch.eye(shape.head_dim).flatten().repeat(shape.heads, 1),
    }
    u = torch.randn(shape.batch, shape.n, shape.heads, shape.head_dim, requires_grad=requires_grad)
    tensors = {name: tensor.requires_grad_(requires_grad) for name, tensor in tensors.items()}
    return u, patch_grid(shape.n), KernelWeights(**tensors, fourier=10 * torch.randn(shape.frequencies, 2))


def measure(rounds: int) -> dict[str, dict]:
    steps = {
        "forward": lambda: forward_efficiency(rounds),
        "reference": lambda: speed_up_over_reference(max(3, rounds // 4)),
        "backward": lambda: backward_cost(rounds),
        "memory": memory_per_token,
    }
    return {name: steps[name]() for name in track(steps, description="benchmarks", transient=True)}


def forward_efficiency(rounds: int) -> dict[str, float]:
    """Returns the rate of ``tiled`` over that of a 2048^3 float32 matrix product, and the same for its parts."""
    shape = PAPER_SMALL
    u, positions, weights = make_inputs(shape)
    left, right = torch.randn(SGEMM_SIZE, SGEMM_SIZE), torch.randn(SGEMM_SIZE, SGEMM_SIZE)
    product = torch.empty(SGEMM_SIZE, SGEMM_SIZE)
    with torch.no_grad():
        times = interleaved(
            {
                "sgemm": lambda: torch.mm(left, right, out=product),
                "tiled": lambda: integral_transform(u, positions, weights, backend="tiled"),
                **_parts(shape),
            },
            rounds,
        )
    sgemm_flops = 2 * SGEMM_SIZE**3
    total = median(times["tiled"])
    share = {name: median(times[name]) / total for name in ("logits", "gelu", "moments", "contraction")}
    return {
        "sgemm_gflops": sgemm_flops / median(times["sgemm"]) / 1e9,
        "share_of_sgemm": median_ratio(times["sgemm"], times["tiled"]) * shape.flops / sgemm_flops,
        "milliseconds": 1e3 * total,
        **{f"time_share_{name}": value for name, value in share.items()},
        "time_share_rest": 1 - sum(share.values()),
    }


def _parts(shape: Shape) -> dict[str, object]:
    """Returns the four steps of a tile, alone and as often as a forward pass takes them, on tiles of 16 queries."""
    queries, pairs = 16, shape.batch * shape.heads
    rows = queries * shape.width
    repeats = pairs * -(-shape.n // queries)
    virtual, keys = torch.randn(rows, shape.head_dim + 1), torch.randn(shape.n, shape.head_dim + 1)
    bias, tile = torch.randn(rows, shape.n), torch.empty(rows, shape.n)
    hidden, moments = torch.randn(rows, shape.n), torch.empty(rows, shape.head_dim)
    stacked = torch.randn(shape.batch * queries, shape.width * shape.head_dim)
    w2 = torch.randn(shape.width * shape.head_dim, shape.head_dim)

    def repeat(step, times=repeats):
        return lambda: [step() for _ in range(times)]

    return {
        "logits": repeat(lambda: torch.addmm(bias, virtual, keys.T, out=tile)),
        "gelu": repeat(lambda: torch.ops.aten.gelu.out(hidden, out=tile)),
        "moments": repeat(lambda: torch.mm(hidden, keys[:, : shape.head_dim], out=moments)),
        "contraction": repeat(lambda: stacked @ w2, repeats // shape.batch),
    }


def speed_up_over_reference(rounds: int) -> dict[str, float]:
    """Returns the time of the definition over that of ``tiled``, at the largest size the definition has memory for."""
    inputs = make_inputs(LARGEST_REFERENCE)
    with torch.no_grad():
        times = interleaved(
            {name: lambda name=name: integral_transform(*inputs, backend=name) for name in ("reference", "tiled")},
            rounds,
        )
    return {"speed_up": median_ratio(times["reference"], times["tiled"])}


def backward_cost(rounds: int, shape: Shape = PAPER_SMALL) -> dict[str, float]:
    """Returns the time of the backward over that of the forward."""
    inputs = make_inputs(shape, requires_grad=True)
    grad = torch.randn_like(inputs[0])
    out = {}

    def forward():
        out["value"] = integral_transform(*inputs, backend="tiled")

    times = interleaved({"forward": forward, "backward": lambda: out["value"].backward(grad)}, rounds)
    return {"backward_over_forward": median_ratio(times["backward"], times["forward"])}


def memory_per_token() -> dict[str, float]:
    """Returns peak bytes of forward + backward at several n, each in a process of its own (see memory_probe.py).

    Per token means what one more token costs, (peak(2n) - peak(n)) / tokens between them: the workspace of the tiles
    is a constant that would hide it at small n.
    """
    batch, lengths = 32, (256, 512, 1024, 2048)
    peaks = {n: peak_bytes("memory_probe", str(batch), str(n)) for n in lengths}
    marginal = [(peaks[2 * n] - peaks[n]) / (batch * n) for n in lengths[:-1]]
    return {
        **{f"peak_bytes_{n}": float(peak) for n, peak in peaks.items()},
        **{f"bytes_per_token_{n}_to_{2 * n}": value for n, value in zip(lengths[:-1], marginal, strict=True)},
        "largest_over_smallest": max(marginal) / min(marginal),
    }


def summary(results: dict) -> str:
    """Makes the table of docs/speed.md."""
    forward, memory = results["forward"], results["memory"]
    rows = [
        ("`tiled` forward, share of the machine's sgemm rate", f"{forward['share_of_sgemm']:.2f}", "≥ 0.68"),
        ("`reference` time / `tiled` time", f"{results['reference']['speed_up']:.0f} ×", "≥ 40 ×"),
        ("backward time / forward time", f"{results['backward']['backward_over_forward']:.2f}", "≤ 3.2"),
        (
            "bytes per further token, n = 256 to 2048: largest / smallest",
            f"{memory['largest_over_smallest']:.2f}",
            "≤ 1.3",
        ),
    ]
    shares = ", ".join(
        f"{label} {forward[f'time_share_{name}']:.0%}"
        for name, label in (
            ("logits", "first product with the position bias"),
            ("gelu", "GELU"),
            ("moments", "second product"),
            ("contraction", "contraction with W2"),
            ("rest", "the rest (virtual queries, displacement table, Python)"),
        )
    )
    system = results["machine"]
    lines = [
        table(["measured", "value", "goal"], rows),
        "",
        f"Where the forward's time goes: {shares}.",
        f"({system['threads']} threads of {system['instructions']}, sgemm {forward['sgemm_gflops']:.0f} GFLOP/s, "
        f"torch {system['torch']}; medians of {results['rounds']} interleaved rounds.)",
    ]
    return "\n".join(lines)
