"""What visual question answering and NLVR share: arguments, models, and rows to batches of images and text."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from datasets import Dataset

from modeling_itnet import ITNetConfig, ITNetImageProcessor, ITNetProcessor, from_image_and_text_checkpoints

from .arguments import DataArguments, ExampleTrainingArguments, ModelArguments
from .data import label_names
from .runs import Models, build_model
from .text import load_tokenizer


def image_processor(config: ITNetConfig, checkpoint: str | None = None) -> ITNetImageProcessor:
    """Returns what makes images for a model: the checkpoint's own processor, or one of the configuration's size."""
    if checkpoint is not None and (Path(checkpoint) / "preprocessor_config.json").is_file():
        height, width = config.image_shape
        return ITNetImageProcessor.from_pretrained(checkpoint, size={"height": height, "width": width})
    return ITNetImageProcessor.from_model_config(config)


@dataclass
class ImageTextDataArguments(DataArguments):
    tokenizer: str = field(default="train", metadata={"help": "vocab.txt, folder, Hub id, or train."})
    vocab_size: int = field(default=8192, metadata={"help": "Size of a vocabulary that is trained."})
    max_seq_length: int = field(default=64, metadata={"help": "Longer texts are cut."})


@dataclass
class ImageTextModelArguments(ModelArguments):
    image_checkpoint: str | None = field(default=None, metadata={"help": "ITNet of images to start from."})
    text_checkpoint: str | None = field(default=None, metadata={"help": "ITNet of text to start from."})


def build_image_text_model(arguments: ImageTextModelArguments, classes: Models, config: ITNetConfig):
    """Returns a new model, one of a checkpoint, or one of an image and a text checkpoint (App. train_vqa)."""
    checkpoints = (arguments.image_checkpoint, arguments.text_checkpoint)
    if checkpoints == (None, None):
        return build_model(arguments, classes, config)
    if None in checkpoints or arguments.model_type != "itnet":
        raise ValueError("`image_checkpoint` and `text_checkpoint` go together, and with `model_type` itnet only")
    labels = {"id2label": config.id2label, "label2id": config.label2id}
    return from_image_and_text_checkpoints(classes["itnet"], *checkpoints, **labels, **arguments.overrides)


class ImageTextCollator:
    """Rows to pixel values, token ids and labels. ``images`` gives the picture of a row, or its list of pictures."""

    def __init__(self, processor: ITNetProcessor, images: Callable, text: str, labels: Callable):
        self.processor, self.images, self.text, self.labels = processor, images, text, labels

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        images = [self.images(row) for row in rows]
        batch = self.processor(images, [row[self.text] for row in rows], return_tensors="pt", truncation=True)
        return {**batch, "labels": self.labels(rows)}


def prepare(
    arguments: ImageTextModelArguments,
    data: ImageTextDataArguments,
    args: ExampleTrainingArguments,
    classes: Models,
    rows: Dataset,
    text: str,
    labels: list[str],
) -> tuple[torch.nn.Module, ITNetProcessor, ITNetConfig]:
    """Returns the model for images and the texts in a column, its processor, and the configuration of ITNet.

    A model that starts from trained token embeddings reads with their tokenizer, and with the image processor of the
    checkpoint that it starts from.
    """
    name = arguments.model_name_or_path or arguments.text_checkpoint or data.tokenizer
    tokenizer = load_tokenizer(name, rows, (text,), data.vocab_size, data.max_seq_length, args)
    size = {"vocab_size": len(tokenizer), "max_position_embeddings": data.max_seq_length}
    config = arguments.config("multimodal", **label_names(labels), **size)
    model = build_image_text_model(arguments, classes, config)
    images = image_processor(
        model.config if arguments.model_type == "itnet" else config,
        arguments.model_name_or_path or arguments.image_checkpoint,
    )
    return model, ITNetProcessor(images, tokenizer), config
