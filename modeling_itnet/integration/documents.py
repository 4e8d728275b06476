# SPDX-License-Identifier: Apache-2.0
"""Takes apart several documents in one row, which do not see each other."""

from typing import NamedTuple

import torch
from torch import Tensor

from itnet_kernels.transforms import has_values


class Documents(NamedTuple):
    """Where the documents of a batch are, by their positions in its rows laid end to end.

    Documents of about the same length stand together, so that what fills them up is never more than they are. An
    operator takes each of them as a sample of its own; whatever works on single positions leaves them where they are.
    """

    rows: list[Tensor]  # [D, L] each; -1 behind the last position of a document


def find_documents(starts: Tensor) -> Documents | None:
    """Returns the documents of rows [B, n], from where one starts; None if no row holds more than one."""
    if not has_values(starts):
        raise ValueError(
            "several documents in one row cannot be told apart in a compiled or exported graph: give every document a "
            "row of its own, or leave out `position_ids` that restart, `seq_idx` and `cu_seq_lens_q`"
        )
    starts = starts.clone()
    starts[:, 0] = True
    if int(starts.sum()) == len(starts):
        return None
    first = starts.flatten().nonzero().flatten()
    lengths = first.diff(append=first.new_tensor([starts.numel()]))
    classes = lengths.double().log2().ceil().long()  # lengths up to 1, 2, 4, 8, ...
    rows = []
    for number in classes.unique().tolist():
        chosen = classes == number
        steps = torch.arange(int(lengths[chosen].max()), device=starts.device)
        places = first[chosen].unsqueeze(1) + steps
        rows.append(places.where(steps < lengths[chosen].unsqueeze(1), -1))
    return Documents(rows)


def document_starts(
    batch: int,
    count: int,
    position_ids: Tensor | None,
    seq_idx: Tensor | None,
    boundaries: Tensor | None,
) -> Tensor | None:
    """Returns which tokens of rows [B, n] start a document; None if nothing that was given says so.

    ``seq_idx`` [B, n] numbers the document of every token. ``boundaries`` [D + 1] count the tokens before each
    document, over all rows, from 0 to B n. ``position_ids`` [B, n] restart: the first that is not larger than the one
    before it starts a document.
    """
    if seq_idx is not None:
        if list(seq_idx.shape) != [batch, count]:
            raise ValueError(f"`seq_idx` {list(seq_idx.shape)} must be [{batch}, {count}]: a document for each token")
        return torch.nn.functional.pad(seq_idx.diff(dim=1) != 0, (1, 0), value=True)
    if boundaries is not None:
        total = batch * count
        ends = boundaries.long()
        if ends.dim() != 1 or len(ends) < 2 or int(ends[0]) != 0 or int(ends[-1]) != total or (ends.diff() < 0).any():
            raise ValueError(
                f"`cu_seq_lens_q` {list(boundaries.shape)} must rise from 0 to {total}, the number of tokens of all "
                "rows: how many tokens there are before each document, and in all"
            )
        starts = torch.zeros(total + 1, dtype=torch.bool, device=boundaries.device).index_fill(0, ends, True)
        return starts[:-1].view(batch, count)
    if position_ids is not None:
        return torch.nn.functional.pad(position_ids.diff(dim=-1) <= 0, (1, 0), value=True).expand(batch, count)
    return None


def positions_in_documents(documents: Documents, real: Tensor) -> Tensor:
    """Returns the number of every token among the real ones of its document, from 0; ``real`` [B, n] is 0 or 1."""
    numbers = torch.zeros(real.numel(), dtype=torch.long, device=real.device)
    for rows in documents.rows:
        counts = take_rows(real.long().unsqueeze(-1), rows)[..., 0].cumsum(1) - 1
        numbers[rows[rows >= 0]] = counts[rows >= 0]
    return numbers.view(real.shape)


def take_rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """Returns a tensor [B, n, d] at positions [D, L] of its rows laid end to end: [D, L, d]; anything at -1."""
    return tensor.flatten(0, 1).index_select(0, rows.clamp(min=0).flatten()).unflatten(0, rows.shape)
