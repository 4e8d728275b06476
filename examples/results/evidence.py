"""Where a joint kernel wins: typed particles and irregular meshes, all models under one protocol (protocol.py).

python examples/results/evidence.py --plan
python examples/results/evidence.py --only particles --models exact egnn
python examples/results/evidence.py --part 1/2 & python examples/results/evidence.py --part 2/2
python examples/results/evidence.py --timed
python examples/results/evidence.py --baselines
python examples/results/evidence.py --table

The first command says how long everything takes, the second trains two models, the third all of them on two cores, the
fourth then adds rows of equal training time, the fifth baselines that need no training; the last one writes the page.
Training can be stopped and started again at will: a trial that has a log in --logs is not run again, and a search
finds its way from logs. particle_problems.py and mesh_problems.py say what is trained. Meshes of others are data:
python examples/data/download.py meshes
"""

import argparse
from functools import partial
from pathlib import Path

import evidence_tables
import mesh_problems
import particle_problems
import torch
from grid import RESULTS, ROOT
from planning import plan
from protocol import Missing, Searched, run_rows, run_timed_rows, run_trivial
from trial_commands import Study, chosen, make_parser, shortened
from trial_tables import markdown, write

SCRIPT = "evidence"
LOGS = RESULTS / SCRIPT
PAGE = ROOT / "docs" / "evidence.md"

page = partial(evidence_tables.page, script=SCRIPT)


def problems(data: Path) -> dict[str, Searched]:
    """By name. ``data`` is the folder of the data sets."""
    return {**particle_problems.problems(), **mesh_problems.problems(data)}


def own_part(pairs: list[tuple[Searched, str]], part: str) -> list[tuple[Searched, str]]:
    """Every N-th model of "K/N", from the K-th; an ablation stays with the model whose search it takes."""
    number, _, count = part.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise SystemExit(f"--part ({part}) must be K/N with 1 <= K <= N")
    leaders = list(dict.fromkeys((p.name, p.contestants[m].tuned_as or m) for p, m in pairs))
    own = leaders[int(number) - 1 :: int(count)]
    return [(p, m) for p, m in pairs if (p.name, p.contestants[m].tuned_as or m) in own]


def run(study: Study, description: str) -> argparse.Namespace:
    """What the options say, of a study of searched problems."""
    parser = make_parser(study, description, seeds=None)
    parser.add_argument("--part", default="1/1", help="K/N: the K-th of N processes that share the work")
    parser.add_argument("--plan", action="store_true", help="estimate the time instead of training")
    parser.add_argument("--timed", action="store_true", help="train rows of equal time instead of equal steps")
    args = parser.parse_args()
    found = study.problems(args.data)
    if args.table:
        write(args.page, study.page(found, args.logs), study.script)
        return args
    torch.set_num_threads(args.threads)
    found = shortened(found, args.steps)
    named = chosen(found, args)
    pairs = own_part([(p, m) for p, m in named if args.only or not p.on_request], args.part)
    if args.plan:
        print("\n".join(markdown(plan(pairs, args.logs))))
    elif study.baselines and args.baselines:
        for problem in {p.name: p for p, _ in pairs}.values():
            study.baselines(problem, args.logs)
    else:
        for problem, model in pairs:
            try:
                if args.timed and problem.is_timed(model):
                    run_timed_rows(problem, model, args.logs, args.seeds or problem.timed_seeds)
                elif not args.timed:
                    run_rows(problem, model, args.logs, problem.seeds if args.seeds is None else args.seeds)
            except Missing as error:
                print(f"{problem.name}.{model}: waits for {error}; run this again when it is there", flush=True)
    return args


def main() -> None:
    run(Study(SCRIPT, problems, page, LOGS, PAGE, baselines=run_trivial), __doc__)


if __name__ == "__main__":
    main()
