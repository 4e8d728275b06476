"""Draws docs/figures/kernels-boot.png, the picture of the README: python docs/figures/kernels_boot.py"""

import argparse
from pathlib import Path

from datasets import load_dataset
from transformers import AutoImageProcessor, AutoModelForImageClassification

import modeling_itnet  # noqa: F401 (registers the Auto classes)
from modeling_itnet.analysis.plots import plot_image_kernel

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parents[1] / "examples"
CHECKPOINT = EXAMPLES / "checkpoints" / "itnet-tiny-fashion-mnist"
ROWS = str(EXAMPLES / "data" / "fashion_mnist_small" / "test.parquet")

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=HERE / "kernels-boot.png")
    path = parser.parse_args().output
    picture = load_dataset("parquet", data_files=ROWS, split="train")[9]["image"]  # an ankle boot
    pixels = AutoImageProcessor.from_pretrained(CHECKPOINT)(images=picture, return_tensors="pt")["pixel_values"]
    model = AutoModelForImageClassification.from_pretrained(CHECKPOINT).eval()
    plot_image_kernel(model, pixels, path, [(1, 2), (2, 1), (3, 2), "cls"], layer=1)
