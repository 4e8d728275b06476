"""Puts trained models of run_results.py into examples/checkpoints, with a sample of test data to check them on.

python examples/run_results.py --only cifar10.itnet-low_rank.0 modelnet10.itnet-low_rank.0 --keep outputs/results
python examples/make_checkpoints.py --models outputs/results

A folder holds configuration, weights, processor, the sample (the first test rows) and a card with the results of the
run and of the sample. The tests repeat the latter.
"""

import argparse
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from common.arguments import DataArguments
from common.data import load_split
from datasets import Dataset
from huggingface_hub import EvalResult
from results_grid import RESULTS, ROOT
from run_image_classification import ImageCollator
from run_point_cloud import PointCollator, read_clouds

from modeling_itnet import (
    ITNetForImageClassification,
    ITNetForPointCloudClassification,
    ITNetImageProcessor,
    ITNetPointCloudProcessor,
)
from modeling_itnet.hub.card import model_card

CHECKPOINTS = ROOT / "examples" / "checkpoints"
# Name of the checkpoint -> the run that trained it, the data set, rows of the sample.
SOURCES = {
    "itnet-tiny-cifar10": ("cifar10.itnet-low_rank.0", "cifar10", 100),
    "itnet-tiny-modelnet10": ("modelnet10.itnet-low_rank.0", "modelnet10", 40),
}
POINTS = 128  # of every cloud of a sample


def load(folder: Path):
    """Model and collator of a checkpoint folder."""
    if "cifar10" in folder.name:
        collate = ImageCollator(ITNetImageProcessor.from_pretrained(folder), ("image", "label"))
        return ITNetForImageClassification.from_pretrained(folder).eval(), collate
    collate = PointCollator(ITNetPointCloudProcessor.from_pretrained(folder), is_training=False)
    return ITNetForPointCloudClassification.from_pretrained(folder).eval(), collate


@torch.no_grad()
def sample_accuracy(folder: Path) -> float:
    """Share of the rows of sample.parquet that the model of a folder gets right."""
    model, collate = load(folder)
    rows = Dataset.from_parquet(str(folder / "sample.parquet"))
    inputs = collate(read_clouds(rows) if "points" in rows.column_names else list(rows))
    labels = inputs.pop("labels")
    return float((model(**inputs).logits.argmax(-1) == labels).float().mean())


def write_sample(rows: Dataset, path: Path) -> None:
    if "points" not in rows.column_names:
        rows.to_parquet(path)
        return
    clouds = [row["points"][:POINTS].tolist() for row in read_clouds(rows)]
    pq.write_table(pa.table({"points": clouds, "label": list(rows["label"])}), path, compression="zstd")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=ROOT / "outputs" / "results", help="what --keep kept")
    parser.add_argument("--data", type=Path, default=ROOT / "data", help="folder of the data sets")
    args = parser.parse_args()
    for name, (source, dataset, count) in SOURCES.items():
        folder = CHECKPOINTS / name
        folder.mkdir(parents=True, exist_ok=True)
        for file in ("config.json", "model.safetensors", "preprocessor_config.json"):
            (folder / file).write_bytes((args.models / source / file).read_bytes())
        write_sample(
            load_split(DataArguments(dataset=str(args.data / dataset)), "test", count), folder / "sample.parquet"
        )
        log = json.loads((RESULTS / f"{source}.json").read_text(encoding="utf-8"))
        model, _ = load(folder)
        scores = {"test": (log["metrics"]["accuracy"], log["command"])}
        check = "python -m pytest tests/examples/test_checkpoints.py"
        scores[f"test[:{count}]"] = (sample_accuracy(folder), check)
        results = [
            EvalResult(
                task_type=model.config.modality.replace("_", "-"),
                dataset_type=dataset,
                dataset_name=f"{dataset}, {split}",
                dataset_split=split,
                metric_type="accuracy",
                metric_value=round(value, 6),
                metric_args={"command": command},
            )
            for split, (value, command) in scores.items()
        ]
        card = model_card(str(folder.relative_to(ROOT)), model.config, type(model), results, has_code=False)
        card.save(folder / "README.md")
        print(name, scores)


if __name__ == "__main__":
    main()
