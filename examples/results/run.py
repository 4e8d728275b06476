"""Trains everything behind docs/results.md and writes it, run after run. Finished runs are skipped: restart at will.
Several of these may work side by side; table.py then writes docs/results.md.

python examples/results/run.py --list
python examples/results/run.py --only 'cifar10.*' 'darcy.*' --minutes 30
"""

import argparse
import fnmatch
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from grid import Run, runs
from table import PAGE, page

from modeling_itnet.training.recipes import ROOT, find_recipe, read_recipe


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["*"], help="patterns of table.row.seed, in order of importance")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no run after so many minutes")
    parser.add_argument("--data", type=Path, default=ROOT / "data", help="folder of the data sets")
    parser.add_argument("--list", action="store_true", help="print the runs and whether they are done")
    parser.add_argument(
        "--keep", type=Path, default=ROOT / "outputs" / "results", help="folder of the trained models and their logs"
    )
    return parser.parse_args()


def chosen(patterns: list[str]) -> list[Run]:
    found: list[Run] = []
    for pattern in patterns:
        found += [run for run in runs() if run not in found and fnmatch.fnmatch(run.path.stem, pattern)]
    return found


def train(run: Run, args: argparse.Namespace, folder: Path) -> None:
    if run.row.start and not (args.keep / run.row.start / "config.json").is_file():
        print(f"skipped: it starts from {run.row.start}, whose model is not in {args.keep}", flush=True)
        return
    recipe = find_recipe(run.table.recipe)
    options = read_recipe(recipe)
    data = args.data / Path(options["dataset"]).relative_to("data")  # recipes of the grid name data/<this>
    if not data.exists():
        sys.exit(f"no data in {data}: get them with `python examples/data/download.py {data.name}`, or name --data")
    command = [sys.executable, f"examples/{options['script']}.py", str(recipe.relative_to(ROOT)), *run.options]
    command += ["--dataset", os.path.relpath(data, ROOT), "--disable_tqdm", "true"]
    if run.row.start:
        command += ["--model_name_or_path", os.path.relpath(args.keep / run.row.start, ROOT)]
    command += ["--output_dir", str(folder), "--results_file", str(folder / "record.json")]
    log = Path(f"{folder}.log")
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=file, stderr=file)
    if done.returncode:
        print(f"failed, see {log}", flush=True)
        return
    run.path.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(folder / "record.json", run.path)
    PAGE.write_text(page(), encoding="utf-8")


def main() -> None:
    args = parse_arguments()
    start = time.monotonic()
    args.keep.mkdir(parents=True, exist_ok=True)
    for run in chosen(args.only):
        if args.list or run.path.is_file():
            print(f"{run.path.stem}: {'done' if run.path.is_file() else 'not run'}", flush=True)
            continue
        if time.monotonic() - start > 60 * args.minutes:
            break
        print(f"{run.path.stem} ...", flush=True)
        train(run, args, args.keep / run.path.stem)


if __name__ == "__main__":
    main()
