"""Is a sentence true of a picture (NLVR), or of a pair of pictures (NLVR2)? ITNet or ViLT.

python examples/run_nlvr.py configuration/recipes/nlvr-cpu.yaml  # after examples/data/download.py nlvr

Rows have `sentence` (or `question`, `text`), `label` and either `image` or a pair: `image_0` and `image_1`, or
`left_image` and `right_image`. A pair goes through the model twice, with the sentence each time.
"""

import torch
from common.arguments import ExampleTrainingArguments, parse
from common.data import check_images, find_column, load_train_and_eval
from common.image_text import (
    ImageTextCollator,
    ImageTextDataArguments,
    ImageTextModelArguments,
    prepare,
)
from common.metrics import class_metrics
from common.peers import vilt_config
from common.runs import run, start
from common.trainer import ExampleTrainer
from datasets import Dataset
from torch.nn.functional import one_hot
from transformers import ViltForImagesAndTextClassification, ViltForQuestionAnswering

from modeling_itnet import ITNetForImagesAndTextClassification, ITNetForVisualQuestionAnswering

SINGLE = {
    "itnet": ITNetForVisualQuestionAnswering,
    "vilt": (ViltForQuestionAnswering, vilt_config),
}
PAIRS = {
    "itnet": ITNetForImagesAndTextClassification,
    "vilt": (ViltForImagesAndTextClassification, vilt_config),
}


def truth(label) -> int:
    """Returns 0 or 1, of a class number, a boolean or its name."""
    return int(label.lower() == "true") if isinstance(label, str) else int(label)


def check_truth(*parts: Dataset) -> None:
    for rows in parts:
        find_column(rows, "dataset", None, "label")
        found = set(rows["label"])
        if not {str(label).lower() for label in found} <= {"0", "1", "true", "false"}:
            raise ValueError(
                f"column `label` must hold 0 and 1, or true and false, but has {sorted(found, key=str)[:5]}"
            )


def main(recipe: dict | None = None, options: list[str] | None = None) -> None:
    model_args, data_args, args = parse(
        ImageTextModelArguments, ImageTextDataArguments, ExampleTrainingArguments, recipe=recipe, options=options
    )
    start(args)
    train, test = load_train_and_eval(data_args)
    sentence = find_column(train, "dataset", None, "sentence", "question", "text")
    image = find_column(train, "dataset", None, "image", "image_0", "left_image")
    is_pair = image != "image"
    other = {"image_0": "image_1", "left_image": "right_image"}.get(image)
    for column in (image, other) if is_pair else (image,):
        train, test = check_images(train, column), check_images(test, column)
    check_truth(train, test)
    classes = PAIRS if is_pair else SINGLE
    names = ["false", "true"]
    model, processor, config = prepare(model_args, data_args, args, classes, train, sentence, names)

    def images(row: dict):
        if not is_pair:
            return row[image].convert("RGB")
        return [row[image].convert("RGB"), row[other].convert("RGB")]

    def labels(rows: list[dict]) -> torch.Tensor:
        classes = torch.tensor([truth(row["label"]) for row in rows])
        return classes if is_pair else one_hot(classes, 2).float()  # the heads of single images take soft targets

    trainer = ExampleTrainer(
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=test,
        data_collator=ImageTextCollator(processor, images, sentence, labels),
        processing_class=processor,
        compute_metrics=class_metrics("accuracy", from_hub=args.hub_metrics),
    )
    run(trainer, model_args, data_args, config)


if __name__ == "__main__":
    main()
