"""What kernels were learned: diagnostics of the exact models of run_results.py, one per modality.

python examples/run_results.py --only '*.itnet-exact.0' --keep outputs/results
python examples/kernel_figures.py --models outputs/results

Writes docs/figures/kernels-{cifar10,sst2,modelnet10}.png and, as a page, the same figures in numbers beside those of
the untrained model: docs/kernels_learned.md.
"""

import argparse
from pathlib import Path
from statistics import mean

import torch
from common.arguments import DataArguments
from common.data import load_split
from results_grid import ROOT
from run_glue import TextCollator
from run_image_classification import ImageCollator
from run_point_cloud import PointCollator, read_clouds
from transformers import AutoTokenizer

from modeling_itnet import (
    ITNetForImageClassification,
    ITNetForPointCloudClassification,
    ITNetForSequenceClassification,
    ITNetImageProcessor,
    ITNetPointCloudProcessor,
)
from modeling_itnet.diagnosis import KernelDiagnosis, diagnose_kernels

FIGURES = ROOT / "docs" / "figures"
PAGE = ROOT / "docs" / "kernels_learned.md"
SAMPLES = 16
MODELS = {
    "cifar10": ITNetForImageClassification,
    "sst2": ITNetForSequenceClassification,
    "modelnet10": ITNetForPointCloudClassification,
}
COLUMNS = ("locality", "convolution", "invariance", "content", "causality", "entropy")


def batch(task: str, folder: Path, data: Path) -> dict[str, torch.Tensor]:
    """The first test samples of a task, as its script makes them."""
    paths = {"cifar10": ("cifar10", "test"), "sst2": ("glue/sst2", "validation"), "modelnet10": ("modelnet10", "test")}
    name, split = paths[task]
    rows = load_split(DataArguments(dataset=str(data / name)), split, SAMPLES)
    if task == "cifar10":
        return ImageCollator(ITNetImageProcessor.from_pretrained(folder), ("image", "label"))(list(rows))
    if task == "sst2":
        return TextCollator(AutoTokenizer.from_pretrained(folder), ("sentence",), False)(list(rows))
    processor = ITNetPointCloudProcessor.from_pretrained(folder)
    return PointCollator(processor, is_training=False)(read_clouds(rows))


def figures(diagnosis: KernelDiagnosis, layer: int) -> list[str]:
    heads = [head for head in diagnosis.heads if head.layer == layer]
    return [f"{mean(getattr(head, name) for head in heads):.3f}" for name in COLUMNS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=ROOT / "outputs" / "results", help="what --keep kept")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", help="folder of the data sets")
    args = parser.parse_args()
    FIGURES.mkdir(parents=True, exist_ok=True)
    lines = [
        "# What kernels were learned",
        "",
        f"Diagnostics (`modeling_itnet.diagnosis`) of the exact models behind docs/results.md on {SAMPLES} test",
        "samples, mean over the heads of a layer; in brackets the same before training. The mean of K over pairs is",
        "taken out. Written by `python examples/kernel_figures.py`, whose first lines say where the models come from.",
    ]
    for task, model_class in MODELS.items():
        folder = args.models / f"{task}.itnet-exact.0"
        model = model_class.from_pretrained(folder).eval()
        torch.manual_seed(0)
        untrained = model_class(model.config).eval()
        inputs = batch(task, folder, args.data)
        after, before = (diagnose_kernels(m, inputs, part="centred") for m in (model, untrained))
        after.plot(FIGURES / f"kernels-{task}.png")
        lines += ["", f"## {task}", "", "| layer | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
        for layer in range(model.config.num_hidden_layers):
            pairs = zip(figures(after, layer), figures(before, layer), strict=True)
            lines.append(f"| {layer + 1} | " + " | ".join(f"{a} ({b})" for a, b in pairs) + " |")
        lines += ["", f"A constant kernel has a locality of {after.uniform_locality:.3f} within {after.radius:.3g}."]
        lines += ["", f"![kernels of {task}](figures/kernels-{task}.png)"]
    PAGE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
