"""Is a sentence true of a picture (NLVR), or of a pair of pictures (NLVR2)? ITNet or ViLT.

python examples/run_nlvr.py configuration/recipes/nlvr-cpu.yaml --dataset ../shared/data/nlvr

Rows have `sentence` (or `question`, `text`), `label` and either `image` or a pair: `image_0` and `image_1`, or
`left_image` and `right_image`. A pair goes through the model twice, with the sentence each time.
"""

import torch
from common.arguments import ExampleTrainingArguments, parse
from common.data import first_column, load_train_and_eval
from common.image_text import (
    ImageTextCollator,
    ImageTextDataArguments,
    ImageTextModelArguments,
    build_image_text_model,
    make_processor,
)
from common.metrics import class_metrics
from common.peers import vilt_config
from common.runs import run, start
from common.text import load_tokenizer
from common.trainer import ExampleTrainer
from torch.nn.functional import one_hot
from transformers import ViltForImagesAndTextClassification, ViltForQuestionAnswering

from modeling_itnet import ITNetForImagesAndTextClassification, ITNetForVisualQuestionAnswering

SINGLE = {
    "itnet": (ITNetForVisualQuestionAnswering, lambda config: config),
    "vilt": (ViltForQuestionAnswering, vilt_config),
}
PAIRS = {
    "itnet": (ITNetForImagesAndTextClassification, lambda config: config),
    "vilt": (ViltForImagesAndTextClassification, vilt_config),
}


def main() -> None:
    model_args, data_args, args = parse(ImageTextModelArguments, ImageTextDataArguments, ExampleTrainingArguments)
    start(args)
    train, test = load_train_and_eval(data_args)
    sentence = first_column(train, "sentence", "question", "text")
    image = first_column(train, "image", "image_0", "left_image")
    is_pair = image != "image"
    other = {"image_0": "image_1", "left_image": "right_image"}.get(image)
    tokenizer = load_tokenizer(
        data_args.tokenizer, train[sentence], data_args.vocab_size, data_args.max_seq_length, args
    )
    config = model_args.config(
        "multimodal",
        id2label={0: "false", 1: "true"},
        label2id={"false": 0, "true": 1},
        vocab_size=len(tokenizer),
        max_position_embeddings=data_args.max_seq_length,
    )
    processor = make_processor(config, tokenizer)

    def images(row: dict):
        if not is_pair:
            return row[image].convert("RGB")
        return [row[image].convert("RGB"), row[other].convert("RGB")]

    def labels(rows: list[dict]) -> torch.Tensor:
        classes = torch.tensor([int(row["label"]) for row in rows])
        return classes if is_pair else one_hot(classes, 2).float()  # the heads of single images take soft targets

    trainer = ExampleTrainer(
        model=build_image_text_model(model_args, PAIRS if is_pair else SINGLE, config),
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
