"""Runs the benchmarks and prints them as Markdown beside their goals.

python kernels/benchmarks/run.py                       the operator: docs/speed.md
python kernels/benchmarks/run.py --modes               whole models in every integration mode: docs/integration.md
python kernels/benchmarks/run.py --widths              exact models by kernel width beside a ViT
python kernels/benchmarks/run.py --padded              padded beside unpadded text
python kernels/benchmarks/run.py --generation          causal models: decoding, cache and training beside GPT-2
python kernels/benchmarks/run.py --points 100000       a cloud in near_far mode: seconds and memory
python kernels/benchmarks/run.py --against DIRECTORY   the operator here and in another checkout; with --modes models

Both sides of every ratio run in turn. A whole run writes results/NAME.json and the table of a page that has marks for
it, <!-- NAME: begin --> and <!-- NAME: end -->. A part of a run (--only, --lengths, --quick and the like) only prints;
--output writes its figures to a file.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from timing import machine

LAYERS, POINTS = 2, 100_000  # of a whole run
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
INTEGRATION, GENERATION, SPEED = (ROOT / "docs" / f"{name}.md" for name in ("integration", "generation", "speed"))
#: File of the results, page and marks, and rounds.
OUTPUTS = {
    "operator": ("cpu.json", SPEED, "benchmarks", 12),
    "modes": ("modes_cpu.json", INTEGRATION, "benchmarks", 3),
    "widths": ("widths_cpu.json", INTEGRATION, "widths", 5),
    "padded": ("padded_cpu.json", INTEGRATION, "padded", 9),
    "generation": ("generation_cpu.json", GENERATION, "benchmarks", 5),
    "points": ("points_cpu.json", INTEGRATION, "points", 1),
    "against": (None, None, None, 12),
}


def write_between_marks(page: Path, name: str, text: str) -> None:
    """Replaces what stands between the marks; a page without them stays as it is."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    if found:
        page.write_text(f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}", encoding="utf-8")


def write_json(target: Path, results: dict) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def chosen(arguments: argparse.Namespace) -> str:
    others = ("modes", "widths", "padded", "generation", "points")
    return "against" if arguments.against else next((name for name in others if getattr(arguments, name)), "operator")


def prepare(name: str, arguments: argparse.Namespace, rounds: int) -> tuple[Callable[[], dict], Callable[[dict], str]]:
    """Returns what measures and what prints. Modules are imported here, as some need Transformers and some do not."""
    if name == "operator":
        import operator_speed

        return lambda: operator_speed.measure(rounds), operator_speed.summary
    if name == "against":
        import against

        cells = against.operator_cells()[: 2 if arguments.quick else None]
        if arguments.modes:
            from contestants import ITNET

            names = tuple(n for n in ITNET if n != "exact") if arguments.only is None else arguments.only
            cells = against.model_cells(names, tuple(arguments.lengths or (196, 1024)), arguments.layers)
        memory = not (arguments.modes or arguments.quick)
        return lambda: against.measure(rounds, ROOT, arguments.against.resolve(), cells, memory), against.summary
    if name == "points":
        import points

        return lambda: points.measure(rounds, arguments.points), points.summary
    from contestants import Size

    size = Size(layers=arguments.layers)
    if name == "modes":
        import modes

        lengths = tuple(arguments.lengths or ((196, 512) if arguments.quick else modes.LENGTHS))
        return lambda: modes.measure(rounds, size, lengths, arguments.only, not arguments.quick), modes.summary
    if name == "widths":
        import widths

        return lambda: widths.measure(rounds, size, (4, 8) if arguments.quick else widths.WIDTHS), widths.summary
    if name == "generation":
        import generation

        lengths = ((32, 64), (32, 64)) if arguments.quick else (generation.CONTEXTS, generation.LENGTHS)
        return lambda: generation.measure(rounds, size, *lengths), generation.summary
    import padded

    return lambda: padded.measure(rounds, size, batch=8 if arguments.quick else padded.BATCH), padded.summary


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--modes", action="store_true", help="whole models in every integration mode (slow)")
    which.add_argument("--widths", action="store_true", help="exact models by kernel width")
    which.add_argument("--padded", action="store_true", help="padded beside unpadded text")
    which.add_argument("--generation", action="store_true", help="causal models beside GPT-2 and Mamba")
    which.add_argument("--points", type=int, metavar="N", help="a cloud of N points in near_far mode")
    parser.add_argument("--against", type=Path, metavar="DIR", help="another checkout to compare with, cell by cell")
    parser.add_argument("--rounds", type=int, help="interleaved rounds per timing; each benchmark has a default")
    parser.add_argument("--layers", type=int, default=LAYERS, help="depth of the models")
    parser.add_argument("--lengths", type=int, nargs="+", help="with --modes: numbers of positions")
    parser.add_argument("--only", type=lambda names: tuple(names.split(",")), help="with --modes: nf-25,lr-8,sdpa")
    parser.add_argument("--quick", action="store_true", help="one round, fewer cells, no memory")
    parser.add_argument("--output", type=Path, help="write the figures to this file, as JSON")
    parser.add_argument("--no-write", action="store_true", help="leave results/ and the pages alone")
    arguments = parser.parse_args()
    others = (arguments.widths, arguments.padded, arguments.generation, arguments.points)
    if arguments.against and any(others):
        parser.error("--against compares the operator, or with --modes whole models")
    if arguments.against and not (arguments.against / "kernels" / "itnet_kernels").is_dir():
        parser.error(f"--against ({arguments.against}) must be a checkout of this repository")
    if arguments.only:
        from contestants import NAMES

        unknown = [name for name in arguments.only if name not in NAMES]
        if unknown:
            parser.error(f"--only has unknown names {unknown}; allowed are {list(NAMES)}")

    name = chosen(arguments)
    file, page, marks, default_rounds = OUTPUTS[name]
    rounds = 1 if arguments.quick else arguments.rounds or default_rounds
    run, summary = prepare(name, arguments, rounds)
    results = {"machine": machine(), "rounds": rounds}
    if name in ("modes", "widths", "padded", "generation"):
        results["layers"] = arguments.layers
    results |= run()
    text = summary(results)
    Console().print(text, markup=False, highlight=False, soft_wrap=True)
    if arguments.output:
        write_json(arguments.output, results)
    is_part = arguments.quick or arguments.only or arguments.lengths or arguments.layers != LAYERS
    is_part = is_part or (name == "points" and arguments.points != POINTS)
    if file and not is_part and not arguments.no_write:
        write_json(HERE / "results" / file, results)
        write_between_marks(page, marks, text)


if __name__ == "__main__":
    main()
