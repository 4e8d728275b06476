"""The first thing to run on a GPU: checks every kernel, times what models run, and writes one JSON and one page.

    python kernels/benchmarks/bench_gpu.py                    on a GPU: about ten minutes
    python kernels/benchmarks/bench_gpu.py --estimate H200    says how long that should take, on any machine
    python kernels/benchmarks/bench_gpu.py --interpret        the same path on a CPU, at tiny shapes

1. Every kernel in every dtype against its literal sum in float64, output and every gradient, and two runs bit by bit.
   Nothing is timed if one of them fails, and the exit code is 1.
2. Times: the operator of each mode beside SDPA, training steps of S, B and L in each mode beside ViT and BERT, the
   paper's tables profiling and wallclock row by row, and decoding.
3. gpu.json and gpu.md in the folder ``--output``: predictions of the static model stand beside what was measured.

Timing ends after ``--minutes``; rows whose turn did not come say so. CUDA and ROCm.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=HERE / "results", help="folder of gpu.json and gpu.md")
    parser.add_argument("--minutes", type=float, default=10.0, help="all of it: timing ends then")
    parser.add_argument("--estimate", metavar="GPU", help="only print how long it should take on H200, A100, ...")
    parser.add_argument("--interpret", action="store_true", help="Triton's interpreter at tiny shapes; no measurement")
    return parser.parse_args()


def use_interpreter() -> None:
    """Switches to Triton's interpreter, before Triton is imported. Tiles are large: it takes as long for a small one.
    The fused backward, whose tiles are many, is left to the checks that are meant for it."""
    os.environ |= {"TRITON_INTERPRET": "1", "ITNET_FUSED_BACKWARD": "0"}
    for kernel in ("FORWARD", "POSITION_GRADIENT", "POSITION_WEIGHTS"):
        os.environ.setdefault(f"ITNET_{kernel}_CONFIG", "BP=16,ROWS=128,BK=128,num_warps=4,num_stages=1")
    os.environ.setdefault("ITNET_FUSED_BACKWARD_CONFIG", "BP=16,ROWS=16,BK=128,num_warps=4,num_stages=1")


def main() -> None:
    options = parse()
    if options.interpret:
        use_interpreter()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic products of the checks
    import torch

    if not (options.interpret or options.estimate or torch.cuda.is_available()):
        sys.exit("no GPU here: torch.cuda.is_available() is False; --interpret runs the same path on a CPU")
    from gpu import plan, scope
    from gpu.predictions import Predictions, find_device

    chosen = scope.interpreted() if options.interpret else scope.on_gpu()
    name = options.estimate or ("A100" if options.interpret else torch.cuda.get_device_name())
    device = find_device(name)
    if options.estimate and device is None:
        sys.exit(f"`--estimate` ({name!r}) has no model: gpu_model.py knows {', '.join(known())}")
    planned = plan.rows(chosen, None if device is None else Predictions(device, chosen))
    estimate = plan.estimated_seconds(planned)
    total = sum(estimate.values())
    print(f"{len(planned)} rows; about {total / 60:.1f} minutes, {estimate['compiling'] / 60:.1f} of them compiling "
          f"and checking; timing ends after {options.minutes:g} minutes", flush=True)  # fmt: skip
    if options.estimate:
        return
    results = describe(options.interpret) | {"predicted_for": device and device.name, "batch": chosen.batch}
    results |= {"peak_tflops": device and device.tflops, "estimated_seconds": total, "is_measured": chosen.is_measured}
    measure(results, chosen, planned, 60 * options.minutes)
    write(results, options.output)
    if not results["all_checks_passed"]:
        sys.exit("a check failed, nothing was timed: see the page")


def known() -> list[str]:
    from gpu_model import DEVICES

    return [device.name for device in DEVICES]


def describe(is_interpreted: bool) -> dict:
    """Returns the device, versions and the commit."""
    import torch
    import triton

    results = {
        "device": "Triton's interpreter",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": version("transformers"),
        "python": platform.python_version(),
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if not is_interpreted:
        properties = torch.cuda.get_device_properties(0)
        results |= {"device": properties.name, "memory_gb": round(properties.total_memory / 2**30)}
        results["driver"] = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    found = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=HERE, capture_output=True, text=True)
    return results | {"commit": found.stdout.strip() or None}


def measure(results: dict, chosen, planned: list, seconds: float) -> None:
    """Fills in checks, rows and the time that they took."""
    import torch
    from gpu import checks, page
    from gpu.clock import Clock

    start = time.perf_counter()
    clock = Clock(torch.device(chosen.device), seconds)
    # Those without a deterministic form warn; unwritten memory is NaN.
    torch.use_deterministic_algorithms(True, warn_only=True)
    results["checks"] = []
    for row in checks.run(chosen):
        results["checks"].append(row)
        print(f"{row['family']}: {row['case']}, {row['dtype']}: {'passed' if row['passed'] else row}", flush=True)
    torch.use_deterministic_algorithms(False)
    results["all_checks_passed"] = all(row["passed"] for row in results["checks"])
    results["rows"] = {section: [] for _, section, _ in page.SECTIONS}
    for row in planned if results["all_checks_passed"] else ():
        predicted = {} if row.predicted is None else row.predicted.row()
        found = row.labels | clock.measure(row.workload) | predicted
        results["rows"][row.section].append(found)
        figures = found.get("failure") or ", ".join(f"{k} {v:.3f}" for k, v in found.items() if k.endswith("_ms"))
        print(f"{row.section}: {' '.join(str(v) for v in row.labels.values())}: {figures}", flush=True)
    results["seconds"] = time.perf_counter() - start


def write(results: dict, folder: Path) -> None:
    from gpu import page

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    (folder / "gpu.md").write_text(page.page(results), encoding="utf-8")
    print(f"{folder / 'gpu.json'}\n{folder / 'gpu.md'}")


if __name__ == "__main__":
    main()
