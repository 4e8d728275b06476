"""What kernels were learned: diagnostics of the exact models of run.py, one per modality.

python examples/results/run.py --only '*.itnet-exact.0'
python examples/results/kernel_figures.py

Writes docs/figures/kernels-*.png and, as a page, the same figures in numbers beside those of the untrained model:
docs/kernels_learned.md. What docs/kernels_learned_notes.md says about them stands at its top. Modalities whose model
is not there are left out.
"""

import argparse
from collections.abc import Callable
from math import isnan
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import examples_path  # noqa: F401
import torch
from common.arguments import DataArguments
from common.data import load_split
from common.image_text import ImageTextCollator
from grid import ROOT
from run_glue import TextCollator
from run_graph_classification import GraphCollator, as_graph
from run_operator_learning import OperatorCollator, Standardise, read
from run_point_cloud import PointCollator, read_clouds
from transformers import AutoTokenizer

from modeling_itnet import (
    ITNetForGraphClassification,
    ITNetForImageClassification,
    ITNetForPointCloudClassification,
    ITNetForSequenceClassification,
    ITNetForSignalRegression,
    ITNetForVisualQuestionAnswering,
    ITNetGraphProcessor,
    ITNetImageProcessor,
    ITNetPointCloudProcessor,
    ITNetProcessor,
)
from modeling_itnet.analysis.diagnosis import KernelDiagnosis, diagnose_kernels

FIGURES = ROOT / "docs" / "figures"
PAGE = ROOT / "docs" / "kernels_learned.md"
NOTES = ROOT / "docs" / "kernels_learned_notes.md"
SAMPLES = 16
COLUMNS = ("locality", "convolution", "invariance", "content", "causality", "entropy")
Batch = dict[str, torch.Tensor]


def rows(path: Path, split: str):
    return load_split(DataArguments(dataset=str(path)), split, SAMPLES)


def images(folder: Path, data: Path) -> Batch:
    processor = ITNetImageProcessor.from_pretrained(folder)
    return processor([row["image"].convert("RGB") for row in rows(data / "cifar10", "test")], return_tensors="pt")


def sentences(folder: Path, data: Path) -> Batch:
    collate = TextCollator(AutoTokenizer.from_pretrained(folder), ("sentence",), False)
    return collate(list(rows(data / "glue" / "sst2", "validation")))


def clouds(folder: Path, data: Path) -> Batch:
    collate = PointCollator(ITNetPointCloudProcessor.from_pretrained(folder), is_training=False)
    return collate(read_clouds(rows(data / "modelnet10", "test")))


def graphs(folder: Path, data: Path) -> Batch:
    found = rows(data / "graphs", "mutag")
    return GraphCollator(ITNetGraphProcessor.from_pretrained(folder))([as_graph(row, 7) for row in found])


def questions(folder: Path, data: Path) -> Batch:
    processor = ITNetProcessor.from_pretrained(folder)
    collate = ImageTextCollator(processor, lambda row: row["image"].convert("RGB"), "question", lambda _: None)
    return collate(list(rows(data / "easy_vqa", "test")))


def fields(folder: Path, data: Path) -> Batch:
    train, test = (read(data / "pde" / f"burgers_{split}_16.npz", "burgers", None) for split in ("train", "test"))
    return OperatorCollator()(Standardise(train)(test[:SAMPLES]))


class Task(NamedTuple):
    run: str  # folder of the trained model
    title: str
    model: type
    batch: Callable[[Path, Path], Batch]  # of the model's folder and the folder of the data sets


TASKS = {
    "image": Task("cifar10.itnet-exact.0", "Images: CIFAR-10", ITNetForImageClassification, images),
    "text": Task("sst2.itnet-exact.0", "Text: SST-2", ITNetForSequenceClassification, sentences),
    "points": Task(
        "modelnet10-modes.itnet-exact.0", "Point clouds: ModelNet10", ITNetForPointCloudClassification, clouds
    ),
    "graph": Task("mutag.itnet-exact.0/fold-0", "Graphs: MUTAG, first fold", ITNetForGraphClassification, graphs),
    "multimodal": Task(
        "easy_vqa.itnet-exact.0", "Image and text: easy-VQA", ITNetForVisualQuestionAnswering, questions
    ),
    "signal": Task("burgers.itnet-exact.0", "Signals: Burgers' equation", ITNetForSignalRegression, fields),
}


def figures(diagnosis: KernelDiagnosis, layer: int) -> list[str]:
    heads = [head for head in diagnosis.heads if head.layer == layer]
    values = [mean(getattr(head, name) for head in heads) for name in COLUMNS]
    return ["–" if isnan(value) else f"{value:.3f}" for value in values]


def section(name: str, task: Task, models: Path, data: Path) -> list[str]:
    """Draws the figure of a task and returns its part of the page."""
    folder = models / task.run
    model = task.model.from_pretrained(folder).eval()
    torch.manual_seed(0)
    untrained = task.model(model.config).eval()
    inputs = task.batch(folder, data)
    after, before = (diagnose_kernels(m, inputs, part="centred") for m in (model, untrained))
    after.plot(FIGURES / f"kernels-{name}.png")
    lines = ["", f"## {task.title}", "", "| layer | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for layer in range(model.config.num_hidden_layers):
        pairs = zip(figures(after, layer), figures(before, layer), strict=True)
        lines.append(f"| {layer + 1} | " + " | ".join(f"{a} ({b})" for a, b in pairs) + " |")
    lines += ["", f"A constant kernel has a locality of {after.uniform_locality:.3f} within {after.radius:.3g}."]
    return [*lines, "", f"![kernels of {name}](figures/kernels-{name}.png)"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=ROOT / "outputs" / "results", help="what run.py kept")
    parser.add_argument("--data", type=Path, default=ROOT / "data", help="folder of the data sets")
    args = parser.parse_args()
    FIGURES.mkdir(parents=True, exist_ok=True)
    lines = [NOTES.read_text(encoding="utf-8").strip()]
    for name, task in TASKS.items():
        if (args.models / task.run / "config.json").is_file():
            lines += section(name, task, args.models, args.data)
        else:
            print(f"left out: {args.models / task.run} holds no model")
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
