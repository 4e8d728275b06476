"""One picture of evidence.py: the error of ITNet over that of the best peer, on every test of every problem.

python examples/results/summary_figure.py

The ITNet is the one with the best validation score, as in the tables; the peer is the one with the lowest error on the
test itself, which is unkind to ITNet. A bar is the 95 % interval of the ratio over seeds. Problems that lack
rows are left out.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import numpy as np
from evidence import LOGS, problems
from evidence_tables import chosen_itnet, errors, read_rows
from figures import save
from grid import ROOT
from protocol import Searched
from scipy import stats

FIGURE = ROOT / "docs" / "figures" / "evidence.png"


class Ratio(NamedTuple):
    label: str  # problem and test
    peer: str  # label of the best peer
    value: float  # geometric mean over seeds of ITNet's error over the peer's
    low: float
    high: float


def ratio(label: str, peer: str, ours: np.ndarray, theirs: np.ndarray) -> Ratio:
    """Of errors [seeds, samples]. The interval is Student's, of the logarithms of the ratios of the same seed."""
    logarithms = np.log(ours.mean(1) / theirs.mean(1))
    half = stats.t.ppf(0.975, len(logarithms) - 1) * stats.sem(logarithms)
    middle = logarithms.mean()
    return Ratio(label, peer, *(float(np.exp(value)) for value in (middle, middle - half, middle + half)))


def ratios(problem: Searched, folder: Path) -> list[Ratio]:
    """A ratio per test of a problem, or nothing if a model lacks rows."""
    found = {m: rows for m, rows in read_rows(problem, folder, "seed").items() if not problem.contestants[m].tuned_as}
    if any(len(rows) != len(problem.seeds) for rows in found.values()):
        return []
    ours, made = chosen_itnet(problem, found, len(problem.seeds)), []
    for test in found[ours][0]["test"]:
        peers = {m: errors(rows, test) for m, rows in found.items() if not problem.contestants[m].is_itnet}
        peers = {m: values for m, values in peers.items() if values is not None}
        best = min(peers, key=lambda model: peers[model].mean())
        label = f"{problem.title.split(',')[0]}, {test}"
        made.append(ratio(label, problem.contestants[best].label, errors(found[ours], test), peers[best]))
    return made


def draw(found: list[Ratio], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 0.6 + 0.42 * len(found)))
    places = np.arange(len(found))[::-1]
    values = np.asarray([row.value for row in found])
    bars = np.asarray([[row.value - row.low, row.high - row.value] for row in found]).T
    axis.errorbar(values, places, xerr=bars, fmt="o", color="#1f5a8a", capsize=3)
    axis.axvline(1, color="grey", linewidth=1)
    axis.set_yticks(places, [f"{row.label}\nagainst {row.peer}" for row in found], fontsize=8)
    axis.set_xscale("log")
    ticks = [tick for tick in (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.4, 2) if 0.8 * values.min() <= tick <= 1.3 * values.max()]
    ticks = sorted({*ticks, 1.0})
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.set_xlabel("error of ITNet / error of the best peer (left of 1: ITNet is better)", fontsize=8)
    figure.tight_layout()
    save(figure, path)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logs", type=Path, default=LOGS, help="folder of the logs of evidence.py")
    parser.add_argument("--output", type=Path, default=FIGURE)
    args = parser.parse_args()
    found = [row for problem in problems(ROOT / "data").values() for row in ratios(problem, args.logs)]
    if not found:
        raise SystemExit(f"summary_figure.py: no problem has all its rows in {args.logs}: run evidence.py first")
    for row in found:
        print(f"{row.label} against {row.peer}: {row.value:.2f} ({row.low:.2f} to {row.high:.2f})")
    draw(found, args.output)


if __name__ == "__main__":
    main()
