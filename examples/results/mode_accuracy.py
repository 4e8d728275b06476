"""How accurate integration modes are, beside peers, where the kernel must see both ends of a pair at once.

python examples/results/mode_accuracy.py --only particles-32 --models exact-8 low_rank --threads 1
python examples/results/mode_accuracy.py --table

The first command trains what has no log in docs/results/modes yet: restart at will. Several of these may work side by
side if they name different models or, once rates are tuned, different seeds. The second writes the tables of
docs/mode_accuracy.md from the logs. mode_problems.py says what is trained, mode_trials.py by which protocol.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from grid import RESULTS, ROOT
from mode_problems import Problem, problems
from mode_table import page, write
from mode_trials import SEEDS, run_model

LOGS = RESULTS / "modes"
PAGE = ROOT / "docs" / "mode_accuracy.md"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="problems: particles-32, particles-256, cifar10 (default: all)")
    parser.add_argument("--models", nargs="+", help="names of models (default: all of a problem)")
    parser.add_argument("--seeds", nargs="*", type=int, default=SEEDS, help="of the trials that are tested")
    parser.add_argument("--steps", type=int, help="other than the problem's; needs another --logs")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--data", type=Path, default=ROOT / "data", help="folder of the data sets")
    parser.add_argument("--logs", type=Path, default=LOGS, help="folder of the logs")
    parser.add_argument("--table", action="store_true", help="write the tables instead of training")
    parser.add_argument("--page", type=Path, default=PAGE, help="document that holds the tables")
    return parser.parse_args()


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


def main() -> None:
    args = parse_arguments()
    found = problems(args.data)
    if args.table:
        write(args.page, page(found, args.logs))
        return
    torch.set_num_threads(args.threads)
    if args.steps:
        found = {name: replace(problem, steps=args.steps) for name, problem in found.items()}
    for problem, model in chosen(found, args):
        run_model(problem, found[problem.tuned_on or problem.name], model, tuple(args.seeds), args.logs)


if __name__ == "__main__":
    main()
