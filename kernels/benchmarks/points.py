"""A large cloud in near_far mode: seconds and memory of one forward and backward, and how both grow.

python -m points N prints them for one cloud of N points, as JSON.
"""

import json
import math
import sys
from statistics import median

import torch
from contestants import Contestant
from report import conditions, judged, table
from rich.progress import track
from timing import PeakMemory, own_process, seconds

from modeling_itnet import ITNetConfig, ITNetModel

NEIGHBORS = 30
MEMORY_GOAL, GROWTH_GOAL = 4e9, 2.2  # bytes of the whole process; time(n) / time(n/2)


def ball_radius(n: int, neighbors: int = NEIGHBORS) -> float:
    """Returns the radius of balls that hold so many of n uniform points of the unit cube: n 4/3 pi r^3 = neighbors."""
    return (3 * neighbors / (4 * math.pi * n)) ** (1 / 3)


def cloud(n: int, hidden_size: int = 64) -> Contestant:
    """Makes two layers on n uniform points of the unit cube, one sample."""
    torch.manual_seed(0)
    config = ITNetConfig(
        modality="point_cloud",
        local_neighbors=0,  # they are found among all pairs
        hidden_size=hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=4 * hidden_size,
        integration_mode="near_far",
        near_radius=ball_radius(n),
        kernel_hidden_size=16,
        factor_form="matrix",
        rank=8,
    )
    return Contestant(ITNetModel(config), {"points": torch.rand(1, n, 3)})


def run(n: int) -> dict[str, float]:
    """Returns seconds of the two halves of a training step, and the largest resident memory of this process."""
    cloud(1000).run("training step")  # libraries load and start their threads
    entry, kept = cloud(n), {}
    with PeakMemory() as memory:
        forward = seconds(lambda: kept.update(loss=entry.loss()))
        backward = seconds(lambda: entry.backward(kept.pop("loss")))
    return {"forward": forward, "backward": backward, "peak_bytes": memory.peak, "raised_bytes": memory.bytes}


def measure(rounds: int, n: int) -> dict[str, object]:
    """Measures n/2 and n points in turn, each in a process of its own, and returns the medians."""
    runs = {count: [] for count in (n // 2, n)}
    for _ in track(range(rounds), description="points", transient=True):
        for count, found in runs.items():
            found.append(json.loads(own_process("points", str(count))))
    return {
        "points": {
            str(count): {key: median(figures[key] for figures in found) for key in found[0]}
            for count, found in runs.items()
        }
    }


def summary(results: dict) -> str:
    rows, totals = [], []
    for n, row in results["points"].items():
        totals.append(row["forward"] + row["backward"])
        goal = MEMORY_GOAL if n == list(results["points"])[-1] else None
        shown = judged(row["peak_bytes"] / 1e9, goal and goal / 1e9, at_most=True)
        rows.append([n, f"{row['forward']:.1f}", f"{row['backward']:.1f}", shown, f"{row['raised_bytes'] / 1e9:.2f}"])
    head = ["points", "forward, s", "backward, s", "peak of the process, GB (goal)", "raised by, GB"]
    growth = f"Twice the points take {judged(totals[1] / totals[0], GROWTH_GOAL, at_most=True)} times as long."
    return "\n\n".join([table(head, rows), growth, conditions(results)])


if __name__ == "__main__":
    print(json.dumps(run(int(sys.argv[1]))))
