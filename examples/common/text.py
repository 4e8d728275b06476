"""WordPiece tokenizers: loaded, or trained on the texts of a task."""

import hashlib
from pathlib import Path

from datasets import Dataset
from tokenizers import BertWordPieceTokenizer
from transformers import AutoTokenizer, BertTokenizer, PreTrainedTokenizerBase

from .arguments import ExampleTrainingArguments
from .data import check_texts


def texts_key(rows: Dataset, columns: tuple[str, ...], *settings) -> str:
    """A name for what is made of these texts with these settings: other texts, another name."""
    digest = hashlib.sha256(repr(settings).encode())
    for batch in rows.select_columns(list(columns)).iter(batch_size=1000):
        for column in columns:
            for text in batch[column]:
                digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:16]


def must_make(path: Path, args: ExampleTrainingArguments) -> bool:
    """Whether a file is to be made: it is not there, or --overwrite_output_dir asks for a new one."""
    return not path.is_file() or (args.overwrite_output_dir and args.local_process_index == 0)


def load_tokenizer(
    name: str,
    rows: Dataset,
    columns: tuple[str, ...],
    vocab_size: int,
    max_length: int,
    args: ExampleTrainingArguments,
) -> PreTrainedTokenizerBase:
    """A tokenizer by the name of a vocab.txt, a folder or a Hub model; "train" makes one of the texts in ``columns``.

    A trained one stays in the output folder under a name that depends on the texts, so that a run which resumes finds
    it again and a run on other texts does not.
    """
    check_texts(rows, *columns)
    if name == "train":
        folder = Path(args.output_dir) / f"tokenizer-{texts_key(rows, columns, vocab_size)}"
        path = folder / "vocab.txt"
        with args.main_process_first(desc="training the tokenizer"):
            if must_make(path, args):
                trained = BertWordPieceTokenizer(lowercase=True)
                texts = (row[column] for row in rows.select_columns(list(columns)) for column in columns)
                trained.train_from_iterator(texts, vocab_size=vocab_size, min_frequency=2, show_progress=False)
                folder.mkdir(parents=True, exist_ok=True)
                trained.save_model(str(folder))
        name = str(path)
    if Path(name).is_file():
        return BertTokenizer(name, model_max_length=max_length)
    return AutoTokenizer.from_pretrained(name, model_max_length=max_length)
