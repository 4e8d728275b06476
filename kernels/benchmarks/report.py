"""Figures as Markdown, beside their goals."""

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = (f"| {' | '.join(cells)} |" for cells in (head, *rows))
    return "\n".join([next(lines), "|---" * len(head) + "|", *lines])


def judged(value: float, goal: float | None, at_most: bool = False) -> str:
    """Returns the value, and its goal beside it if there is one: "0.45 (≥ 0.50, missed)"."""
    if goal is None:
        return f"{value:.2f}"
    is_missed = value > goal if at_most else value < goal
    return f"{value:.2f} ({'≤' if at_most else '≥'} {goal:.2f}{', missed' if is_missed else ''})"


def conditions(results: dict) -> str:
    """Returns what a reader needs to compare figures."""
    system = results["machine"]
    depth = f"{results['layers']} layers; " if "layers" in results else ""
    return (
        f"({depth}{system['threads']} threads of {system['instructions']}, torch {system['torch']}; medians of "
        f"{results['rounds']} interleaved rounds.)"
    )
