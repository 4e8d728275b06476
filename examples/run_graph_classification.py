"""Graph classification by cross-validation, with ITNet or GIN.

python examples/run_graph_classification.py configuration/recipes/mutag-cpu.yaml  # after data/download.py graphs

The folder holds one parquet file per data set (--train_split names it), with `edge_index` [2, E], `y`, `node_label`
[n] and optionally `node_attr` [n, c]. Rows are shuffled by --split_seed, cut into --num_folds parts of equal class
shares, and a model is trained for each part on the others. Reported is the last epoch, not the best.
"""

import statistics
from dataclasses import dataclass, field

import numpy as np
import torch
from common.arguments import DataArguments, ExampleTrainingArguments, ModelArguments, parse
from common.data import find_column, label_names, load_split
from common.draws import drawn_by
from common.metrics import class_metrics
from common.peers import GIN
from common.runs import build_model, run, start, write_results
from common.trainer import ExampleTrainer
from sklearn.model_selection import StratifiedKFold

from modeling_itnet import ITNetForGraphClassification, ITNetGraphProcessor

MODELS = {"itnet": ITNetForGraphClassification, "gin": GIN}


@dataclass
class GraphDataArguments(DataArguments):
    train_split: str = field(default="mutag", metadata={"help": "Name of the parquet file, or split of the Hub."})
    num_folds: int = field(default=10, metadata={"help": "Parts of the cross-validation."})
    max_folds: int | None = field(default=None, metadata={"help": "Train for the first parts only."})
    split_seed: int = field(default=0, metadata={"help": "Seed of the parts."})
    flip_signs: bool = field(default=False, metadata={"help": "Flip signs of Laplacian eigenvectors in training."})


class GraphCollator:
    """Rows to node types or features, Laplacian positions, neighbours, a mask and labels."""

    def __init__(self, processor: ITNetGraphProcessor, flip_signs: bool = False):
        self.processor, self.flip_signs = processor, flip_signs

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        with drawn_by(row["edge_index"] for row in rows):
            generator = np.random.default_rng(int(torch.randint(2**31, ()))) if self.flip_signs else None
        return dict(self.processor(rows, flip_signs=self.flip_signs, generator=generator, return_tensors="pt"))


def as_graph(row: dict, num_types: int) -> dict:
    """Returns what the processor reads. Where nodes have attributes too, their labels become one-hot columns beside
    these."""
    graph = {"edge_index": row["edge_index"], "y": row["y"]}
    if row.get("node_attr") is None:
        return {**graph, "node_types": row["node_label"]}
    attributes = np.asarray(row["node_attr"], dtype=np.float32).reshape(len(row["node_label"]), -1)
    return {**graph, "x": np.concatenate([attributes, np.eye(num_types)[row["node_label"]]], axis=1)}


def main(recipe: dict | None = None, options: list[str] | None = None) -> None:
    model_args, data_args, args = parse(
        ModelArguments, GraphDataArguments, ExampleTrainingArguments, recipe=recipe, options=options
    )
    if data_args.holdout:
        raise ValueError(f"`holdout` ({data_args.holdout}) must be 0: the parts of the cross-validation are held out")
    start(args)
    rows = load_split(data_args, data_args.train_split, data_args.max_train_samples)
    for needed in ("edge_index", "node_label", "y"):
        find_column(rows, "dataset", None, needed)
    num_types = 1 + max(max(labels) for labels in rows["node_label"])
    graphs = [as_graph(row, num_types) for row in rows]
    classes = [graph["y"] for graph in graphs]
    features = {"num_node_types": num_types}
    if "x" in graphs[0]:
        features = {"num_node_types": 0, "node_feature_size": graphs[0]["x"].shape[1]}
    config = model_args.config("graph", **label_names([str(y) for y in range(max(classes) + 1)]), **features)
    processor = ITNetGraphProcessor(config.position_dim)
    folds = StratifiedKFold(data_args.num_folds, shuffle=True, random_state=data_args.split_seed)
    output_dir, results_file, results = args.output_dir, args.results_file, []
    args.results_file = None
    for fold, (train, test) in enumerate(folds.split(graphs, classes)):
        if fold == data_args.max_folds:
            break
        start(args)
        args.output_dir = f"{output_dir}/fold-{fold}"
        trainer = ExampleTrainer(
            model=build_model(model_args, MODELS, config),
            args=args,
            train_dataset=[graphs[index] for index in train],
            eval_dataset=[graphs[index] for index in test],
            data_collator=GraphCollator(processor, data_args.flip_signs),
            eval_collator=GraphCollator(processor),
            processing_class=processor,
            compute_metrics=class_metrics("accuracy", from_hub=args.hub_metrics),
        )
        extra = {"dataset": data_args.train_split, "fold": fold}
        results.append(run(trainer, model_args, data_args, config, extra))
    scores = [result["metrics"]["accuracy"] for result in results]
    summary = {
        **results[-1],
        "metrics": {"accuracy": statistics.mean(scores)},
        "fold_accuracies": scores,
        "folds": len(scores),
        "train_seconds": round(sum(result["train_seconds"] for result in results), 1),
        "cpu_seconds": round(sum(result["cpu_seconds"] for result in results), 1),
    }
    del summary["fold"]
    args.output_dir, args.results_file = output_dir, results_file
    write_results(args, summary)
    print(f"accuracy {statistics.mean(scores):.3f} over {len(scores)} folds")


if __name__ == "__main__":
    main()
