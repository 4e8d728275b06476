"""The page of evidence.py: rows at equal parameters and at equal time, baselines, and comparisons, from logs alone."""

import json
import statistics
from pathlib import Path

import numpy as np
from comparisons import Comparison, compare, holm
from protocol import Missing, Searched, searched
from trial_tables import markdown, spread


def read_rows(problem: Searched, folder: Path, kind: str) -> dict[str, list[dict]]:
    """Logs of the rows of equal steps ("seed") or of equal time ("time") by model, in the order of their seeds."""
    found = {}
    for model in problem.contestants:
        seeds = problem.timed_seeds if kind == "time" else problem.seeds
        paths = [folder / f"{problem.name}.{model}.{kind}-{seed}.json" for seed in seeds]
        found[model] = [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.is_file()]
    return found


def read_trivial(problem: Searched, folder: Path) -> dict | None:
    path = folder / f"{problem.name}.trivial.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def rows(problem: Searched, found: dict[str, list[dict]], trivial: dict | None, seeds: int) -> list[str]:
    """A line per model: test errors, parameters, FLOPs and CPU seconds of training."""
    tests = list(dict.fromkeys(name for logs in found.values() for log in logs for name in log["test"]))
    table = [["model", *tests, "parameters", "GFLOPs a step", "steps", "training, CPU s", "seeds"]]
    for label, scores in trivial["test"].items() if trivial else ():
        table.append(
            [f"*{label}*", *(spread([scores[test]]) if test in scores else "" for test in tests), "", "", "", "", ""]
        )
    for model, logs in found.items():
        cells = ["", "", "", ""]
        if logs:
            seconds = statistics.mean(log["training_cpu_seconds"] for log in logs)
            flops = logs[0]["training_flops"] / 1e9
            cells = [f"{logs[0]['parameters']:,}", f"{flops:.2f}", f"{logs[0]['steps']:,}", f"{seconds:.0f}"]
        scores = [spread([log["test"][test] for log in logs], 4) for test in tests]
        table.append([problem.contestants[model].label, *scores, *cells, f"{len(logs)} of {seeds}"])
    return markdown(table)


def chosen_itnet(problem: Searched, found: dict[str, list[dict]], seeds: int) -> str | None:
    """The ITNet with the best mean score on validation data at the end of its rows; ablations do not take part."""
    scores = {}
    for model, logs in found.items():
        rival, ends = problem.contestants[model], [log["validation"][-1][1] for log in logs]
        if rival.is_itnet and not rival.tuned_as and len(ends) == seeds and None not in ends:
            scores[model] = statistics.mean(ends)
    return problem.better(scores) if scores else None


def errors(logs: list[dict], test: str) -> np.ndarray | None:
    """Errors [seeds, samples], unless a run has none."""
    found = [log["test_errors"][test] for log in logs]
    return None if not found or None in found else np.asarray(found)


def compared(
    problem: Searched, found: dict[str, list[dict]], seeds: int
) -> dict[tuple[str, str], tuple[Comparison, float]]:
    """The chosen ITNet against every model that is none, on every test: comparison and p corrected for all of them."""
    ours = chosen_itnet(problem, found, seeds)
    if ours is None or seeds < 2:
        return {}
    made = {}
    for model, logs in found.items():
        rival = problem.contestants[model]
        if rival.is_itnet or rival.tuned_as or len(logs) != seeds:
            continue
        for test in logs[0]["test"]:
            pair = errors(found[ours], test), errors(logs, test)
            if pair[0] is not None and pair[1] is not None:
                made[model, test] = compare(*pair)
    corrected = holm([comparison.p for comparison in made.values()])
    return {key: (comparison, p) for (key, comparison), p in zip(made.items(), corrected, strict=True)}


def comparisons(problem: Searched, found: dict[str, list[dict]], seeds: int) -> list[str]:
    made = compared(problem, found, seeds)
    if not made:
        return []
    ours = problem.contestants[chosen_itnet(problem, found, seeds)].label
    tests = list(dict.fromkeys(test for _, test in made))
    table = [["", *tests]]
    for model in dict.fromkeys(model for model, _ in made):
        cells = [cell(*made[model, test]) if (model, test) in made else "" for test in tests]
        table.append([problem.contestants[model].label, *cells])
    text = f"{ours}, the ITNet with the best validation score, against each other model: its error over theirs, "
    text += (
        f"and p of a paired test over seeds and samples (the larger), corrected for {len(made)} comparisons (Holm)."
    )
    return [text, "", *markdown(table), ""]


def cell(comparison: Comparison, p: float) -> str:
    return f"{comparison.ratio:.2f} (p {'< 0.001' if p < 1e-3 else f'= {p:.3f}'})"


def searches(problem: Searched, folder: Path) -> list[str]:
    """A line per model: what its search found."""
    table = [["model", "trials", "found", "validation"]]
    for model, rival in problem.contestants.items():
        if rival.tuned_as:
            continue
        try:
            found = searched(problem, model, folder, may_run=False)
        except Missing:
            table.append([rival.label, "not finished", "", ""])
            continue
        name = problem.space(model).name(found.best) + (" (an end of the rates)" if found.at_an_end else "")
        score = found.losses[found.best] * (1 if problem.is_error else -1)
        table.append([rival.label, f"{len(found.losses)}", f"`{name}`", f"{score:.4f}"])
    return markdown(table)


def both(problem: Searched, found: dict[str, list[dict]], trivial: dict | None, seeds: int) -> list[str]:
    return [*rows(problem, found, trivial, seeds), "", *comparisons(problem, found, seeds)]


def section(problem: Searched, folder: Path, script: str) -> list[str]:
    equal, timed = read_rows(problem, folder, "seed"), read_rows(problem, folder, "time")
    trivial = read_trivial(problem, folder)
    if not any(equal.values()) and trivial is None:
        return []
    text = f"{problem.metric[0].upper()}{problem.metric[1:]}, {'less' if problem.is_error else 'more'} is better; "
    text += f"{problem.steps:,} steps of {problem.batch_size} samples, searches of {problem.budget} trials of "
    text += f"{problem.tuning_steps or problem.steps:,} steps. "
    text += f"`python examples/results/{script}.py --only {problem.name}`"
    lines = [f"### {problem.title}", "", text, "", *both(problem, equal, trivial, len(problem.seeds))]
    if any(timed.values()):
        timed[problem.clock] = equal[problem.clock][: len(problem.timed_seeds)]
        timed = {model: logs for model, logs in timed.items() if not problem.contestants[model].tuned_as}
        lines += [f"At the training time of {problem.contestants[problem.clock].label}:", ""]
        lines += both(problem, timed, trivial, len(problem.timed_seeds))
    return [*lines, *searches(problem, folder), ""]


def page(problems: dict[str, Searched], folder: Path, script: str) -> str:
    return "\n".join(line for problem in problems.values() for line in section(problem, folder, script)).strip()
