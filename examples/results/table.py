"""Writes docs/results.md from the logs in docs/results/.

python examples/results/table.py           # write
python examples/results/table.py --check   # fail if the page and the logs disagree
"""

import argparse
import json
import re
import statistics
import sys
import warnings
from functools import cache

from grid import RATES, RESULTS, ROOT, TABLES, Row, Run, Table, best_rate, is_error
from scipy.stats import ttest_ind

PAGE = ROOT / "docs" / "results.md"
NOTES = RESULTS / "notes.md"
REMARKS = RESULTS / "remarks.md"


def logs(table: Table, row: Row) -> list[dict]:
    """What was recorded for a row, by seed."""
    paths = (Run(table, row, seed).path for seed in range(row.seeds))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.is_file()]


def spread(values: list[float]) -> str:
    """Mean and, of more than one value, sample standard deviation; small figures with another digit."""
    digits = 3 if statistics.mean(values) >= 0.1 else 4
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def line(table: Table, row: Row) -> list[str]:
    found = logs(table, row)
    if not found:
        return [row.label, *["not run"] * len(table.metrics), "", "", "", "", f"0 of {row.seeds}"]
    cells = [spread([log["metrics"][name] for log in found]) for name in table.metrics]
    cells.append(f"{found[0]['learning_rate']:g}")
    seconds = f"{statistics.mean(log['cpu_seconds'] for log in found):.0f}"
    memory = f"{max(log['peak_memory_mb'] for log in found):,}"
    return [row.label, *cells, f"{found[0]['parameters']:,}", seconds, memory, f"{len(found)} of {row.seeds}"]


def trivial() -> dict[str, dict]:
    """What trivial_baselines.py recorded, by table."""
    path = RESULTS / "trivial.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


@cache
def remarks() -> dict[str, str]:
    """What remarks.md says, by table: a heading there names one or several."""
    parts = re.findall(r"^## (.+)\n\n(.+(?:\n.+)*)", REMARKS.read_text(encoding="utf-8"), re.MULTILINE)
    return {table: " ".join(text.split()) for names, text in parts for table in names.split(", ")}


def floor(table: Table) -> list[str]:
    """The line of a model that hardly looks at its input."""
    found = trivial()[table.name]
    cells = [spread([found["metrics"][name]]) if name in found["metrics"] else "" for name in table.metrics]
    return [f"*trivial: {found['label']}*", *cells, "", "", "", "", ""]


def welch(table: Table) -> str:
    """Whether means differ by more than seeds do: two-sided p of Welch's t-test, for all pairs with several seeds."""
    parts, metrics = [], list(table.metrics.items())
    if not all(is_error(metric) for metric, _ in metrics):
        metrics = metrics[:1]  # the further ones say the same in other words; errors are of other data
    for metric, heading in metrics:
        values = {row: [log["metrics"][metric] for log in logs(table, row)] for row in table.rows}
        several = [row for row in table.rows if len(values[row]) > 1]
        for row in several:
            if not row.name.startswith("itnet"):
                continue
            words = [
                f"{other.label} {probability(values[row], values[other])}"
                for other in several
                if not other.name.startswith("itnet")
            ]
            which = f" ({heading})" if len(metrics) > 1 else ""
            parts += [f"{row.label}{which} against {', '.join(words)}"] if words else []
    return f"Welch's t-test over seeds, p: {'; '.join(parts)}." if parts else ""


def probability(first: list[float], second: list[float]) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # three seeds with one and the same score
        value = ttest_ind(first, second, equal_var=False).pvalue
    return "< 0.001" if value < 0.001 else f"= {value:.3f}"


def section(table: Table) -> str:
    headings = ["model", *table.metrics.values(), "learning rate", "parameters", "training, CPU s"]
    headings += ["peak memory, MB", "seeds"]
    if table.kind == "ablation":
        headings[0] = "setting"
    rows = [headings, ["---"] * len(headings), *(line(table, row) for row in table.rows)]
    rows += [floor(table)] if table.kind == "task" and table.name in trivial() else []
    found = [log for row in table.rows for log in logs(table, row)]
    text = [f"### {table.title}", ""]
    text += ["| " + " | ".join(cells) + " |" for cells in rows]
    text += ["", f"`python examples/results/run.py --only '{table.name}.*'`; recipe `{table.recipe}`"]
    if found:
        text[-1] += f", {found[0]['steps']:,} steps, {found[0]['epochs']:g} epochs"
    text[-1] += f". {remarks()[table.name]}" if table.name in remarks() else "."
    if table.kind == "task" and (tests := welch(table)):
        text += ["", tests]
    return "\n".join(text)


def tuning_section(table: Table) -> str:
    """A line per model: the score of each learning rate on held-out training rows, the best one in bold."""
    metric, heading = next(iter(table.metrics.items()))
    scores: dict[str, dict[str, float]] = {}
    for row in table.rows:
        model, rate = row.label.split(", ")
        for log in logs(table, row):
            scores.setdefault(model, {})[rate] = log["metrics"][metric]
    text = [f"### {table.title}", "", f"| {heading} | " + " | ".join(RATES) + " |", "| --- " * (len(RATES) + 1) + "|"]
    for model, found in scores.items():
        best = best_rate(table.name, model) if len(found) == len(RATES) else None
        cells = [spread([found[rate]]) if rate in found else "not run" for rate in RATES]
        cells = [f"**{cell}**" if rate == best else cell for rate, cell in zip(RATES, cells, strict=True)]
        text.append(f"| {model} | " + " | ".join(cells) + " |")
    return "\n".join([*text, "", f"`python examples/results/run.py --only '{table.name}.*'`"])


SECTIONS = {"task": section, "ablation": section, "tuning": tuning_section}
HEADINGS = {"task": "## Models and peers", "ablation": "## Ablations", "tuning": "## Learning rates"}


def page() -> str:
    done = [table for table in TABLES if any(logs(table, row) for row in table.rows)]
    waiting = [table.title for table in TABLES if table not in done]
    found = [log for table in TABLES for row in table.rows for log in logs(table, row)]
    hours = sum(log["cpu_seconds"] for log in found) / 3600
    parts = [
        NOTES.read_text(encoding="utf-8").strip(),
        f"The training of all {len(found)} runs took {hours:.1f} hours of one core.",
    ]
    for kind, heading in HEADINGS.items():
        sections = [SECTIONS[kind](table) for table in done if table.kind == kind]
        parts += [heading, *sections] if sections else []
    if waiting:
        parts += [
            "## Not run yet",
            "In the grid of `examples/results/grid.py`, without a run: " + "; ".join(waiting) + ".",
        ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    if parser.parse_args().check:
        if PAGE.read_text(encoding="utf-8") != page():
            sys.exit("docs/results.md does not match docs/results/: run python examples/results/table.py")
        return
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
