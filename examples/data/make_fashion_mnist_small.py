"""Cuts Fashion-MNIST down to the small copy that the quickstart uses: class-balanced, seeded, pixels unchanged.

    python examples/data/make_fashion_mnist_small.py zalando-datasets/fashion_mnist

The source is a dataset id on the Hub, or a folder that holds its train.parquet and test.parquet.
"""

import argparse
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from datasets import Dataset, load_dataset

FOLDER = Path(__file__).parent / "fashion_mnist_small"


def balanced_rows(labels: list[int], count: int, seed: int) -> np.ndarray:
    """Returns ``count`` shuffled row numbers with equally many rows of every class."""
    order = np.random.default_rng(seed).permutation(len(labels))
    classes, in_order = np.unique(labels), np.asarray(labels)[order]
    per_class = [order[in_order == label][: count // len(classes)] for label in classes]
    return np.stack(per_class, axis=1).flatten()  # the classes take turns


def stored_png(example: dict) -> dict:
    """Returns an uncompressed PNG: parquet compresses many of them together, which is a fifth smaller."""
    buffer = BytesIO()
    example["image"].save(buffer, format="PNG", compress_level=0)
    return {"image": {"bytes": buffer.getvalue(), "path": None}}


def write(split: Dataset, count: int, seed: int, path: Path) -> None:
    small = split.select(balanced_rows(split["label"][:], count, seed)).map(stored_png)
    table = small.with_format("arrow")[:].cast(small.features.arrow_schema)  # its metadata holds the features
    pq.write_table(table, path, compression="zstd", compression_level=19, use_dictionary=["label"])
    print(f"{path}: {len(small)} rows, {path.stat().st_size:,} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="dataset id on the Hub, or a folder with train.parquet and test.parquet")
    parser.add_argument("--train", type=int, default=8000, help="training images (default: %(default)s)")
    parser.add_argument("--test", type=int, default=2000, help="test images (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_dir", type=Path, default=FOLDER)
    args = parser.parse_args()
    source = load_dataset(args.source)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    write(source["train"], args.train, args.seed, args.output_dir / "train.parquet")
    write(source["test"], args.test, args.seed, args.output_dir / "test.parquet")


if __name__ == "__main__":
    main()
