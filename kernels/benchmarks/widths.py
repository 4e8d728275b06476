"""Exact models by the width w of their kernels, beside a ViT with SDPA, on images of 196 patches."""

from collections.abc import Callable
from dataclasses import replace

import torch
from contestants import IMAGE_POSITIONS, KINDS, Contestant, Size, itnet, vit
from operator_speed import PAPER_SMALL, backward_cost
from report import conditions, judged, table
from timing import interleaved, median_ratio

WIDTHS = (4, 8, 16, 32, 128)
PER_HEAD = (4, 8, 16)  # also measured with a W1 of its own for each head
PARTS = ("forward", "loss", "backward")  # the forward of an evaluation, and both halves of a training step
BACKWARD = ("backward / forward", "backward / forward, operator alone")
SPEED_GOALS, BACKWARD_GOAL = {8: {"forward": 0.60, "training step": 0.50}}, 3.0  # the latter for w up to 32
NARROW = 32


def measure(rounds: int, size: Size, widths: tuple[int, ...] = WIDTHS) -> dict[str, dict]:
    """Returns the speed over SDPA of the forward and of a training step, and the time of a backward over that of its
    forward."""
    field = {"sdpa": vit(size)}
    field |= {f"{w}": exact(w, "shared", size) for w in widths}
    field |= {f"{w}, per head": exact(w, "per_head", size) for w in widths if w in PER_HEAD}
    sides = {(name, part): run for name, entry in field.items() for part, run in _parts(entry).items()}
    times = interleaved(sides, rounds)
    peer, rows = _by_kind(times, "sdpa"), {}
    for name in field:
        mine = _by_kind(times, name)
        rows[name] = {kind: median_ratio(peer[kind], mine[kind]) for kind in KINDS}
        rows[name][BACKWARD[0]] = median_ratio(times[name, "backward"], times[name, "loss"])
    for w in widths:
        rows[f"{w}"][BACKWARD[1]] = backward_cost(rounds, replace(PAPER_SMALL, width=w))["backward_over_forward"]
    return {"widths": rows}


def exact(w: int, sharing: str, size: Size) -> Contestant:
    torch.manual_seed(0)
    settings = {"integration_mode": "exact", "kernel_hidden_size": w, "kernel_input_sharing": sharing}
    return itnet("image", IMAGE_POSITIONS, size, **settings)


def _parts(entry: Contestant) -> dict[str, Callable[[], object]]:
    kept = {}
    runs = (entry.forward, lambda: kept.update(loss=entry.loss()), lambda: entry.backward(kept.pop("loss")))
    return dict(zip(PARTS, runs, strict=True))


def _by_kind(times: dict, name: str) -> dict[str, list[float]]:
    forward, *halves = (times[name, part] for part in PARTS)
    step = [loss + backward for loss, backward in zip(*halves, strict=True)]
    return dict(zip(KINDS, (forward, step), strict=True))


def summary(results: dict) -> str:
    rows = []
    for name, row in results["widths"].items():
        w = 0 if name == "sdpa" else int(name.split(",")[0])
        goals = SPEED_GOALS.get(w, {})
        cells = [judged(row[kind], goals.get(kind)) for kind in KINDS]
        limit = BACKWARD_GOAL if 0 < w <= NARROW else None
        cells += [judged(row[key], limit, at_most=True) if key in row else "–" for key in BACKWARD]
        rows.append([name if w == 0 else f"exact, w = {name}", *cells])
    head = ["over ViT with SDPA, n = 196 (goal)", *KINDS, *BACKWARD]
    return "\n\n".join([table(head, rows), conditions(results)])
