"""What the kernels of a trained model have become: a table and a figure, per layer and head.

python examples/quickstart.py && python examples/kernel_diagnosis.py

Shows the model of the quickstart before and after training: the same configuration with its initial weights, and the
trained one, on the same images.
"""

import argparse
from pathlib import Path

import torch
from datasets import load_dataset
from quickstart import ROOT, to_tensors

from modeling_itnet import ITNetForImageClassification, ITNetImageProcessor, diagnose_kernels


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    data_dir = ROOT / "examples" / "data" / "fashion_mnist_small"
    parser.add_argument("--model", type=Path, default=ROOT / "outputs" / "quickstart", help="folder of an image model")
    parser.add_argument("--data_dir", type=Path, default=data_dir, help="folder with test.parquet")
    parser.add_argument(
        "--output_dir", type=Path, default=ROOT / "outputs" / "kernel_diagnosis", help="for the figures"
    )
    parser.add_argument("--images", type=int, default=16, help="test images to look at")
    parser.add_argument(
        "--part", choices=["full", "centred"], default="centred", help="with or without the mean kernel"
    )
    arguments = parser.parse_args()

    trained = ITNetForImageClassification.from_pretrained(arguments.model)
    torch.manual_seed(0)
    initial = ITNetForImageClassification(trained.config)
    dataset = load_dataset("parquet", data_files={"test": str(arguments.data_dir / "test.parquet")})["test"]
    processor = ITNetImageProcessor.from_pretrained(arguments.model)
    examples = to_tensors(dataset.select(range(arguments.images)), processor)
    pixels = torch.stack([example["pixel_values"] for example in examples])
    for name, model in (("initial", initial), ("trained", trained)):
        diagnosis = diagnose_kernels(model, {"pixel_values": pixels}, part=arguments.part)
        print(f"\n{name}, {arguments.part} kernels\n\n{diagnosis.table()}")
        diagnosis.plot(arguments.output_dir / f"{name}.png")
    print(f"\nfigures: {arguments.output_dir}")


if __name__ == "__main__":
    main()
