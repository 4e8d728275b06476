"""Trains a small ITNet image classifier on Fashion-MNIST, in a few minutes on two CPU cores. `make demo` runs it.

python examples/quickstart.py --help
"""

import argparse
import os
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # must precede torch: on a busy CPU, spinning threads waste it

import torch
from datasets import load_dataset
from transformers import AutoModelForImageClassification, Trainer, TrainingArguments, set_seed

from modeling_itnet import (
    ITNetConfig,
    ITNetForImageClassification,
    ITNetImageProcessor,
    optimizer_param_groups,
)
from modeling_itnet.analysis.plots import plot_image_kernel

ROOT = Path(__file__).resolve().parent.parent
PIXEL_MEAN, PIXEL_STD = 0.286, 0.353  # of Fashion-MNIST, on a scale from 0 to 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train, evaluate, save and reload a small ITNet, and draw its kernels.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    data_dir = ROOT / "examples" / "data" / "fashion_mnist_small"
    parser.add_argument("--data_dir", type=Path, default=data_dir, help="folder with train.parquet and test.parquet")
    parser.add_argument("--output_dir", type=Path, default=ROOT / "outputs" / "quickstart", help="where results go")
    parser.add_argument("--epochs", type=float, default=8, help="passes over the training images")
    parser.add_argument("--batch_size", type=int, default=32, help="images per optimizer step")
    parser.add_argument("--learning_rate", type=float, default=2e-3, help="highest learning rate, reached after 10 %%")
    parser.add_argument("--max_steps", type=int, default=-1, help="stop after so many steps; -1: --epochs decides")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and the order of the images")
    return parser.parse_args()


def to_tensors(split, processor: ITNetImageProcessor) -> list[dict[str, torch.Tensor]]:
    """Returns all images of a split as normalised tensors [1, 28, 28], made once rather than in every epoch."""
    pixels = processor(split["image"][:], return_tensors="pt")["pixel_values"]
    labels = torch.tensor(split["label"][:])
    return [{"pixel_values": image, "labels": label} for image, label in zip(pixels, labels, strict=True)]


def accuracy(prediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def main() -> None:
    args = parse_arguments()
    set_seed(args.seed)

    # 1. Data: 8,000 training and 2,000 test images that come with the repository.
    files = {name: str(args.data_dir / f"{name}.parquet") for name in ("train", "test")}
    data = load_dataset("parquet", data_files=files)
    class_names = data["train"].features["label"].names

    # 2. Model: 4 x 4 patches and a [CLS] position are a domain of 17 points in the unit square.
    config = ITNetConfig(
        modality="image",
        image_size=28,
        patch_size=7,
        num_channels=1,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=128,
        kernel_hidden_size=16,
        num_fourier_features=16,
        fourier_scale=1.0,  # about one wave across the image: the grid is too coarse for the default of 10
        hidden_dropout_prob=0.0,
        embedding_dropout_prob=0.0,
        drop_path_rate=0.0,
        integration_mode="exact",  # every pair counts, and the tools that look at kernels have kernels to look at
        id2label=dict(enumerate(class_names)),
        label2id={name: index for index, name in enumerate(class_names)},
    )
    model = ITNetForImageClassification(config)
    processor = ITNetImageProcessor.from_model_config(config, image_mean=[PIXEL_MEAN], image_std=[PIXEL_STD])
    train, test = (to_tensors(data[name], processor) for name in ("train", "test"))
    print(f"ITNet with {model.num_parameters():,} parameters, {len(train):,} training and {len(test):,} test images")

    # 3. Training with the Trainer. Weight decay acts on weight matrices only.
    optimizer = torch.optim.AdamW(optimizer_param_groups(model, weight_decay=0.05), lr=args.learning_rate)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=args.output_dir,
            num_train_epochs=args.epochs,
            max_steps=args.max_steps,
            per_device_train_batch_size=args.batch_size,
            per_device_eval_batch_size=200,
            lr_scheduler_type="cosine",
            warmup_steps=0.1,
            logging_strategy="epoch",
            save_strategy="no",
            report_to=[],
            seed=args.seed,
        ),
        train_dataset=train,
        eval_dataset=test,
        compute_metrics=accuracy,
        optimizers=(optimizer, None),
    )
    trainer.train()
    print(f"Test accuracy: {trainer.evaluate()['eval_accuracy']:.2%}")

    # 4. Save model and processor, and load by the Auto class: importing modeling_itnet has registered ITNet with it.
    model.eval().save_pretrained(args.output_dir, processor=processor)
    reloaded = AutoModelForImageClassification.from_pretrained(args.output_dir).to(model.device)
    pixel_values = torch.stack([example["pixel_values"] for example in test[:100]]).to(model.device)
    with torch.no_grad():
        logits, logits_again = (m(pixel_values=pixel_values).logits for m in (model, reloaded))
    assert torch.equal(logits, logits_again), "the reloaded model must give the same logits"
    print(f"Saved to {args.output_dir}; reloaded, it gives identical logits")

    # 5. How the middle layer couples three patches of an ankle boot, and [CLS], to all patches.
    path = args.output_dir / "kernels.png"
    plot_image_kernel(model, pixel_values[9], path, queries=[(1, 2), (2, 1), (3, 2), "cls"], layer=1)
    print(f"Kernels drawn in {path}")


if __name__ == "__main__":
    main()
