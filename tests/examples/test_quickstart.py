"""The quickstart as a user runs it, with a few steps instead of all."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification, pipeline

from modeling_itnet import ITNetForImageClassification
from modeling_itnet.analysis.diagnosis import diagnose_kernels

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(folder that the script wrote, what it printed)."""
    folder = tmp_path_factory.mktemp("quickstart")
    command = [sys.executable, "examples/quickstart.py", "--max_steps", "3", "--batch_size", "16"]
    command += ["--output_dir", str(folder / "model")]
    environment = os.environ | {"HF_DATASETS_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return folder / "model", done.stdout


def test_reports_accuracy_and_reload(run):
    _, printed = run
    assert "Test accuracy: " in printed
    assert "identical logits" in printed


def test_saved_folder_reloads(run):
    model = AutoModelForImageClassification.from_pretrained(run[0])
    assert type(model) is ITNetForImageClassification
    assert model.config.id2label[9] == "Ankle boot"
    assert model(pixel_values=torch.zeros(2, 1, 28, 28)).logits.shape == (2, 10)


def test_saved_folder_has_its_processor_and_exact_kernels(run):
    """What it saves is enough for a pipeline and for the tools that look at kernels."""
    picture = Image.fromarray((255 * np.random.default_rng(0).random((28, 28))).astype(np.uint8))
    answers = pipeline("image-classification", model=str(run[0]))(picture, top_k=10)
    processor, model = (
        AutoImageProcessor.from_pretrained(run[0]),
        AutoModelForImageClassification.from_pretrained(run[0]),
    )
    inputs = processor(picture, return_tensors="pt")
    expected = (torch.from_numpy(np.asarray(picture)).float() / 255 - 0.286) / 0.353
    torch.testing.assert_close(inputs["pixel_values"][0, 0], expected)
    scores = model.eval()(**inputs).logits.softmax(-1)[0]
    for answer in answers:
        assert answer["score"] == pytest.approx(scores[model.config.label2id[answer["label"]]].item(), rel=1e-4)
    assert model.config.integration_mode == "exact"
    assert len(diagnose_kernels(model, dict(inputs)).heads) == 3 * 4


def test_picture_is_not_trivial(run):
    with Image.open(run[0] / "kernels.png") as picture:
        assert min(picture.size) > 400
        assert len(np.unique(np.asarray(picture.convert("RGB")).reshape(-1, 3), axis=0)) > 100


def test_help_lists_the_options():
    command = [sys.executable, "examples/quickstart.py", "--help"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for option in ("--epochs", "--batch_size", "--output_dir", "--seed", "--data_dir", "--max_steps"):
        assert option in printed
