"""The law behind forces on typed particles, learnt or true, by least squares, and its picture.

python examples/results/force_law.py --models exact egnn interaction_network

draws the laws that trained models of the problem `particles` follow, from their logs, beside the true one.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from figures import save
from grid import RESULTS, ROOT
from torch import Tensor
from typed_particles import ForceLaw

LOGS = RESULTS / "evidence"
FIGURE = ROOT / "docs" / "figures" / "force-law.png"
NODES = 9  # distances at which a law is told


def fitted_law(forces: Tensor, positions: Tensor, types: Tensor, law: ForceLaw) -> tuple[Tensor, Tensor]:
    """Distances r [K] and values g [T, T, K] of the law that comes nearest to forces [B, n, s] on particles.

    The law is that of typed_particles.py with g(a, b, r) linear between K distances from 0 to 2.5 of the range of
    ``law``, and 0 beyond: f_i is linear in its values, which least squares over all components of all forces give.
    ``law`` tells the number of types and the range, nothing else.
    """
    nodes = torch.linspace(0, 2.5 * law.scale, NODES, dtype=torch.float64)
    positions, forces = positions.double(), forces.double()
    count, num_types = positions.shape[1], law.num_types
    offsets = positions.unsqueeze(2) - positions.unsqueeze(1)  # [B, n, n, s]
    place = offsets.norm(dim=-1) / nodes[1]
    hats = (1 - (place.unsqueeze(-1) - torch.arange(NODES)).abs()).clamp(min=0)  # [B, n, n, K]; the last node is 0
    keys = torch.nn.functional.one_hot(types, num_types).double()  # [B, n, T]
    terms = torch.einsum("bijk,bijs,bjt->bistk", hats, offsets, keys) / count  # by type of the key
    found = torch.zeros(num_types, num_types, NODES, dtype=torch.float64)
    for own in range(num_types):
        rows = types == own  # queries of one type have a law of their own
        design, wanted = terms[rows].flatten(0, 1).flatten(1), forces[rows].flatten()
        solution = torch.linalg.lstsq(design, wanted.unsqueeze(-1), driver="gelsd")
        found[own] = solution.solution.view(num_types, NODES)
    return nodes, found


def draw(laws: dict[str, dict], path: Path) -> None:
    """A panel for every pair of types: the true law and those of ``laws``, as logs hold them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    true = ForceLaw.draw()
    axis = torch.linspace(0, 2.5 * true.scale, 100)
    figure, panels = pyplot.subplots(true.num_types, true.num_types, figsize=(9, 8), sharex=True, sharey=True)
    for a in range(true.num_types):
        for b in range(true.num_types):
            panel = panels[a, b]
            values = true.profile(torch.tensor(a), torch.tensor(b), axis)
            panel.plot(axis, values, color="black", linewidth=2, alpha=0.4, label="true")
            for label, law in laws.items():
                panel.plot(law["distances"], np.asarray(law["values"])[a, b], marker=".", linewidth=1, label=label)
            panel.set_title(f"force on {a} by {b}", fontsize=8)
            panel.tick_params(labelsize=7)
    panels[0, 0].legend(fontsize=6)
    figure.supxlabel("distance")
    figure.supylabel("g")
    figure.tight_layout()
    save(figure, path)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["exact", "near_far", "interaction_network", "egnn"])
    parser.add_argument("--logs", type=Path, default=LOGS, help="folder of the logs of evidence.py")
    parser.add_argument("--output", type=Path, default=FIGURE)
    args = parser.parse_args()
    laws = {}
    for model in args.models:
        path = args.logs / f"particles.{model}.seed-1.json"
        if not path.is_file():
            raise SystemExit(f"force_law.py: there is no {path}: run evidence.py --only particles --models {model}")
        laws[model] = json.loads(path.read_text(encoding="utf-8"))["law"]
    draw(laws, args.output)
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
