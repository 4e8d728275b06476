"""Measures the Triton kernels on a GPU: correctness first, then speed beside PyTorch's attention.

python kernels/benchmarks/gpu.py [--rounds 20] [--no-write]

1. bfloat16 and float16 against the float32 reference, output and gradients, on awkward lengths; two runs bit by bit.
   Nothing is timed if this fails.
2. Time, TFLOPS and peak memory of forward and backward at the paper's shapes, next to scaled dot-product attention of
   the same heads and lengths. FLOPs are those that the mathematics needs (4 n w d_h per query and head, and the
   product with W2); a backward counts three times its forward. The paper reports 604 TFLOPS on an H200.

Results go to results/gpu.json, with the device and the versions.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from operator_speed import Shape, make_inputs
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from itnet_kernels import KernelWeights, integral_transform

RESULTS = Path(__file__).parent / "results" / "gpu.json"
PAPER_TFLOPS = 604
PAPER_HEADS = {"S": 6, "B": 12, "L": 16}
LENGTHS = (196, 512, 1024)
TOKENS = 16384  # per timed batch
# Three times the rounding that a model of the kernel in PyTorch has at these widths.
TOLERANCE = {torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3, torch.float32: 2e-5}
CHECKS = [  # (length, causal, head size, width)
    *((n, is_causal, 64, 128) for n, is_causal in ((1, False), (63, False), (64, True), (65, True), (130, False))),
    (65, True, 48, 96),
    (65, False, 128, 64),
]


def to_device(inputs, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, KernelWeights]:
    """Leaves on the device: features and weights in ``dtype``, positions and frequencies in float32."""
    u, positions, weights = inputs
    moved = {
        name: getattr(weights, name).detach().to(device, dtype).requires_grad_() for name in ("w1", "b1", "w2", "b2")
    }
    weights = weights._replace(fourier=weights.fourier.to(device), **moved)
    return u.detach().to(device, dtype).requires_grad_(), positions.to(device), weights


def gradients(inputs, measure: Tensor, is_causal: bool, backend: str) -> list[Tensor]:
    """Output, then the gradients of u, w1, b1, w2, b2 under a fixed functional."""
    u, positions, weights = inputs
    out = integral_transform(u, positions, weights, measure=measure, is_causal=is_causal, backend=backend)
    probe = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, [u, *weights[:4]], probe)]


def check(device: str) -> list[dict]:
    """Relative errors, positions shared and per sample; exits if one is too large or a second run differs."""
    rows = []
    for (n, is_causal, head_dim, width), per_sample in itertools.product(CHECKS, (False, True)):
        u, positions, weights = make_inputs(Shape(batch=2, n=n, heads=2, head_dim=head_dim, width=width))
        given = u, torch.stack([positions, 0.7 * positions]) if per_sample else positions, weights
        exact = to_device(given, device, torch.float32)
        measure = torch.rand(2, n, device=device)
        measure[0, n // 2 + 1 :] = 0
        expected = gradients(exact, measure, is_causal, "reference")
        for dtype, tolerance in TOLERANCE.items():
            inputs = to_device(given, device, dtype)
            first, second = (gradients(inputs, measure, is_causal, "triton") for _ in range(2))
            errors = [
                float((a.float() - e).norm() / e.norm().clamp_min(1e-12)) for a, e in zip(first, expected, strict=True)
            ]
            repeats = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
            row = {"n": n, "causal": is_causal, "head_dim": head_dim, "width": width, "per_sample": per_sample}
            rows.append(row | {"dtype": str(dtype), "errors": errors, "repeats": repeats})
            if max(errors) > tolerance or not repeats:
                sys.exit(f"wrong result, nothing is timed: {rows[-1]}, tolerance {tolerance}")
    return rows


def milliseconds(run: Callable[[], object], rounds: int) -> float:
    """Median time on the device, after two runs that are not counted (they tune and compile)."""
    for _ in range(2):
        run()
    times = []
    for _ in range(rounds):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return median(times)


def both_passes(run: Callable[[], Tensor], leaves: list[Tensor]) -> Callable[[], object]:
    def step():
        out = run()
        return torch.autograd.grad(out, leaves, torch.ones_like(out))

    return step


def measure_shape(name: str, heads: int, n: int, rounds: int, device: str) -> dict:
    """One layer of model ``name`` in bfloat16."""
    shape = Shape(batch=max(1, TOKENS // n), n=n, heads=heads, head_dim=64, width=128)
    u, positions, weights = to_device(make_inputs(shape), device, torch.bfloat16)
    measure = torch.full((shape.batch, n), 1 / n, device=device)  # models always give one
    query, key, value = (torch.randn_like(u.transpose(1, 2)).requires_grad_() for _ in range(3))
    sides = {
        "itnet": (
            lambda: integral_transform(u, positions, weights, measure=measure, backend="triton"),
            [u, *weights[:4]],
            shape.flops,
        ),
        "sdpa": (
            lambda: scaled_dot_product_attention(query, key, value),
            [query, key, value],
            4 * shape.batch * heads * n * n * shape.head_dim,
        ),
    }
    row = {"model": name, "n": n, "batch": shape.batch}
    for side, (run, leaves, flops) in sides.items():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        forward = milliseconds(run, rounds)
        total = milliseconds(both_passes(run, leaves), rounds)
        row[f"{side}_forward_ms"], row[f"{side}_total_ms"] = forward, total
        row[f"{side}_forward_tflops"] = flops / forward / 1e9
        row[f"{side}_total_tflops"] = 4 * flops / total / 1e9
        row[f"{side}_peak_mb"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--no-write", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no GPU here: torch.cuda.is_available() is False")
    import triton

    device = "cuda"
    results = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "paper_tflops": PAPER_TFLOPS,
        "checks": check(device),
    }
    print(f"{len(results['checks'])} checks passed on {results['device']}")
    results["shapes"] = []
    for name, heads in PAPER_HEADS.items():
        for n in LENGTHS:
            row = measure_shape(name, heads, n, options.rounds, device)
            results["shapes"].append(row)
            print(
                f"{name} n={n}: forward {row['itnet_forward_ms']:.2f} ms, {row['itnet_forward_tflops']:.0f} TFLOPS "
                f"(paper {PAPER_TFLOPS}); with backward {row['itnet_total_ms']:.2f} ms, "
                f"{row['itnet_total_tflops']:.0f} TFLOPS; SDPA {row['sdpa_forward_ms']:.2f} / "
                f"{row['sdpa_total_ms']:.2f} ms, {row['sdpa_forward_tflops']:.0f} TFLOPS"
            )
    if not options.no_write:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
