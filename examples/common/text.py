"""WordPiece tokenizers: loaded, or trained on the texts of a task."""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import BertWordPieceTokenizer
from transformers import AutoTokenizer, BertTokenizer, PreTrainedTokenizerBase

from .arguments import ExampleTrainingArguments


def load_tokenizer(
    name: str, texts: Iterable[str], vocab_size: int, max_length: int, args: ExampleTrainingArguments
) -> PreTrainedTokenizerBase:
    """A tokenizer by the name of a vocab.txt, a folder or a Hub model; "train" makes one of ``texts``."""
    if name == "train":
        path = Path(args.output_dir) / "tokenizer" / "vocab.txt"
        with args.main_process_first(desc="training the tokenizer"):
            if not path.is_file():
                trained = BertWordPieceTokenizer(lowercase=True)
                trained.train_from_iterator(texts, vocab_size=vocab_size, min_frequency=2, show_progress=False)
                path.parent.mkdir(parents=True, exist_ok=True)
                trained.save_model(str(path.parent))
        name = str(path)
    if Path(name).is_file():
        return BertTokenizer(name, model_max_length=max_length)
    return AutoTokenizer.from_pretrained(name, model_max_length=max_length)
