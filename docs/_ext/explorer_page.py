"""Writes the explorer page of a bundled checkpoint, as `itnet explore` does, into the site, where a page embeds it."""

from pathlib import Path

from datasets import load_dataset
from sphinx.util import logging
from transformers import AutoImageProcessor, AutoModelForImageClassification

from modeling_itnet.analysis.explorer import explore_kernels

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / "examples" / "checkpoints" / "itnet-tiny-fashion-mnist"
ROWS = ROOT / "examples" / "data" / "fashion_mnist_small" / "test.parquet"
PICTURES = 3


def write_page(app, error: Exception | None) -> None:
    """Writes the page beside those of the site, once these are built."""
    if error is not None or app.builder.format != "html":
        return
    pictures = load_dataset("parquet", data_files=str(ROWS), split="train")["image"][:PICTURES]
    model = AutoModelForImageClassification.from_pretrained(CHECKPOINT).eval()
    batch = AutoImageProcessor.from_pretrained(CHECKPOINT)(images=pictures, return_tensors="pt")
    page = explore_kernels(model, batch, Path(app.outdir) / "explorer-page.html", title="ITNet on Fashion-MNIST")
    logging.getLogger(__name__).info("explorer page: %.1f MB", len(page.encode()) / 1e6)


def setup(app) -> dict:
    app.connect("build-finished", write_page)
    return {"parallel_read_safe": True}
