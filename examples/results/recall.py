"""What causal models recall of their context, beside peers of the same size: four tasks, with logs, tables and plots.

python examples/results/recall.py --only associative --models near_far gpt2 --threads 1
python examples/results/recall.py --table

The first command trains what has no log in docs/results/recall yet: restart at will. Several of these may work side by
side if they name different models or, once rates are tuned, different seeds. The second writes the tables of
docs/recall.md and its pictures from the logs. recall_tasks.py draws the data, recall_problems.py says what is trained,
trials.py by which protocol.
"""

from pathlib import Path

import trial_tables
from grid import RESULTS, ROOT
from recall_plots import draw_all, tested
from recall_problems import Recall, problems
from trial_commands import Study, run_study

SCRIPT = "recall"
LOGS = RESULTS / SCRIPT
PAGE = ROOT / "docs" / "recall.md"


def states(problem: Recall, logs: list[dict]) -> list[str]:
    """A line per model: numbers that it keeps."""
    table = [["model", f"numbers kept of {problem.longest} tokens"]]
    for name, found in tested(problem, logs).items():
        table.append([problem.contestants[name].label, f"{found[0]['state_size']:,}"])
    return [*trial_tables.markdown(table), ""] if len(table) > 1 else []


def page(found: dict[str, Recall], folder: Path) -> str:
    logs, lines = trial_tables.read_logs(folder), []
    for problem in found.values():
        lines += trial_tables.section(problem, logs, SCRIPT)
        if tested(problem, logs):
            lines += [*states(problem, logs), f"![{problem.title}](figures/recall-{problem.name}.png)", ""]
    return "\n".join(lines).strip()


def main() -> None:
    args = run_study(Study(SCRIPT, problems, page, LOGS, PAGE), __doc__)
    if args.table:
        draw_all(problems(), args.logs, args.page.parent / "figures")


if __name__ == "__main__":
    main()
