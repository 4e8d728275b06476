"""GLUE with ITNet or BERT, from scratch or from a checkpoint of run_mlm.py.

python examples/run_glue.py configuration/recipes/sst2-cpu.yaml --dataset ../shared/data/glue/sst2
python examples/run_glue.py configuration/recipes/glue-base.yaml --task cola --model_name_or_path outputs/mlm

With several --learning_rates each is tried, and the best score on the evaluation split is reported, as in the paper:
an optimistic figure. The score is Matthews correlation for CoLA, Spearman's for STS-B, F1 for MRPC and QQP, and
accuracy for the rest.
"""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from common.arguments import DataArguments, ExampleTrainingArguments, ModelArguments, parse
from common.data import class_names, label_names, load_train_and_eval
from common.metrics import class_metrics, value_metrics
from common.peers import bert_config
from common.runs import build_model, run, start
from common.text import load_tokenizer
from common.trainer import ExampleTrainer
from transformers import BertForSequenceClassification, PreTrainedTokenizerBase

from modeling_itnet import ITNetForSequenceClassification

MODELS = {
    "itnet": (ITNetForSequenceClassification, lambda config: config),
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
    task: str = field(default="sst2", metadata={"help": f"One of {', '.join(TASKS)}."})
    eval_split: str | None = field(default=None, metadata={"help": "Default: the development set of the task."})
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

    def __init__(self, tokenizer: PreTrainedTokenizerBase, columns: tuple[str, ...], is_regression: bool):
        self.tokenizer, self.columns = tokenizer, columns
        self.dtype = torch.float32 if is_regression else torch.int64

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        texts = [[row[column] for row in rows] for column in self.columns]
        batch = self.tokenizer(*texts, padding=True, truncation=True, return_tensors="pt")
        return {**batch, "labels": torch.tensor([row["label"] for row in rows], dtype=self.dtype)}


def main() -> None:
    model_args, data_args, args = parse(ModelArguments, GlueArguments, ExampleTrainingArguments)
    if data_args.task not in TASKS:
        raise ValueError(f"`task` ({data_args.task!r}) must be one of {', '.join(TASKS)}")
    columns, metrics, split = TASKS[data_args.task]
    data_args = replace(data_args, eval_split=data_args.eval_split or split)
    folder = Path(data_args.dataset)
    if (folder / data_args.task).is_dir():
        data_args.dataset = str(folder / data_args.task)
    elif not folder.is_dir():  # the Hub's GLUE: tasks are its configurations
        data_args.dataset_config = data_args.dataset_config or data_args.task
    is_regression = data_args.task == "stsb"
    output_dir, results = args.output_dir, []
    for rate in data_args.learning_rates or [args.learning_rate]:
        args.learning_rate = rate
        args.output_dir = f"{output_dir}/rate-{rate:g}" if len(data_args.learning_rates) > 1 else output_dir
        start(args)
        train, test = load_train_and_eval(data_args)
        name = model_args.model_name_or_path or data_args.tokenizer
        texts = (row[column] for row in train for column in columns)
        tokenizer = load_tokenizer(name, texts, data_args.vocab_size, data_args.max_seq_length, args)
        labels = {"num_labels": 1} if is_regression else label_names(class_names(train, "label"))
        size = {"vocab_size": len(tokenizer), "max_position_embeddings": data_args.max_seq_length}
        config = model_args.config("text", **labels, **size)
        make_metrics = value_metrics if is_regression else class_metrics
        trainer = ExampleTrainer(
            model=build_model(model_args, MODELS, config),
            args=args,
            train_dataset=train,
            eval_dataset=test,
            data_collator=TextCollator(tokenizer, columns, is_regression),
            processing_class=tokenizer,
            compute_metrics=make_metrics(*metrics, from_hub=args.hub_metrics),
        )
        extra = {"dataset": data_args.task, "score": metrics[0], "learning_rate": rate}
        results.append(run(trainer, model_args, data_args, config, extra))
    if len(results) > 1:
        best = max(results, key=lambda result: result["metrics"][metrics[0]])
        path = Path(args.results_file or Path(output_dir) / "results.json")
        path.write_text(json.dumps(best, indent=1) + "\n", encoding="utf-8")
        print(f"best learning rate: {best['learning_rate']:g}")


if __name__ == "__main__":
    main()
