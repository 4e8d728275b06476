"""The trained checkpoints of the repository are what their cards say, and the kernel tools work on the exact one."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from datasets import Dataset
from huggingface_hub import ModelCard
from typer.testing import CliRunner

from modeling_itnet import (
    ITNetForImageClassification,
    ITNetImageProcessor,
    KernelDiagnosis,
    diagnose_kernels,
    kernel_spectrum,
)
from modeling_itnet.cli import app

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = sorted((ROOT / "examples" / "checkpoints").glob("*/"))
FASHION = ROOT / "examples" / "checkpoints" / "itnet-tiny-fashion-mnist"
TEST_ROWS = ROOT / "examples" / "data" / "fashion_mnist_small" / "test.parquet"
# Names of the Hub, https://huggingface.co/tasks; it has none for point clouds.
TASKS = {"itnet-tiny-cifar10": "image-classification", "itnet-tiny-modelnet10": "other"}


@pytest.fixture(scope="module")
def fashion():
    """The exact model, and the test images of the repository with their labels."""
    rows = Dataset.from_parquet(str(TEST_ROWS))
    processor = ITNetImageProcessor.from_pretrained(FASHION)
    pixels = processor(list(rows["image"]), return_tensors="pt")["pixel_values"]
    return ITNetForImageClassification.from_pretrained(FASHION).eval(), pixels, torch.tensor(rows["label"])


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_card(load_script, folder):
    card = ModelCard.load(folder / "README.md")
    (result,) = card.data.eval_results
    source = load_script("make_checkpoints").SOURCES[folder.name]
    log = ROOT / "docs" / "results" / f"{source.run}.json"
    log = json.loads((log if log.exists() else folder / "results.json").read_text(encoding="utf-8"))
    assert result.metric_value == log["metrics"]["accuracy"] and result.metric_args["command"] == log["command"]
    assert result.dataset_split == "test" and result.task_type == TASKS.get(folder.name, "image-classification")
    assert f"# {source.title}\n" in card.text and source.about_data in card.text
    assert card.data.license == "apache-2.0" and (card.data.datasets or "modelnet" in folder.name)
    assert "not comparable with published results" in card.text
    assert "licence" in card.text or "academic use" in card.text
    assert f"**{log['parameters']:,}**" in card.text


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_loads_and_is_small(folder):
    """By the Auto class of the card; and no rows of other people's data are in the folder."""
    assert sum(file.stat().st_size for file in folder.iterdir()) < 1.1e6
    assert {file.suffix for file in folder.iterdir()} == {".md", ".json", ".safetensors"}
    auto = "AutoModelForImageClassification" if "modelnet" not in folder.name else "AutoModelForSequenceClassification"
    path = folder.relative_to(ROOT).as_posix()
    assert f'{auto}.from_pretrained("{path}")' in (folder / "README.md").read_text(encoding="utf-8")
    assert getattr(transformers, auto).from_pretrained(folder).config.num_labels == 10


def test_accuracy_is_that_of_the_card(fashion):
    model, pixels, labels = fashion
    with torch.no_grad():
        accuracy = (torch.cat([model(part).logits for part in pixels.split(500)]).argmax(-1) == labels).float().mean()
    (result,) = ModelCard.load(FASHION / "README.md").data.eval_results
    assert float(accuracy) == pytest.approx(result.metric_value, abs=4 / len(labels))  # rounding may turn a close call


def test_kernel_tools(fashion, tmp_path):
    """What needs exact kernels works on a checkpoint that everybody has."""
    model, pixels, _ = fashion
    assert model.config.integration_mode == "exact"
    batch = {"pixel_values": pixels[:8]}
    assert isinstance(diagnose_kernels(model, batch), KernelDiagnosis)
    assert kernel_spectrum(model, batch) is not None
    Dataset.from_parquet(str(TEST_ROWS))[0]["image"].save(tmp_path / "x.png")
    for arguments in (
        ["plot-kernel", FASHION, tmp_path / "x.png", "-o", tmp_path / "k.png"],
        ["convert", FASHION, tmp_path / "fast", "--data", tmp_path / "x.png", "--steps", "2", "--rank", "2"],
    ):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert result.exit_code == 0, result.output
    fast = ITNetForImageClassification.from_pretrained(tmp_path / "fast").eval()
    assert fast.config.integration_mode == "low_rank"
    with torch.no_grad():
        assert fast(**batch).logits.isfinite().all()
    assert (tmp_path / "k.png").stat().st_size > 5000


def test_pipeline(fashion):
    classify = transformers.pipeline("image-classification", model=str(FASHION))
    row = Dataset.from_parquet(str(TEST_ROWS))[0]
    model, pixels, _ = fashion
    with torch.no_grad():
        expected = model.config.id2label[int(model(pixels[:1]).logits.argmax())]
    assert classify(row["image"])[0]["label"] == expected
