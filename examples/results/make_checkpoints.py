"""Puts trained models into examples/checkpoints, with cards that say what they reached and on which data.

python examples/results/run.py --only cifar10.itnet-low_rank.0 modelnet10.itnet-low_rank.0 --keep outputs/results
python examples/run_image_classification.py configuration/recipes/fashion_mnist-cpu.yaml \\
    --dataset examples/data/fashion_mnist_small --integration_mode exact --learning_rate 3e-3 --num_train_epochs 5 \\
    --output_dir outputs/results/fashion_mnist_small.itnet-exact.0
python examples/results/make_checkpoints.py --models outputs/results

The last command copies configuration, weights and processor of the runs that it finds, and writes the cards of all.
The model of Fashion-MNIST needs no data but that of the repository; the tests repeat its result.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from grid import RESULTS, ROOT
from huggingface_hub import EvalResult

from modeling_itnet import ITNetConfig, ITNetForImageClassification, ITNetForPointCloudClassification
from modeling_itnet.hub.card import model_card, result_task

CHECKPOINTS = ROOT / "examples" / "checkpoints"
FILES = ("config.json", "model.safetensors", "preprocessor_config.json")
HEADS = {"image": ITNetForImageClassification, "point_cloud": ITNetForPointCloudClassification}


@dataclass(frozen=True)
class Source:
    """Where a checkpoint comes from: the run that trained it, and what its card says."""

    run: str
    title: str
    data_name: str  # of the rows that it was tested on
    data_id: str
    about_data: str
    datasets: tuple[str, ...] = ()  # ids on the Hub


SOURCES = {
    "itnet-tiny-cifar10": Source(
        "cifar10.itnet-low_rank.0",
        "ITNet, low rank, on CIFAR-10",
        "CIFAR-10, all 10,000 test images, as JPEG of quality 75",
        "uoft-cs/cifar10",
        "Trained for two epochs on 25,000 of the 50,000 training images of CIFAR-10, and tested on the 10,000 test "
        "images, all of them stored as JPEG of quality 75: not comparable with published results. No image is in this "
        "folder. The data set's page states no licence (https://www.cs.toronto.edu/~kriz/cifar.html).",
        ("uoft-cs/cifar10",),
    ),
    "itnet-tiny-modelnet10": Source(
        "modelnet10.itnet-low_rank.0",
        "ITNet, low rank, on ModelNet10",
        "ModelNet10, test shapes, 32 points each",
        "modelnet10",
        "Trained for twelve epochs on the training shapes of ModelNet10 and tested on its test shapes, with 32 of "
        "1,024 points of each shape: not comparable with published results, which use 1,024. No shape is in this "
        "folder. "
        "ModelNet is for academic use (https://modelnet.cs.princeton.edu).",
    ),
    "itnet-tiny-fashion-mnist": Source(
        "fashion_mnist_small.itnet-exact.0",
        "ITNet, exact, on a part of Fashion-MNIST",
        "Fashion-MNIST, 2,000 test images (examples/data/fashion_mnist_small)",
        "zalando-datasets/fashion_mnist",
        "Trained for five epochs on the 8,000 images of Fashion-MNIST in `examples/data/fashion_mnist_small`, and "
        "tested on the 2,000 test images there, whose standard error is about 0.8 points: not comparable with "
        "published results on all of it. The images are under the MIT licence, Copyright (c) 2017 Zalando SE.\n\n"
        "It has exact kernels: `itnet plot-kernel`, `diagnose_kernels`, `kernel_spectrum` and `to_low_rank` take it.",
        ("zalando-datasets/fashion_mnist",),
    ),
}


def write_card(name: str) -> None:
    """The card of a checkpoint, from its configuration and what is recorded of its run."""
    folder, source = CHECKPOINTS / name, SOURCES[name]
    path = RESULTS / f"{source.run}.json"
    path = path if path.exists() else folder / "results.json"
    log = json.loads(path.read_text(encoding="utf-8"))
    config = ITNetConfig.from_pretrained(folder)
    head = HEADS[config.modality]
    result = EvalResult(
        task_type=result_task(head),
        dataset_type=source.data_id,
        dataset_name=source.data_name,
        dataset_split="test",
        metric_type="accuracy",
        metric_value=log["metrics"]["accuracy"],
        metric_args={"command": log["command"]},
    )
    card = model_card(
        str(folder.relative_to(ROOT).as_posix()),
        config,
        head,
        [result],
        has_code=False,
        title=source.title,
        datasets=source.datasets,
        about_data=source.about_data,
    )
    card.save(folder / "README.md")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=ROOT / "outputs" / "results", help="folder of the runs")
    args = parser.parse_args()
    for name, source in SOURCES.items():
        run, folder = args.models / source.run, CHECKPOINTS / name
        if run.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            logged = () if (RESULTS / f"{source.run}.json").exists() else ("results.json",)
            for file in (*FILES, *logged):
                (folder / file).write_bytes((run / file).read_bytes())
            print(f"{name}: copied from {run}")
        write_card(name)


if __name__ == "__main__":
    main()
