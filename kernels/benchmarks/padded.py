"""What padding costs: texts of different lengths in one batch beside the same batch without a mask."""

from dataclasses import replace

import torch
from contestants import ITNET, KINDS, Contestant, Size, bert, itnet
from report import conditions, judged, table
from timing import interleaved, median_ratio
from torch import Tensor

BATCH, LENGTH = 32, 128
EXACT = "exact, w = 16"
GOALS = {EXACT: 1.3}


def measure(rounds: int, size: Size, length: int = LENGTH, batch: int = BATCH) -> dict[str, dict]:
    """Returns the time of the padded batch over that of the whole one, by model and kind. Lengths are n/2 to n at
    random."""
    size = replace(size, tokens=batch * length)
    settings = {EXACT: {"integration_mode": "exact", "kernel_hidden_size": 16}}
    settings |= {name: ITNET[name] for name in ("nf-25", "lr-8")}
    torch.manual_seed(0)
    field = {name: itnet("text", length, size, **given) for name, given in settings.items()}
    field["sdpa"] = bert(length, size)
    mask, rows = ragged_mask(batch, length), {}
    for name, whole in field.items():
        sides = {"whole": whole, "padded": Contestant(whole.model, whole.inputs | {"attention_mask": mask})}
        rows[name] = {}
        for kind in KINDS:
            times = interleaved({side: lambda c=c, kind=kind: c.run(kind) for side, c in sides.items()}, rounds)
            rows[name][kind] = median_ratio(times["padded"], times["whole"])
    return {"padded": rows, "batch": batch, "length": length}


def ragged_mask(batch: int, length: int) -> Tensor:
    """Returns a mask [batch, length]: each sample keeps between half and all of its positions, the longest all of
    them."""
    kept = torch.randint(length // 2, length + 1, (batch,), generator=torch.Generator().manual_seed(0))
    kept[0] = length
    return (torch.arange(length) < kept[:, None]).long()


def summary(results: dict) -> str:
    head = [f"padded / unpadded time, B = {results['batch']}, n = {results['length']} (goal)", *KINDS]
    rows = results["padded"].items()
    cells = ([name, *(judged(row[kind], GOALS.get(name), at_most=True) for kind in KINDS)] for name, row in rows)
    return "\n\n".join([table(head, cells), conditions(results)])
