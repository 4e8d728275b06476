"""The pages of trials: tables from the logs alone, between two marks of a document."""

import json
import statistics
from pathlib import Path

from trials import SEEDS, TUNING_SEED, Problem


def marks(script: str) -> tuple[str, str]:
    """The lines of a document between which the tables of a script stand."""
    return f"<!-- {script}: begin -->", f"<!-- {script}: end -->"


def read_logs(folder: Path) -> list[dict]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]


def spread(values: list[float | None], digits: int = 3) -> str:
    """Mean ± sample standard deviation; a run without a score is said to have diverged."""
    found = [value for value in values if value is not None]
    if not found:
        return "diverged" if values else "not run"
    text = f"{statistics.mean(found):.{digits}f}"
    text += f" ± {statistics.stdev(found):.{digits}f}" if len(found) > 1 else ""
    lost = len(values) - len(found)
    return text + (f" ({lost} diverged)" if lost else "")


def markdown(table: list[list[str]]) -> list[str]:
    """Lines of a Markdown table, of a heading and rows."""
    heading, *rows = table
    return ["| " + " | ".join(cells) + " |" for cells in (heading, ["---"] * len(heading), *rows)]


def results(problem: Problem, logs: list[dict]) -> list[str]:
    """A line per model: test scores over seeds, its learning rate, parameters and time of training."""
    final = [log for log in logs if log["problem"] == problem.name and log["seed"] != TUNING_SEED]
    tests = list(dict.fromkeys(name for log in final for name in log["test"]))
    table = [["model", *tests, "learning rate", "parameters", "ms of CPU per step", "seeds"]]
    for name, contestant in problem.contestants.items():
        found = [log for log in final if log["model"] == name]
        scores = [spread([log["test"][test] for log in found]) for test in tests]
        cells = ["", "", ""]
        if found:
            milliseconds = statistics.mean(
                1e3 * log["training_cpu_seconds"] / log["validation"][-1][0] for log in found
            )
            rates = sorted({log["learning_rate"] for log in found})
            cells = [", ".join(f"{rate:g}" for rate in rates), f"{found[0]['parameters']:,}", f"{milliseconds:.0f}"]
        table.append([contestant.label, *scores, *cells, f"{len(found)} of {len(SEEDS)}"])
    return markdown(table)


def rates(problem: Problem, logs: list[dict]) -> list[str]:
    """A line per model: the validation score of every learning rate that was tried."""
    tried = [log for log in logs if log["problem"] == problem.name and log["seed"] == TUNING_SEED]
    scores = {(log["model"], log["learning_rate"]): log["validation"][-1][1] for log in tried}
    columns = [rate for rate in problem.ladder if rate in problem.rates or any(rate == found for _, found in scores)]
    table = [["validation", *(f"{rate:g}" for rate in columns)]]
    for name, contestant in problem.contestants.items():
        own = [log for log in tried if log["model"] == name]
        best = problem.best_rate(own) if any(log["validation"][-1][1] is not None for log in own) else None
        cells = [spread([scores[name, rate]]) if (name, rate) in scores else "" for rate in columns]
        cells = [f"**{cell}**" if rate == best else cell for rate, cell in zip(columns, cells, strict=True)]
        table.append([contestant.label, *cells])
    return markdown(table)


def section(problem: Problem, logs: list[dict], script: str) -> list[str]:
    own = [log for log in logs if log["problem"] == problem.name]
    if not own:
        return []
    seconds = sum(log["cpu_seconds"] for log in own)
    text = f"{problem.metric[0].upper()}{problem.metric[1:]}, {'less' if problem.is_error else 'more'} is better; "
    text += f"{problem.steps:,} steps" + (f" ({problem.tuning_steps:,} to find rates)" if problem.tuning_steps else "")
    text += f" of {problem.batch_size} samples"
    text += "" if problem.enough is None else f", or until {problem.enough:g} on validation data"
    text += f", {seconds / 60:.0f} minutes of CPU in all. "
    text += f"`python examples/results/{script}.py --only {problem.name}`"
    lines = [f"### {problem.title}", "", text, "", *results(problem, logs), ""]
    if problem.tuned_on:
        return [*lines, f"Learning rates are those of `{problem.tuned_on}`.", ""]
    return [*lines, *rates(problem, logs), ""]


def page(problems: dict[str, Problem], folder: Path, script: str) -> str:
    logs = read_logs(folder)
    return "\n".join(line for problem in problems.values() for line in section(problem, logs, script)).strip()


def write(document: Path, text: str, script: str) -> None:
    """Puts the tables between the two marks of a document, or, if there is no document, into a new one."""
    begin, end = marks(script)
    block = f"{begin}\n\n{text}\n\n{end}"
    if document.is_file():
        old = document.read_text(encoding="utf-8")
        if begin not in old or end not in old:
            raise ValueError(f"{document} has no lines {begin!r} and {end!r} to put the tables between")
        block = old.partition(begin)[0] + block + old.partition(end)[2]
    else:
        block += "\n"
    document.write_text(block, encoding="utf-8")
