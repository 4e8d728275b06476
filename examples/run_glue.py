"""GLUE, or texts and labels of your own, with ITNet or BERT, from scratch or from a checkpoint of run_mlm.py.

python examples/run_glue.py configuration/recipes/sst2-cpu.yaml  # after examples/data/download.py glue
python examples/run_glue.py configuration/recipes/glue-base.yaml --task cola --model_name_or_path outputs/mlm
python examples/run_glue.py --dataset reviews.csv --holdout 0.1  # columns text and label

Without --task the data are your own: classes by name or number, or fractional numbers to predict. Columns are found by
their usual names, or named by --text_columns (one, or two for pairs of texts) and --label_column.
With several --learning_rates each is tried, and the best score on the evaluation split is reported, as in the paper:
an optimistic figure. The score is Matthews correlation for CoLA, Spearman's for STS-B, F1 for MRPC and QQP, and
accuracy for the rest.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from common.arguments import DataArguments, ExampleTrainingArguments, ModelArguments, parse
from common.data import (
    check_numbers,
    check_texts,
    encode_labels,
    find_column,
    find_data,
    label_names,
    load_train_and_eval,
)
from common.metrics import class_metrics, value_metrics
from common.peers import bert_config
from common.runs import build_model, run, start, write_results
from common.text import load_tokenizer
from common.trainer import ExampleTrainer
from datasets import Dataset
from transformers import BertForSequenceClassification, PreTrainedTokenizerBase

from modeling_itnet import ITNetForSequenceClassification

MODELS = {
    "itnet": ITNetForSequenceClassification,
    "bert": (BertForSequenceClassification, bert_config),
}
# Text columns, metrics, of which the first is the score, and the split to evaluate on, by task.
TASKS = {
    "cola": (("sentence",), ("matthews_correlation", "accuracy"), "validation"),
    "sst2": (("sentence",), ("accuracy",), "validation"),
    "mrpc": (("sentence1", "sentence2"), ("f1", "accuracy"), "validation"),
    "stsb": (("sentence1", "sentence2"), ("spearmanr", "pearsonr"), "validation"),
    "qqp": (("question1", "question2"), ("f1", "accuracy"), "validation"),
    "mnli": (("premise", "hypothesis"), ("accuracy",), "validation_matched"),
    "qnli": (("question", "sentence"), ("accuracy",), "validation"),
    "rte": (("sentence1", "sentence2"), ("accuracy",), "validation"),
    "wnli": (("sentence1", "sentence2"), ("accuracy",), "validation"),
}


@dataclass
class GlueArguments(DataArguments):
    task: str | None = field(
        default=None, metadata={"help": f"One of {', '.join(TASKS)}; default: none of them, but your own data."}
    )
    eval_split: str | None = field(
        default=None, metadata={"help": "Default: the development set of the task; of your own data: test."}
    )
    text_columns: list[str] = field(
        default_factory=list, metadata={"help": "Columns of the text, or of the two texts; default: by their names."}
    )
    label_column: str | None = field(default=None, metadata={"help": "Column of the labels; default: by its name."})
    tokenizer: str = field(
        default="train", metadata={"help": "vocab.txt, folder, Hub id, or train; a checkpoint brings its own."}
    )
    vocab_size: int = field(default=8192, metadata={"help": "Size of a vocabulary that is trained."})
    max_seq_length: int = field(default=128, metadata={"help": "Longer texts are cut."})
    learning_rates: list[float] = field(
        default_factory=list, metadata={"help": "Try each of these and report the best; default: --learning_rate."}
    )


class TextCollator:
    """Rows to token ids, masks, segments and labels."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        columns: tuple[str, ...],
        is_regression: bool,
        label: str = "label",
    ):
        self.tokenizer, self.columns, self.label = tokenizer, columns, label
        self.dtype = torch.float32 if is_regression else torch.int64

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        texts = [[row[column] for row in rows] for column in self.columns]
        batch = self.tokenizer(*texts, padding=True, truncation=True, return_tensors="pt")
        return {**batch, "labels": torch.tensor([row[self.label] for row in rows], dtype=self.dtype)}


def text_columns(rows: Dataset, given: list[str], task: str | None) -> tuple[str, ...]:
    """Returns the columns of one text or two: those of --text_columns, of the GLUE task, or ones with a usual name."""
    if len(given) > 2:
        raise ValueError(f"`text_columns` {given} must be one column, or two")
    usual = [TASKS[task][0]] if task else [*dict.fromkeys(columns for columns, _, _ in TASKS.values()), ("text",)]
    candidates = [tuple(given)] if given else sorted(usual, key=len, reverse=True)
    for columns in candidates:
        if all(column in rows.column_names for column in columns):
            return columns
    wanted = " or ".join(", ".join(columns) for columns in candidates)
    raise ValueError(f"`text_columns`: the data have no {wanted}; they have {', '.join(rows.column_names)}")


def find_task(data: GlueArguments) -> tuple[GlueArguments, str]:
    """Returns the arguments with the folder or the Hub's configuration of the task filled in, and the name of the
    data."""
    if data.task is not None and data.task not in TASKS:
        raise ValueError(f"`task` ({data.task!r}) must be one of {', '.join(TASKS)}, or not given for your own data")
    split = data.eval_split or (TASKS[data.task][2] if data.task else "test")
    data, path = replace(data, eval_split=split), find_data(data.dataset)
    if data.task and path is None:  # the Hub's GLUE: tasks are its configurations
        return replace(data, dataset_config=data.dataset_config or data.task), data.task
    if data.task and (path / data.task).is_dir():
        return replace(data, dataset=str(path / data.task)), data.task
    return data, (path or Path(data.dataset)).stem


def main(recipe: dict | None = None, options: list[str] | None = None) -> None:
    model_args, data_args, args = parse(
        ModelArguments, GlueArguments, ExampleTrainingArguments, recipe=recipe, options=options
    )
    data_args, dataset = find_task(data_args)
    output_dir, results = args.output_dir, []
    for rate in data_args.learning_rates or [args.learning_rate]:
        args.learning_rate = rate
        args.output_dir = f"{output_dir}/rate-{rate:g}" if len(data_args.learning_rates) > 1 else output_dir
        start(args)
        train, test = load_train_and_eval(data_args)
        columns = text_columns(train, data_args.text_columns, data_args.task)
        check_texts(test, *text_columns(test, list(columns), None))
        label = find_column(train, "label_column", data_args.label_column, "label", "labels", "class", "target")
        is_regression = train.features[label].dtype.startswith("float")
        if is_regression:
            check_numbers(train, label)
            check_numbers(test, find_column(test, "label_column", label))
            metrics, labels = ("spearmanr", "pearsonr"), {"num_labels": 1}
        else:
            train, test, names = encode_labels(train, test, label)
            metrics, labels = TASKS[data_args.task][1] if data_args.task else ("accuracy",), label_names(names)
        name = model_args.model_name_or_path or data_args.tokenizer
        tokenizer = load_tokenizer(name, train, columns, data_args.vocab_size, data_args.max_seq_length, args)
        size = {"vocab_size": len(tokenizer), "max_position_embeddings": data_args.max_seq_length}
        config = model_args.config("text", **labels, **size)
        make_metrics = value_metrics if is_regression else class_metrics
        trainer = ExampleTrainer(
            model=build_model(model_args, MODELS, config),
            args=args,
            train_dataset=train,
            eval_dataset=test,
            data_collator=TextCollator(tokenizer, columns, is_regression, label),
            processing_class=tokenizer,
            compute_metrics=make_metrics(*metrics, from_hub=args.hub_metrics),
        )
        extra = {"dataset": dataset, "score": metrics[0], "learning_rate": rate}
        results.append(run(trainer, model_args, data_args, config, extra))
    if len(results) > 1:
        best = max(results, key=lambda result: result["metrics"][metrics[0]])
        args.output_dir = output_dir
        write_results(args, best)
        print(f"best learning rate: {best['learning_rate']:g}")


if __name__ == "__main__":
    main()
