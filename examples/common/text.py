"""WordPiece tokenizers: loaded, or trained on the texts of a task."""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

from datasets import Dataset
from tokenizers import BertWordPieceTokenizer
from transformers import AutoTokenizer, BertTokenizer, PreTrainedTokenizerBase

from .arguments import ExampleTrainingArguments
from .data import check_texts


def texts_key(rows: Dataset, columns: tuple[str, ...], *settings) -> str:
    """Returns a name for what is made of these texts with these settings: other texts have another name."""
    digest = hashlib.sha256(repr(settings).encode())
    for batch in rows.select_columns(list(columns)).iter(batch_size=1000):
        for column in columns:
            for text in batch[column]:
                digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:16]


def must_make(path: Path, args: ExampleTrainingArguments) -> bool:
    """Says whether a file is to be made: it is not there, or --overwrite_output_dir asks for a new one."""
    return not path.is_file() or (args.overwrite_output_dir and args.local_process_index == 0)


def trained_once(
    train: Callable[[Iterator[str], Path], None],
    file: str,
    rows: Dataset,
    columns: tuple[str, ...],
    vocab_size: int,
    args: ExampleTrainingArguments,
) -> Path:
    """Returns the ``file`` of a tokenizer that ``train`` writes, from the texts in ``columns``, to a folder.

    It stays in the output folder under a name that depends on the texts, so that a run which resumes finds it again
    and a run on other texts does not.
    """
    folder = Path(args.output_dir) / f"tokenizer-{texts_key(rows, columns, vocab_size)}"
    with args.main_process_first(desc="training the tokenizer"):
        if must_make(folder / file, args):
            folder.mkdir(parents=True, exist_ok=True)
            chosen = rows.select_columns(list(columns))
            train((row[column] for row in chosen for column in columns), folder)
    return folder / file


def load_tokenizer(
    name: str,
    rows: Dataset,
    columns: tuple[str, ...],
    vocab_size: int,
    max_length: int,
    args: ExampleTrainingArguments,
) -> PreTrainedTokenizerBase:
    """Loads a tokenizer by the name of a vocab.txt, a folder or a Hub model; "train" makes one of the ``columns``."""
    check_texts(rows, *columns)

    def train(texts: Iterator[str], folder: Path) -> None:
        trained = BertWordPieceTokenizer(lowercase=True)
        trained.train_from_iterator(texts, vocab_size=vocab_size, min_frequency=2, show_progress=False)
        trained.save_model(str(folder))

    if name == "train":
        name = str(trained_once(train, "vocab.txt", rows, columns, vocab_size, args))
    if Path(name).is_file():
        return BertTokenizer(name, model_max_length=max_length)
    return AutoTokenizer.from_pretrained(name, model_max_length=max_length)
