"""Masked language modelling with ITNet or BERT, on lines of text, in one or two phases of growing length.

python examples/run_mlm.py configuration/recipes/wikitext2-cpu.yaml  # after examples/data/download.py wikitext2
python examples/run_mlm.py --dataset corpus.txt --holdout 0.1
torchrun --nproc_per_node 8 examples/run_mlm.py configuration/recipes/mlm-base.yaml --dataset ...

15 % of the tokens are asked for; of these 80 % are replaced by [MASK], 10 % by another token, 10 % are kept. The texts
are joined, a [SEP] after each, and cut into blocks: of --max_seq_length for --first_phase_steps steps, and of
--second_seq_length from then on, within one schedule of the learning rate. --max_steps is the number of all steps.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from common.arguments import DataArguments, ExampleTrainingArguments, ModelArguments, parse
from common.data import check_texts, find_column, load_train_and_eval
from common.draws import drawn_by
from common.losses import peer_loss
from common.peers import bert_config
from common.runs import build_model, run, start
from common.streams import token_streams
from common.text import load_tokenizer
from common.trainer import ExampleTrainer
from torch.utils.data import IterableDataset
from transformers import BertForMaskedLM, DataCollatorForLanguageModeling, PreTrainedTokenizerBase

from modeling_itnet import ITNetForMaskedLM

MODELS = {"itnet": ITNetForMaskedLM, "bert": (BertForMaskedLM, bert_config)}


@dataclass
class MaskedLMArguments(DataArguments):
    eval_split: str = field(default="validation", metadata={"help": "Split to evaluate on."})
    text_column: str = field(default="text", metadata={"help": "Column of the text."})
    tokenizer: str = field(default="train", metadata={"help": "vocab.txt, folder, Hub id, or train."})
    vocab_size: int = field(default=30522, metadata={"help": "Size of a vocabulary that is trained."})
    max_seq_length: int = field(default=128, metadata={"help": "Tokens per block, in the first phase."})
    second_seq_length: int | None = field(default=None, metadata={"help": "Tokens per block in the second phase."})
    first_phase_steps: int = field(default=0, metadata={"help": "Steps before the second phase."})
    mlm_probability: float = field(default=0.15, metadata={"help": "Share of tokens to predict."})


def block(stream: np.ndarray, index: int, length: int, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[int]]:
    """Returns [CLS], ``length`` - 2 tokens of the stream, [SEP]."""
    inner = length - 2
    ids = stream[index * inner : (index + 1) * inner].tolist()
    return {"input_ids": [tokenizer.cls_token_id, *ids, tokenizer.sep_token_id]}


def blocks(stream: np.ndarray, length: int, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, list[int]]]:
    return [block(stream, index, length, tokenizer) for index in range(len(stream) // (length - 2))]


class PhasedBlocks(IterableDataset):
    """Shuffled blocks without end: ``first_count`` short ones, then long ones. Any part of it can be made again."""

    def __init__(self, stream, tokenizer, lengths: tuple[int, int], first_count: int, seed: int):
        self.stream, self.tokenizer, self.lengths = stream, tokenizer, lengths
        self.first_count, self.seed = first_count, seed

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        generator = np.random.default_rng(self.seed)
        yielded = 0
        for length, limit in zip(self.lengths, (self.first_count, math.inf), strict=True):
            count = len(self.stream) // (length - 2)
            while yielded < limit:
                for index in generator.permutation(count):
                    if yielded >= limit:
                        break
                    yielded += 1
                    yield block(self.stream, int(index), length, self.tokenizer)


class SeededMasking(DataCollatorForLanguageModeling):
    """Masks that follow from the tokens of a batch: the same ones at every evaluation and in a run that is resumed."""

    def __call__(self, features, return_tensors=None):
        with drawn_by(row["input_ids"] for row in features):
            return super().__call__(features, return_tensors)


def token_accuracy(prediction) -> dict[str, float]:
    asked = prediction.label_ids != -100
    return {"accuracy": float((prediction.predictions == prediction.label_ids)[asked].mean())}


def main(recipe: dict | None = None, options: list[str] | None = None) -> None:
    model_args, data_args, args = parse(
        ModelArguments, MaskedLMArguments, ExampleTrainingArguments, recipe=recipe, options=options
    )
    start(args)
    rows = load_train_and_eval(data_args)
    lengths = (data_args.max_seq_length, data_args.second_seq_length or data_args.max_seq_length)
    column = find_column(rows[0], "text_column", data_args.text_column)
    check_texts(rows[1], find_column(rows[1], "text_column", column))
    name = model_args.model_name_or_path or data_args.tokenizer
    tokenizer = load_tokenizer(name, rows[0], (column,), data_args.vocab_size, max(lengths), args)
    train, test = token_streams(rows, column, tokenizer, tokenizer.sep_token_id, args)
    if min(len(train), len(test)) < max(lengths) - 2:
        raise ValueError(f"{len(train)} and {len(test)} tokens do not fill one block of {max(lengths)}")
    batch = args.train_batch_size * args.world_size * args.gradient_accumulation_steps
    if args.max_steps <= 0:  # the stream has no end: epochs become steps
        args.max_steps = max(1, round(args.num_train_epochs * len(train) / (lengths[0] - 2) / batch))
    first_steps = data_args.first_phase_steps if data_args.second_seq_length else 0
    config = model_args.config("text", vocab_size=len(tokenizer), max_position_embeddings=max(lengths))
    trainer = ExampleTrainer(
        model=build_model(model_args, MODELS, config),
        args=args,
        train_dataset=PhasedBlocks(train, tokenizer, lengths, first_steps * batch, args.seed),
        eval_dataset=blocks(test, lengths[1], tokenizer),
        data_collator=SeededMasking(tokenizer=tokenizer, mlm_probability=data_args.mlm_probability),
        processing_class=tokenizer,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        compute_metrics=token_accuracy,
        compute_loss_func=None if model_args.model_type == "itnet" else peer_loss(args.label_smoothing_factor),
    )
    run(trainer, model_args, data_args, config, derive=lambda m: {"perplexity": math.exp(m["loss"])})


if __name__ == "__main__":
    main()
