"""Tasks of recall for causal language models, drawn from a generator: tokens, and the answers among them.

Each function returns `input_ids` and `labels` [B, n]. A label is what belongs at its own place, to be predicted from
the tokens before it, and -100 where nothing is asked. It follows from these tokens; the functions say how.
"""

import torch
from torch import Generator, Tensor

Batch = dict[str, Tensor]
NOTHING = -100
BLANK = 0


def _distinct(count: int, chosen: int, total: int, generator: Generator) -> Tensor:
    """``chosen`` different numbers of 0..total-1 in random order: [B, chosen]."""
    return torch.rand(count, total, generator=generator).argsort(1)[:, :chosen]


def associative_recall(count: int, generator: Generator, *, length: int, pairs: int, keys: int = 16) -> Batch:
    """Multi-query associative recall (Arora et al. 2023, https://arxiv.org/abs/2312.04927).

    ``pairs`` different keys, each with a value behind it; then, to the end, keys of these at random, each with a blank
    behind it, in whose place the value of the key is asked. Keys are 1..keys, values the next as many tokens.
    """
    queries = (length - 2 * pairs) // 2
    if queries < 1 or pairs > keys or length % 2:
        raise ValueError(f"`pairs` ({pairs}) must be at most `keys` ({keys}) and below `length` ({length}, even) / 2")
    key = 1 + _distinct(count, pairs, keys, generator)  # [B, p]
    value = 1 + keys + torch.randint(keys, (count, pairs), generator=generator)
    asked = torch.randint(pairs, (count, queries), generator=generator)  # [B, q]
    known = torch.stack([key, value], dim=2).flatten(1)
    question = torch.stack([key.gather(1, asked), torch.full_like(asked, BLANK)], dim=2).flatten(1)
    answer = torch.stack([torch.full_like(asked, NOTHING), value.gather(1, asked)], dim=2).flatten(1)
    return {
        "input_ids": torch.cat([known, question], dim=1),
        "labels": torch.cat([torch.full_like(known, NOTHING), answer], dim=1),
    }


def induction(count: int, generator: Generator, *, length: int, symbols: int = 16) -> Batch:
    """In each sample every symbol, 1..symbols, has one successor, by a random permutation: what followed it before.

    The text goes from symbol to successor and breaks off with chance 1/4: a blank, and then any symbol. A successor is
    asked where the symbol before it has been followed already.
    """
    follows = 1 + torch.rand(count, symbols, generator=generator).argsort(1)  # [B, symbols]
    random = torch.randint(1, symbols + 1, (count, length), generator=generator)
    breaks = torch.rand(count, length, generator=generator) < 1 / 4
    ids, labels = torch.full((count, length), BLANK), torch.full((count, length), NOTHING)
    seen = torch.zeros(count, symbols, dtype=torch.bool)
    rows = torch.arange(count)
    for place in range(1, length):
        before = ids[:, place - 1]
        is_symbol, symbol = before != BLANK, (before - 1).clamp(min=0)
        goes_on, after = is_symbol & ~breaks[:, place], follows[rows, symbol]
        ids[:, place] = torch.where(goes_on, after, torch.where(is_symbol, BLANK, random[:, place]))
        labels[:, place] = torch.where(goes_on & seen[rows, symbol], after, NOTHING)
        seen[rows, symbol] |= goes_on
    return {"input_ids": ids, "labels": labels}


def selective_copying(count: int, generator: Generator, *, length: int, copied: int = 8, symbols: int = 16) -> Batch:
    """``copied`` different symbols, 1..symbols, scattered among blanks; after a mark all of them in order, asked."""
    context = length - copied - 1
    if copied > min(symbols, context):
        raise ValueError(
            f"`copied` ({copied}) must be at most `symbols` ({symbols}) and fit `length` ({length}) twice, with a mark"
        )
    chosen = 1 + _distinct(count, copied, symbols, generator)
    places = _distinct(count, copied, context, generator).sort(1).values
    scattered = torch.full((count, context), BLANK).scatter_(1, places, chosen)
    ids = torch.cat([scattered, torch.full((count, 1), symbols + 1), chosen], dim=1)
    return {"input_ids": ids, "labels": torch.cat([torch.full_like(ids[:, : context + 1], NOTHING), chosen], dim=1)}


def offset_copying(count: int, generator: Generator, *, length: int, offsets: int = 16, symbols: int = 16) -> Batch:
    """Random symbols and, among them, tokens that name an offset: after "k back" comes the symbol k places before it.

    Symbols are 0..symbols-1, and token symbols + k - 1 says "k back" for k = 1..offsets; what follows it is asked. It
    never points at another such token, or before the beginning.
    """
    random = torch.randint(symbols, (count, length), generator=generator)
    offset = torch.randint(1, offsets + 1, (count, length), generator=generator)
    coin = torch.rand(count, length, generator=generator) < 1 / 3
    ids, labels = random.clone(), torch.full((count, length), NOTHING)
    rows = torch.arange(count)
    for place in range(offsets, length):
        before = ids[:, place - 1]
        asked = before >= symbols
        copy = ids[rows, (place - 1 - (before - symbols + 1)).clamp(0, place - 1)]
        is_name = coin[:, place] & ~asked & (ids[rows, place - offset[:, place]] < symbols)
        fresh = torch.where(is_name, symbols + offset[:, place] - 1, random[:, place])
        ids[:, place] = torch.where(asked, copy, fresh)
        labels[:, place] = torch.where(asked, copy, NOTHING)
    return {"input_ids": ids, "labels": labels}
