"""Runs the benchmarks, prints them, and writes results/cpu.json and the table in README.md.

python kernels/benchmarks/run.py [--rounds 12] [--no-write]
python kernels/benchmarks/run.py --modes [--layers 2] [--lengths 196 512 1024 4096]

With --modes it times whole models in every integration mode beside attention instead, which takes much longer, and
writes results/modes_cpu.json and the table in docs/integration.md.
"""

import argparse
import json
from pathlib import Path

from operator_speed import backward_cost, forward_efficiency, memory_per_token, speed_up_over_reference
from rich.console import Console
from rich.progress import Progress, track
from timing import machine

HERE = Path(__file__).parent
README = HERE.parents[1] / "README.md"
INTEGRATION = HERE.parents[1] / "docs" / "integration.md"
MARKS = ("<!-- benchmarks: begin -->", "<!-- benchmarks: end -->")


def table(results: dict) -> str:
    """The README's table."""
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
    lines = ["| measured | value | goal |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows), ""]
    lines += [
        f"Where the forward's time goes: {shares}.",
        f"({system['threads']} threads of {system['instructions']}, sgemm {forward['sgemm_gflops']:.0f} GFLOP/s, "
        f"torch {system['torch']}; medians of {results['rounds']} interleaved rounds.)",
    ]
    return "\n".join(lines)


def write_between_marks(path: Path, text: str) -> None:
    before, rest = path.read_text(encoding="utf-8").split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    path.write_text(f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{after}", encoding="utf-8")


def write(name: str, results: dict, page: Path, text: str) -> None:
    target = HERE / "results" / name
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    write_between_marks(page, text)


def run_modes(arguments: argparse.Namespace) -> None:
    from modes import KINDS, LENGTHS, growth, mode_speed, mode_summary

    lengths = tuple(arguments.lengths or LENGTHS)
    results = {"machine": machine(), "rounds": arguments.rounds, "layers": arguments.layers, "longest": max(lengths)}
    with Progress(transient=True) as progress:
        task = progress.add_task("modes", total=len(lengths) * len(KINDS) + 1)
        advance = lambda: progress.advance(task)  # noqa: E731
        results["speed"] = mode_speed(arguments.rounds, arguments.layers, lengths, advance)
        results |= growth(arguments.rounds, arguments.layers, max(lengths))
    text = mode_summary(results)
    Console().print(text, markup=False, highlight=False, soft_wrap=True)
    if not arguments.no_write:
        write("modes_cpu.json", results, INTEGRATION, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12, help="interleaved rounds per timing")
    parser.add_argument("--no-write", action="store_true", help="print only; leave results/ and the pages alone")
    parser.add_argument("--modes", action="store_true", help="whole models in every integration mode instead")
    parser.add_argument("--layers", type=int, default=2, help="with --modes: depth of the models")
    parser.add_argument("--lengths", type=int, nargs="+", help="with --modes: numbers of positions")
    arguments = parser.parse_args()
    if arguments.modes:
        run_modes(arguments)
        return
    steps = {
        "forward": lambda: forward_efficiency(arguments.rounds),
        "reference": lambda: speed_up_over_reference(max(3, arguments.rounds // 4)),
        "backward": lambda: backward_cost(arguments.rounds),
        "memory": memory_per_token,
    }
    results = {"machine": machine(), "rounds": arguments.rounds}
    for name in track(steps, description="benchmarks", transient=True):
        results[name] = steps[name]()
    text = table(results)
    Console().print(text, markup=False, highlight=False)
    if not arguments.no_write:
        write("cpu.json", results, README, text)


if __name__ == "__main__":
    main()
