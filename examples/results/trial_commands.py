"""What the command lines of mode_accuracy.py, recall.py, language.py and evidence.py share."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from grid import ROOT
from trial_tables import write
from trials import SEEDS, Problem, run_model


@dataclass(frozen=True)
class Study:
    """A script, its problems, and where its logs and tables are."""

    script: str
    problems: Callable[[Path], dict[str, Problem]]  # of the folder of the data sets
    page: Callable[[dict[str, Problem], Path], str]  # of the problems and the folder of the logs
    logs: Path
    document: Path
    baselines: Callable[[Problem, Path], dict] | None = None  # models without trials: writes their log into a folder
    timings: Callable[[Problem, Path], dict] | None = None  # steps of models side by side: writes a log into a folder


def make_parser(study: Study, description: str, seeds: tuple[int, ...] | None = SEEDS) -> argparse.ArgumentParser:
    names = ", ".join(study.problems(ROOT / "data"))
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help=f"problems: {names} (default: all)")
    parser.add_argument("--models", nargs="+", help="names of models (default: all of a problem)")
    parser.add_argument("--seeds", nargs="*", type=int, default=seeds, help="of the trials that are tested")
    parser.add_argument("--steps", type=int, help="other than the problem's; needs another --logs")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--data", type=Path, default=ROOT / "data", help="folder of the data sets")
    parser.add_argument("--logs", type=Path, default=study.logs, help="folder of the logs")
    parser.add_argument("--table", action="store_true", help="write the tables instead of training")
    if study.baselines:
        parser.add_argument("--baselines", action="store_true", help="run the baselines instead of training")
    if study.timings:
        parser.add_argument("--timings", action="store_true", help="time steps side by side instead of training")
    parser.add_argument("--page", type=Path, default=study.document, help="document that holds the tables")
    return parser


def chosen(found: dict[str, Problem], args: argparse.Namespace) -> list[tuple[Problem, str]]:
    """Problems and models that the options name; a name that nobody has is an error."""
    models = {name for problem in found.values() for name in problem.contestants}
    for option, names, known in (("--only", args.only, found), ("--models", args.models, models)):
        unknown = [name for name in names or () if name not in known]
        if unknown:
            raise SystemExit(f"{option} ({unknown[0]}) must be among {', '.join(sorted(known))}")
    return [
        (problem, model)
        for problem in found.values()
        for model in problem.contestants
        if problem.name in (args.only or found) and model in (args.models or models)
    ]


def shortened(found: dict[str, Problem], steps: int | None) -> dict[str, Problem]:
    """Problems of so many steps, or unchanged."""
    return {name: replace(problem, steps=steps) if steps else problem for name, problem in found.items()}


def run_study(study: Study, description: str) -> argparse.Namespace:
    """Trains what the command line names and has no log yet, or writes the tables. Returns the options."""
    args = make_parser(study, description).parse_args()
    found = study.problems(args.data)
    if args.table:
        write(args.page, study.page(found, args.logs), study.script)
        return args
    if study.baselines and args.baselines:
        for name in args.only or (name for name, problem in found.items() if not problem.tuned_on):
            study.baselines(found[name], args.logs)
        return args
    torch.set_num_threads(args.threads)
    if study.timings and args.timings:
        study.timings(next(iter(found.values())), args.logs)
        return args
    found = shortened(found, args.steps)
    for problem, model in chosen(found, args):
        run_model(problem, found[problem.tuned_on or problem.name], model, tuple(args.seeds), args.logs)
    return args
