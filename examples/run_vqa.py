"""Visual question answering with ITNet or ViLT: a classifier over the answers of the training set.

python examples/run_vqa.py configuration/recipes/easy_vqa-cpu.yaml  # after examples/data/download.py easy_vqa

Rows have `image`, `question` and `answer` (a class or a text), or `answers`, what several people said (VQA v2): these
become soft targets. Answers that training rows do not hold often enough count as wrong in evaluation.
"""

from collections import Counter
from dataclasses import dataclass, field

import torch
from common.arguments import ExampleTrainingArguments, parse
from common.data import check_images, find_column, load_train_and_eval
from common.image_text import (
    ImageTextCollator,
    ImageTextDataArguments,
    ImageTextModelArguments,
    prepare,
)
from common.peers import vilt_config
from common.runs import run, start
from common.trainer import ExampleTrainer
from datasets import Dataset
from transformers import ViltForQuestionAnswering

from modeling_itnet import ITNetForVisualQuestionAnswering, vqa_accuracy, vqa_soft_targets

MODELS = {
    "itnet": ITNetForVisualQuestionAnswering,
    "vilt": (ViltForQuestionAnswering, vilt_config),
}


@dataclass
class VQADataArguments(ImageTextDataArguments):
    num_answers: int = field(default=3129, metadata={"help": "The most frequent answers are the classes."})
    skip_yes_no: bool = field(
        default=False,
        metadata={"help": "Leave out questions that start with is, does or do."},
    )


def answers_of(row: dict, names: list[str] | None) -> list[str]:
    """Returns what people said, a list of one where the data know one answer only."""
    if "answers" in row:
        return [given["answer"] if isinstance(given, dict) else given for given in row["answers"]]
    return [names[row["answer"]] if names is not None else str(row["answer"]).strip().lower()]


def without_yes_no(rows: Dataset) -> Dataset:
    starts = ("is ", "does ", "do ")
    return rows.select([i for i, text in enumerate(rows["question"]) if not text.lower().startswith(starts)])


def main(recipe: dict | None = None, options: list[str] | None = None) -> None:
    model_args, data_args, args = parse(
        ImageTextModelArguments, VQADataArguments, ExampleTrainingArguments, recipe=recipe, options=options
    )
    start(args)
    train, test = load_train_and_eval(data_args)
    for needed in ("image", "question"):
        find_column(train, "dataset", None, needed)
    train, test = check_images(train, "image"), check_images(test, "image")
    if data_args.skip_yes_no:
        train, test = without_yes_no(train), without_yes_no(test)
    names = getattr(train.features.get("answer"), "names", None)
    column = find_column(train, "dataset", None, "answers", "answer")
    given = Counter(answer for row in train.select_columns([column]) for answer in answers_of(row, names))
    answers = [answer for answer, _ in given.most_common(data_args.num_answers)]
    label2id = {answer: index for index, answer in enumerate(answers)}
    model, processor, config = prepare(model_args, data_args, args, MODELS, train, "question", answers)

    def labels(rows: list[dict]) -> torch.Tensor:
        return vqa_soft_targets([answers_of(row, names) for row in rows], label2id)

    def compute_metrics(prediction) -> dict[str, float]:
        logits, targets = (torch.from_numpy(array) for array in (prediction.predictions, prediction.label_ids))
        return {"accuracy": vqa_accuracy(logits, targets)}

    trainer = ExampleTrainer(
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=test,
        data_collator=ImageTextCollator(processor, lambda row: row["image"].convert("RGB"), "question", labels),
        processing_class=processor,
        compute_metrics=compute_metrics,
    )
    run(trainer, model_args, data_args, config, {"skip_yes_no": data_args.skip_yes_no})


if __name__ == "__main__":
    main()
