"""Small real tasks for ITNet: a model, training and test rows, and what turns rows into a batch.

Data are parquet files in the layout of `<data>/modelnet10/train.parquet`, `<data>/graphs/mutag.parquet`,
`<data>/easy_vqa/train.parquet` and `<data>/wordpiece/vocab.txt`.
"""

import io
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from PIL import Image
from torch import nn
from transformers import BertTokenizer

from modeling_itnet import (
    ITNetConfig,
    ITNetForGraphClassification,
    ITNetForPointCloudClassification,
    ITNetForVisualQuestionAnswering,
    ITNetGraphProcessor,
    ITNetImageProcessor,
    ITNetPointCloudProcessor,
    ITNetProcessor,
)


@dataclass
class Task:
    make_model: Callable[[], nn.Module]
    train: list[dict]
    test: list[dict]
    collate: Callable[[list[dict], bool], dict[str, torch.Tensor]]  # (rows, is_training) -> arguments of the model
    label: str  # column of the class


def read(path: Path, limit: int | None = None) -> list[dict]:
    """The first rows of a parquet file."""
    return pq.read_table(path).slice(0, limit).to_pylist()


def modelnet10(data: Path, limit: int | None, num_points: int = 128, **overrides) -> Task:
    """Ten kinds of furniture."""
    processor = ITNetPointCloudProcessor(num_points=num_points)
    config = {"num_hidden_layers": 3, "fourier_scale": 1.0, **overrides}
    config = ITNetConfig.from_preset("itnet-tiny", modality="point_cloud", num_labels=10, **config)
    rows = {split: read(data / "modelnet10" / f"{split}.parquet", limit) for split in ("train", "test")}
    for row in rows["train"] + rows["test"]:
        row["points"] = np.array(row["points"], dtype=np.float32)

    def collate(rows, is_training):
        batch = processor([row["points"] for row in rows], augment=is_training, return_tensors="pt")
        return {**batch, "labels": torch.tensor([row["label"] for row in rows])}

    return Task(lambda: ITNetForPointCloudClassification(config), rows["train"], rows["test"], collate, "label")


def mutag(data: Path, limit: int | None, fold: int = 0, num_folds: int = 5, **overrides) -> Task:
    """Does a molecule cause mutations? 188 graphs without an official split: cross-validation.

    Signs of eigenvectors stay as they are: with random ones a model this small does not fit in a few minutes.
    """
    rows = read(data / "graphs" / "mutag.parquet")
    random.Random(0).shuffle(rows)
    rows = rows[:limit]
    processor = ITNetGraphProcessor()
    config = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "fourier_scale": 1.0, **overrides}
    config = {"kernel_init_scale": 1.0, **config}
    config = ITNetConfig.from_preset("itnet-tiny", modality="graph", num_node_types=7, num_labels=2, **config)

    def collate(rows, is_training):
        graphs = [{"edge_index": row["edge_index"], "node_types": row["node_label"], "y": row["y"]} for row in rows]
        return processor(graphs, return_tensors="pt")

    train = [row for index, row in enumerate(rows) if index % num_folds != fold]
    return Task(lambda: ITNetForGraphClassification(config), train, rows[fold::num_folds], collate, "y")


def easy_vqa(data: Path, limit: int | None, **overrides) -> Task:
    """Which shape, which colour? The yes/no questions of the set are left out: their wording alone tells the answer to
    most, so that they would not show whether a model looks at the image.
    """
    tokenizer = BertTokenizer(str(data / "wordpiece" / "vocab.txt"), model_max_length=32)
    config = {"num_hidden_layers": 3, "image_size": 64, "patch_size": 16, "measure": "balanced", **overrides}
    config = {"kernel_init_scale": 1.0, **config}
    config = ITNetConfig.from_preset("itnet-tiny", modality="multimodal", num_labels=13, **config)
    processor = ITNetProcessor(ITNetImageProcessor.from_model_config(config), tokenizer)
    rows = {}
    for split in ("train", "test"):
        rows[split] = read(data / "easy_vqa" / f"{split}.parquet")
        rows[split] = [row for row in rows[split] if not row["question"].startswith(("is ", "does ", "do "))]
        random.Random(0).shuffle(rows[split])  # they are sorted by image
        rows[split] = rows[split][:limit]

    def collate(rows, is_training):
        images = [Image.open(io.BytesIO(row["image"]["bytes"])) for row in rows]
        batch = processor(images, [row["question"] for row in rows], return_tensors="pt")
        return {**batch, "labels": torch.tensor([row["answer"] for row in rows])}

    return Task(lambda: ITNetForVisualQuestionAnswering(config), rows["train"], rows["test"], collate, "answer")


TASKS = {"modelnet10": modelnet10, "mutag": mutag, "easy_vqa": easy_vqa}
