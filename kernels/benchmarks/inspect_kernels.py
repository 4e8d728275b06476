"""What the compiler makes of the Triton kernels, and what that predicts, without a GPU.

    python kernels/benchmarks/inspect_kernels.py --arch sm_90
    python kernels/benchmarks/inspect_kernels.py --roofline
    python kernels/benchmarks/inspect_kernels.py --roofline --write

Compiles every shipped tile configuration offline, disassembles it and counts what is in the loop over keys. With
``--check`` it fails if one of them spills there, computes something twice or has its products serialised. With
``--roofline`` it prints what gpu_model.py predicts for the paper's shapes on several GPUs, and ``--write`` puts it
into docs/roofline.md. Nothing is measured.
"""

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

from gpu_model import DEVICES, attention_work, layer_work, model_seconds, predict, useful_flops
from sass import KernelReport, inspect_kernel, kernels_on, shipped_configs

MODELS = {"S": (6, 12), "B": (12, 12), "L": (16, 24)}  # heads and layers; d_h = 64, w = 128
LENGTHS = (196, 512, 1024)
BATCH = 32
PAGE = Path(__file__).resolve().parents[2] / "docs" / "roofline.md"


def roofline(devices: list[str] | None = None, loops_only: bool = False) -> list[dict]:
    """Returns a row for each device, model and length: milliseconds of a layer and of a model, limits and
    utilisations.

    ``loops_only`` leaves out what rows cost outside of the loops over keys.
    """
    rows, reports = [], {}
    for device in DEVICES:
        if devices and device.name not in devices:
            continue
        if device.arch not in reports:
            reports[device.arch] = {
                kernel: inspect_kernel(kernel, shipped_configs(kernel, device.arch)[0], device.arch)
                for kernel in kernels_on(device.arch)
            }
            if loops_only:
                nothing = {"row_slots": None, "row_shared_bytes": None, "row_global_bytes": None}
                found = reports[device.arch]
                reports[device.arch] = {kernel: replace(report, **nothing) for kernel, report in found.items()}
        for model, (heads, layers) in MODELS.items():
            for n in LENGTHS:
                work, peer = layer_work(reports[device.arch], heads, n, BATCH, True), attention_work(heads, n, BATCH)
                flops = useful_flops(heads, n, BATCH)
                row = {"GPU": device.name, "model": model, "n": n}
                times = {}
                for kind, share in (("forward", 1), ("backward", 3)):
                    found = predict(work[kind], device, share * flops)
                    times[kind] = found.seconds
                    row |= {f"{kind} ms": round(1e3 * found.seconds, 2), "util " + kind: round(found.utilisation, 2)}
                    row[f"{kind} limit"] = found.limit
                    other = predict(peer[kind], device, 1)
                    times["peer " + kind] = other.seconds
                row["attention ms"] = round(1e3 * (times["peer forward"] + times["peer backward"]), 2)
                for name, layer in (("model step", ""), ("peer step", "peer ")):
                    seconds = times[layer + "forward"] + times[layer + "backward"]
                    total = model_seconds(seconds, device, layers, 64 * heads, n, BATCH, is_step=True)
                    row[f"{name} ms"] = round(1e3 * total, 1)
                rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default="sm_90", help="sm_80, sm_90, sm_100, ... or gfx942, ...")
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64])
    parser.add_argument("--width", type=int, nargs="+", default=[128])
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp16", "fp32"])
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--check", action="store_true", help="fail if a configuration has a fault")
    parser.add_argument("--roofline", nargs="*", metavar="GPU", help="predictions for these GPUs, or for all")
    parser.add_argument("--loops-only", action="store_true", help="predictions from the loops over keys alone")
    parser.add_argument("--write", action="store_true", help="with --roofline: into docs/roofline.md, all GPUs")
    options = parser.parse_args()
    if options.write and (options.roofline != [] or options.loops_only):
        parser.error("--write goes with --roofline of all GPUs")
    if options.roofline is not None:
        rows = roofline(options.roofline, options.loops_only)
        if options.write:
            write_page(rows)
        print(json.dumps(rows, indent=2) if options.json else table(rows))
        return
    reports = [
        inspect_kernel(kernel, config, options.arch, head_dim, width, options.dtype)
        for head_dim in options.head_dim
        for width in options.width
        for kernel in kernels_on(options.arch, head_dim, options.dtype)
        for config in shipped_configs(kernel, options.arch, head_dim, options.dtype)
    ]
    if options.json:
        print(json.dumps({"kernels": [asdict(r) for r in reports]}, indent=2))
    else:
        print(table([_row(report) for report in reports]))
    faults = [f"{r.kernel} d_h={r.head_dim} w={r.width} {r.config}: {fault}" for r in reports for fault in r.faults()]
    if options.check and faults:
        sys.exit("\n".join(faults))


def write_page(rows: list[dict]) -> None:
    """Writes a table for each GPU, between the marks of the page."""
    from run import write_between_marks

    parts = []
    for device in DEVICES:
        own = [{key: value for key, value in row.items() if key != "GPU"} for row in rows if row["GPU"] == device.name]
        rates = f"{device.tflops:g} TFLOPS, {device.processors} multiprocessors at {device.ghz} GHz, {device.hbm} TB/s"
        parts.append(f"## {device.name}\n\n{rates}; compiled for {device.arch}.\n\n{table(own)}")
    write_between_marks(PAGE, "roofline", "\n\n".join(parts))


def _row(report: KernelReport) -> dict:
    config = " ".join(f"{name.replace('num_', '')}={value}" for name, value in report.config.items())
    tensor = " ".join(f"{count} {kind}" for kind, count in (report.tensor_instructions or {}).items())
    return {
        "kernel": report.kernel,
        "d_h": report.head_dim,
        "w": report.width,
        "config": config,
        "regs": report.registers,
        "stack B": report.stack_bytes,
        "loop spills": report.loop_spill_instructions,
        "smem KB": round(report.shared_bytes / 1024, 1),
        "CTA/SM": report.programs_per_sm,
        "tensor": tensor,
        "waits": report.tensor_waits,
        "FMA/el": report.fma_per_element,
        "MUFU/el": report.mufu_per_element,
        "all/el": report.instructions_per_element,
        "shared B/el": report.shared_bytes_per_element,
        "L2 B/el": report.global_bytes_per_element,
        "all/row": report.row_slots and round(report.row_slots),
        "shared B/row": report.row_shared_bytes and round(report.row_shared_bytes),
        "faults": "; ".join(report.faults()) or "none",
    }


def table(rows: list[dict]) -> str:
    cells = [list(rows[0]), *[["-" if value is None else str(value) for value in row.values()] for row in rows]]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    lines.insert(1, "-|-".join("-" * width for width in widths))
    return "\n".join(f"| {line} |" for line in lines)


if __name__ == "__main__":
    main()
