"""The trained checkpoints of the repository do what their cards say, on the sample beside them."""

from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from transformers import AutoModel, AutoModelForImageClassification

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = sorted((ROOT / "examples" / "checkpoints").glob("*/"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_card_is_true(load_script, folder):
    results = ModelCard.load(folder / "README.md").data.eval_results
    on_sample = [result for result in results if result.dataset_split != "test"]  # sample.parquet
    assert len(on_sample) == 1 and len(results) == 2
    accuracy = load_script("make_checkpoints").sample_accuracy(folder)
    assert accuracy == pytest.approx(on_sample[0].metric_value, abs=1e-6)
    assert accuracy > 0.3  # of ten classes


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_loads_and_is_small(folder):
    assert sum(file.stat().st_size for file in folder.iterdir()) < 5e6
    auto = AutoModelForImageClassification if "cifar10" in folder.name else AutoModel
    assert auto.from_pretrained(folder).config.model_type == "itnet"
