"""Tokenizers for causal language models: bytes, pieces of bytes that are trained, or one that is loaded.

Both are byte-level BPE, without merges or with, so that every text has tokens and decoding them gives it back.
"""

from collections.abc import Iterator
from pathlib import Path

from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from .arguments import ExampleTrainingArguments
from .data import check_texts
from .text import trained_once

END_OF_TEXT, PAD = "<|endoftext|>", "<|pad|>"


def byte_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """Returns a tokenizer whose token b is byte b; 256 ends a text, 257 is padding."""
    vocabulary = {letter: byte for byte, letter in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _wrapped(tokenizer, max_length)


def train_tokenizer(texts, vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE of ``vocab_size`` tokens, or fewer if not as many pieces occur twice."""
    if vocab_size < 258:
        raise ValueError(f"`vocab_size` ({vocab_size}) must be at least 258: 256 bytes, end of text and padding")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 2,
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _wrapped(tokenizer, max_length)


def _wrapped(tokenizer: Tokenizer, max_length: int) -> PreTrainedTokenizerFast:
    """Gives special tokens the next two ids. Padding is on the left, where `generate` wants it."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        padding_side="left",
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def load_causal_tokenizer(
    name: str, rows: Dataset, column: str, vocab_size: int, max_length: int, args: ExampleTrainingArguments
) -> PreTrainedTokenizerBase:
    """Loads a tokenizer by its name: "bytes", "train" for one of the texts in ``column``, a folder, or a Hub model."""
    check_texts(rows, column)
    if name == "bytes":
        return byte_tokenizer(max_length)

    def train(texts: Iterator[str], folder: Path) -> None:
        train_tokenizer(texts, vocab_size, max_length).save_pretrained(folder)

    if name == "train":
        name = str(trained_once(train, "tokenizer.json", rows, (column,), vocab_size, args).parent)
    tokenizer = AutoTokenizer.from_pretrained(name, model_max_length=max_length)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"`tokenizer` ({name!r}) has no end-of-text token (`eos_token`)")
    return tokenizer
