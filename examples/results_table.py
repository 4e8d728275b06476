"""Writes docs/results.md from the logs in docs/results/.

python examples/results_table.py           # write
python examples/results_table.py --check   # fail if the page and the logs disagree
"""

import argparse
import json
import statistics
import sys

from results_grid import RATES, RESULTS, ROOT, TABLES, Row, Run, Table, best_rate

PAGE = ROOT / "docs" / "results.md"
NOTES = RESULTS / "notes.md"


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


def section(table: Table) -> str:
    headings = ["model", *table.metrics.values(), "learning rate", "parameters", "training, CPU s"]
    headings += ["peak memory, MB", "seeds"]
    if table.kind == "ablation":
        headings[0] = "setting"
    rows = [headings, ["---"] * len(headings), *(line(table, row) for row in table.rows)]
    found = [log for row in table.rows for log in logs(table, row)]
    text = [f"### {table.title}", ""]
    text += ["| " + " | ".join(cells) + " |" for cells in rows]
    text += ["", f"`python examples/run_results.py --only '{table.name}.*'`; recipe `{table.recipe}`"]
    if found:
        text[-1] += f", {found[0]['steps']:,} steps, {found[0]['epochs']:g} epochs"
    text[-1] += f". {table.note}" if table.note else "."
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
    return "\n".join([*text, "", f"`python examples/run_results.py --only '{table.name}.*'`"])


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
            "In the grid of `examples/results_grid.py`, without a run: " + "; ".join(waiting) + ".",
        ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    if parser.parse_args().check:
        if PAGE.read_text(encoding="utf-8") != page():
            sys.exit("docs/results.md does not match docs/results/: run python examples/results_table.py")
        return
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
