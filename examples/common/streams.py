"""Texts as one row of tokens, and blocks of it."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset
from transformers import PreTrainedTokenizerBase

from .arguments import ExampleTrainingArguments
from .text import must_make, texts_key


def token_streams(
    parts: Sequence[Dataset],
    column: str,
    tokenizer: PreTrainedTokenizerBase,
    end: int | str,
    args: ExampleTrainingArguments,
) -> list[np.ndarray]:
    """Returns `token_stream` of each part, in files of the output folder that other texts or tokens do not share."""
    folder, vocabulary = Path(args.output_dir) / "tokens", sorted(tokenizer.get_vocab().items())
    with args.main_process_first(desc="tokenising"):
        folder.mkdir(parents=True, exist_ok=True)
        keys = [texts_key(part, (column,), vocabulary, end) for part in parts]
        return [
            token_stream(part, column, tokenizer, end, folder / f"{key}.bin", args)
            for key, part in zip(keys, parts, strict=True)
        ]


def token_stream(
    rows: Dataset,
    column: str,
    tokenizer: PreTrainedTokenizerBase,
    end: int | str,
    path: Path,
    args: ExampleTrainingArguments,
) -> np.ndarray:
    """Returns all tokens in one row [N], in a file, so that a corpus need not fit in memory.

    ``end`` stands after each text: a token, or letters unless the text has them already. Blank texts are left out.
    """
    if must_make(path, args):
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            for batch in rows.iter(batch_size=1000):
                texts = [text for text in batch[column] if text.strip()]
                if isinstance(end, str):
                    texts = [ended(text, end) for text in texts]
                last = [] if isinstance(end, str) else [end]
                given = {"add_special_tokens": False, "verbose": False}  # texts may be longer than a block
                for ids in tokenizer(texts, **given)["input_ids"] if texts else []:
                    np.array([*ids, *last], dtype=np.uint32).tofile(file)
        part.replace(path)
    return np.memmap(path, dtype=np.uint32, mode="r")


def ended(text: str, end: str) -> str:
    return text if text.endswith(end) else text + end


def count_bytes(rows: Dataset, column: str, end: int | str) -> int:
    """Counts the UTF-8 bytes of the texts that `token_stream` makes tokens of, and one for the token at the end of
    each."""
    total = 0
    for batch in rows.iter(batch_size=1000):
        for text in batch[column]:
            if text.strip():
                text = ended(text, end) if isinstance(end, str) else text + "\n"
                total += len(text.encode())
    return total


class TokenBlocks(TorchDataset):
    """Blocks of ``length`` tokens, each beginning with the last token of the one before.

    So every token but the first one is predicted once, from the tokens before it in its block. What does not fill a
    block at the end is left out.
    """

    def __init__(self, stream: np.ndarray, length: int):
        if len(stream) < length:
            raise ValueError(f"the texts have {len(stream)} tokens, fewer than one block of `length` ({length})")
        self.stream, self.length = stream, length

    def __len__(self) -> int:
        return (len(self.stream) - 1) // (self.length - 1)

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * (self.length - 1)
        return torch.from_numpy(self.stream[start : start + self.length].astype(np.int64))


def collate_blocks(blocks: list[Tensor]) -> dict[str, Tensor]:
    """Makes input_ids and labels [B, n]. The first token of a block has no label: losses shift labels by one."""
    ids = torch.stack(blocks)
    labels = ids.clone()
    labels[:, 0] = -100
    return {"input_ids": ids, "labels": labels}
