"""Plots of recall.py: accuracy against length, against what varies beside it, and against the size of the state."""

import re
import statistics
from pathlib import Path

from figures import save
from trial_tables import read_logs
from trials import TUNING_SEED, Problem


def tested(problem: Problem, logs: list[dict]) -> dict[str, list[dict]]:
    """Model -> the logs of its tested trials."""
    own = [log for log in logs if log["problem"] == problem.name and log["seed"] != TUNING_SEED]
    return {name: found for name in problem.contestants if (found := [log for log in own if log["model"] == name])}


def mean_score(logs: list[dict], test: str) -> float | None:
    scores = [log["test"][test] for log in logs if log["test"].get(test) is not None]
    return statistics.mean(scores) if scores else None


def axes_of(problem: Problem) -> dict[str, list[tuple[int, str]]]:
    """Quantity -> (value, name of a test), in which the other quantities stay the same."""
    sizes = [
        (test, {name: int(value) for name, value in re.findall(r"(\w+) = (\d+)", test)})
        for test in dict.fromkeys(problem.tests())
    ]
    found = {}
    for quantity in dict.fromkeys(name for _, size in sizes for name in size):
        groups: dict[tuple, list[tuple[int, str]]] = {}
        for test, size in sizes:
            rest = tuple((name, value) for name, value in size.items() if name != quantity)
            groups.setdefault(rest, []).append((size[quantity], test))
        found[quantity] = sorted(max(groups.values(), key=len))
    return {quantity: points for quantity, points in found.items() if len(points) > 1}


def draw(problem: Problem, logs: list[dict], path: Path) -> None:
    """One row of plots for a problem, as a picture."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    models, axes = tested(problem, logs), axes_of(problem)
    figure = Figure(figsize=(4.2 * (len(axes) + 1), 3.6), layout="constrained")
    plots = figure.subplots(1, len(axes) + 1, sharey=True, squeeze=False)[0]
    colours = dict(zip(problem.contestants, colormaps["tab20"].colors, strict=False))
    for plot, (quantity, points) in zip(plots, axes.items(), strict=False):
        for name, found in models.items():
            values = [(value, mean_score(found, test)) for value, test in points]
            values = [(value, score) for value, score in values if score is not None]
            label = problem.contestants[name].label
            if values:
                plot.plot(*zip(*values, strict=True), marker="o", color=colours[name], label=label)
        plot.set_xscale("log", base=2)
        plot.set_xticks([value for value, _ in points], [str(value) for value, _ in points])
        plot.minorticks_off()
        plot.set_xlabel("tokens" if quantity == "n" else quantity)
    last = next((test for value, test in axes["n"] if value >= problem.longest), axes["n"][-1][1])
    for name, found in models.items():
        score = mean_score(found, last)
        if score is not None:
            plots[-1].plot(found[0]["state_size"], score, marker="o", linestyle="none", color=colours[name])
    plots[-1].set_xscale("log")
    plots[-1].xaxis.set_minor_formatter("")  # labels would overlap
    plots[-1].set_xlim(1e2, 1e5)
    plots[-1].set_xlabel(f"numbers kept of {problem.longest} tokens")
    plots[0].set_ylabel("accuracy")
    plots[0].set_ylim(-0.03, 1.03)
    figure.suptitle(problem.title)
    figure.legend(*plots[0].get_legend_handles_labels(), loc="outside right center", fontsize="small")
    save(figure, path)


def draw_all(problems: dict[str, Problem], folder: Path, figures: Path) -> list[Path]:
    """A picture for every problem that has logs of tests."""
    logs, drawn = read_logs(folder), []
    for problem in problems.values():
        if tested(problem, logs):
            drawn.append(figures / f"recall-{problem.name}.png")
            draw(problem, logs, drawn[-1])
    return drawn
