"""Image classification with ITNet, a ViT or a ConvNet.

python examples/run_image_classification.py configuration/recipes/fashion_mnist-cpu.yaml
python examples/run_image_classification.py --dataset my_pictures --holdout 0.1  # my_pictures/<class>/*.jpg
python examples/run_image_classification.py configuration/recipes/imagenet-base.yaml --output_dir outputs/imagenet
"""

from dataclasses import dataclass, field
from functools import partial

import torch
from common.arguments import DataArguments, ExampleTrainingArguments, ModelArguments, parse
from common.augmentation import MixImages, augmentations
from common.data import check_images, encode_labels, find_column, label_names, load_train_and_eval
from common.draws import drawn_by
from common.image_text import image_processor
from common.losses import peer_loss
from common.metrics import class_metrics
from common.peers import ConvNet, vit_config
from common.runs import build_model, run, start
from common.trainer import ExampleTrainer
from transformers import ViTForImageClassification

from modeling_itnet import ITNetForImageClassification, ITNetImageProcessor

MODELS = {
    "itnet": ITNetForImageClassification,
    "vit": (ViTForImageClassification, vit_config),
    "convnet": ConvNet,
}


@dataclass
class ImageDataArguments(DataArguments):
    image_column: str | None = field(default=None, metadata={"help": "Column of the images; default: image or img."})
    label_column: str | None = field(
        default=None, metadata={"help": "Column of the classes, names or numbers; default: label, fine_label, ..."}
    )
    augmentation: str = field(default="light", metadata={"help": "none, flip, light (crop and flip) or rand."})
    randaugment_magnitude: int = field(default=9, metadata={"help": "Magnitude of RandAugment, out of 30."})
    mixup: float = field(default=0.0, metadata={"help": "Alpha of Mixup; 0 turns it off."})
    cutmix: float = field(default=0.0, metadata={"help": "Alpha of CutMix; 0 turns it off."})
    erasing: float = field(default=0.0, metadata={"help": "Probability of random erasing."})


def prepare_rows(rows: dict[str, list], processor: ITNetImageProcessor, image: str, label: str) -> dict[str, list]:
    """Turns images into pixel values [C, H, W] in [0, 1] when rows of a dataset are read, as its transform."""
    mode = "L" if processor.num_channels == 1 else "RGB"
    images = [picture.convert(mode) for picture in rows[image]]
    pixels = processor(images, return_tensors="pt", do_normalize=False)["pixel_values"]
    return {"pixel_values": list(pixels), "labels": rows[label]}


class ImageCollator:
    """Makes pixel values [B, C, H, W] and labels [B] of rows; augments and mixes them if told, then normalises."""

    def __init__(self, processor: ITNetImageProcessor, augment=None, mix=None):
        self.augment, self.mix = augment, mix
        self.mean, self.std = (
            torch.tensor(values).view(-1, 1, 1) for values in (processor.image_mean, processor.image_std)
        )

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        pixels = torch.stack([row["pixel_values"] for row in rows])
        labels = torch.tensor([row["labels"] for row in rows])
        with drawn_by(pixels):
            if self.augment is not None:
                pixels = self.augment(pixels)
            if self.mix is not None:
                pixels, labels = self.mix(pixels, labels)
        return {"pixel_values": (pixels - self.mean) / self.std, "labels": labels}


def main(recipe: dict | None = None, options: list[str] | None = None) -> None:
    model_args, data_args, args = parse(
        ModelArguments, ImageDataArguments, ExampleTrainingArguments, recipe=recipe, options=options
    )
    start(args)
    train, test = load_train_and_eval(data_args)
    image = find_column(train, "image_column", data_args.image_column, "image", "img")
    label = find_column(train, "label_column", data_args.label_column, "label", "fine_label", "labels", "class")
    train, test = check_images(train, image), check_images(test, image)
    train, test, names = encode_labels(train, test, label)
    config = model_args.config("image", problem_type="single_label_classification", **label_names(names))
    model = build_model(model_args, MODELS, config)
    processor = image_processor(config, model_args.model_name_or_path)
    prepare = partial(prepare_rows, processor=processor, image=image, label=label)
    augment = augmentations(
        config.image_shape, data_args.augmentation, data_args.randaugment_magnitude, data_args.erasing
    )
    mix = None
    if data_args.mixup or data_args.cutmix:
        mix = MixImages(data_args.mixup, data_args.cutmix, config.num_labels)
    trainer = ExampleTrainer(
        model=model,
        args=args,
        train_dataset=train.with_transform(prepare),
        eval_dataset=test.with_transform(prepare),
        data_collator=ImageCollator(processor, augment, mix),
        eval_collator=ImageCollator(processor),
        processing_class=processor,
        compute_metrics=class_metrics("accuracy", from_hub=args.hub_metrics),
        compute_loss_func=None if model_args.model_type == "itnet" else peer_loss(args.label_smoothing_factor),
    )
    run(trainer, model_args, data_args, config)


if __name__ == "__main__":
    main()
