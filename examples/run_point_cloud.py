"""Classification of point clouds with ITNet, a PointNet or a Point Transformer.

python examples/run_point_cloud.py configuration/recipes/modelnet10-cpu.yaml  # data/download.py modelnet10

Rows have `points`, [n, 3] numbers, and `label`, a class by number or name.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from common.arguments import DataArguments, ExampleTrainingArguments, ModelArguments, parse
from common.data import encode_labels, find_column, label_names, load_train_and_eval
from common.draws import drawn_by
from common.metrics import class_metrics
from common.peers import PointNet, PointTransformer
from common.runs import build_model, run, start
from common.trainer import ExampleTrainer
from datasets import Dataset

from modeling_itnet import ITNetForPointCloudClassification, ITNetPointCloudProcessor

MODELS = {
    "itnet": ITNetForPointCloudClassification,
    "pointnet": PointNet,
    "point_transformer": PointTransformer,
}


@dataclass
class PointDataArguments(DataArguments):
    num_points: int = field(default=1024, metadata={"help": "Points per cloud, drawn at random in training."})
    augment: bool = field(default=True, metadata={"help": "Scale, jitter and turn training clouds."})
    rotate: bool = field(default=True, metadata={"help": "Turn training clouds about the gravity axis."})


def read_clouds(rows: Dataset) -> list[dict]:
    """Returns rows with points as float32 arrays [n, 3], made once: decoding lists takes longer than training."""
    points = rows.with_format("arrow")[:]["points"].combine_chunks()
    points = getattr(points, "storage", points)  # of an Array2D column
    flat = points.flatten().flatten().to_numpy(zero_copy_only=False).astype(np.float32).reshape(-1, 3)
    ends = np.cumsum([len(cloud) for cloud in points])
    clouds = np.split(flat, ends[:-1])
    return [{"points": cloud, "label": label} for cloud, label in zip(clouds, rows["label"], strict=True)]


class PointCollator:
    """Rows to points [B, n, 3], a mask [B, n] and labels [B]."""

    def __init__(self, processor: ITNetPointCloudProcessor, is_training: bool, augment: bool = False):
        self.processor, self.is_training, self.augment = processor, is_training, augment

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        clouds = [np.asarray(row["points"], dtype=np.float32) for row in rows]
        with drawn_by(clouds):
            generator = np.random.default_rng(int(torch.randint(2**31, ()))) if self.is_training else None
        batch = self.processor(clouds, augment=self.augment, generator=generator, return_tensors="pt")
        return {**batch, "labels": torch.tensor([int(row["label"]) for row in rows])}


def main(recipe: dict | None = None, options: list[str] | None = None) -> None:
    model_args, data_args, args = parse(
        ModelArguments, PointDataArguments, ExampleTrainingArguments, recipe=recipe, options=options
    )
    start(args)
    train, test = load_train_and_eval(data_args)
    for needed in ("points", "label"):
        find_column(train, "dataset", None, needed)
    train, test, names = encode_labels(train, test, "label")
    config = model_args.config("point_cloud", **label_names(names))
    processor = ITNetPointCloudProcessor(num_points=data_args.num_points, do_rotate=data_args.rotate)
    trainer = ExampleTrainer(
        model=build_model(model_args, MODELS, config),
        args=args,
        train_dataset=read_clouds(train),
        eval_dataset=read_clouds(test),
        data_collator=PointCollator(processor, is_training=True, augment=data_args.augment),
        eval_collator=PointCollator(processor, is_training=False),
        processing_class=processor,
        compute_metrics=class_metrics("accuracy", from_hub=args.hub_metrics),
    )
    run(trainer, model_args, data_args, config, {"num_points": data_args.num_points})


if __name__ == "__main__":
    main()
