"""Learning the solution operator of a differential equation, with ITNet, an FNO or a GNO.

python examples/run_operator_learning.py configuration/recipes/darcy-cpu.yaml --dataset ../shared/data/pde

`darcy`: from a permeability a(x) on [0, 1]^2 to the pressure; trained on 16 x 16 points, tested on these and on
32 x 32 points, a resolution that no model has seen. `burgers`: from u(0, x) to u(1, x) on 16 points of a line. The
folder holds darcy_{train_16,test_16,test_32}.npz and burgers_{train,test}_16.npz with arrays `x` and `y`. Loss and
metric are the relative L2 error |p_model - p| / |p|, averaged over samples.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from common.arguments import DataArguments, ExampleTrainingArguments, ModelArguments, parse
from common.data import held_out_rows
from common.losses import step_loss
from common.runs import build_model, run, start
from common.trainer import ExampleTrainer
from torch import Tensor

from modeling_itnet import ITNetForSignalRegression

Rows = list[dict[str, Tensor]]


@dataclass
class OperatorDataArguments(DataArguments):
    problem: str = field(default="darcy", metadata={"help": "darcy or burgers."})
    num_queries: int | None = field(
        default=None,
        metadata={"help": "Ask ITNet for this many random points of the solution per training step, not for all."},
    )


def grid(side: int, dim: int) -> Tensor:
    """Nodes i / side of a regular grid on [0, 1)^dim, row by row: [side^dim, dim].

    That is where the solutions are sampled: every second node of the 32 x 32 grid is one of the 16 x 16 grid.
    """
    nodes = torch.arange(side) / side
    return torch.cartesian_prod(*[nodes] * dim).reshape(-1, dim)


def read(path: Path, problem: str, limit: int | None) -> Rows:
    """Input and solution [n, 1] per sample, and the positions [n, s] that all share."""
    with np.load(path) as arrays:
        inputs, solutions = (torch.from_numpy(arrays[name].astype(np.float32))[:limit] for name in ("x", "y"))
    if problem == "burgers":
        solutions = solutions[:, -1]  # [N, times, n] -> the last time
    positions = grid(inputs.shape[-1], inputs.dim() - 1)
    inputs, solutions = (values.flatten(1).unsqueeze(-1) for values in (inputs, solutions))
    return [{"signal_values": x, "positions": positions, "labels": y} for x, y in zip(inputs, solutions, strict=True)]


class Standardise:
    """Inputs to mean 0 and deviation 1, solutions to root mean square 1, by the training rows."""

    def __init__(self, rows: Rows):
        inputs, solutions = (torch.stack([row[name] for row in rows]) for name in ("signal_values", "labels"))
        self.mean, self.std, self.scale = inputs.mean(), inputs.std(), solutions.square().mean().sqrt()

    def __call__(self, rows: Rows) -> Rows:
        return [
            {
                **row,
                "signal_values": (row["signal_values"] - self.mean) / self.std,
                "labels": row["labels"] / self.scale,
            }
            for row in rows
        ]


class OperatorCollator:
    """Rows to inputs and solutions [B, n, 1] on the positions [n, s] that they share.

    With ``num_queries`` the solution is asked for at that many of them: the cost of the query layer is n per query.
    """

    def __init__(self, num_queries: int | None = None):
        self.num_queries = num_queries

    def __call__(self, rows: Rows) -> dict[str, Tensor]:
        batch = {name: torch.stack([row[name] for row in rows]) for name in ("signal_values", "labels")}
        batch["positions"] = rows[0]["positions"]
        if self.num_queries is not None:
            asked = torch.randperm(len(batch["positions"]))[: self.num_queries]
            batch |= {"query_positions": batch["positions"][asked], "labels": batch["labels"][:, asked]}
        return batch


def relative_error(predictions: Tensor, solutions: Tensor) -> Tensor:
    """[B, n, c] each -> [B]."""
    return (predictions - solutions).norm(dim=(1, 2)) / solutions.norm(dim=(1, 2))


def relative_loss(outputs, labels: Tensor) -> Tensor:
    """Mean relative error."""
    return relative_error(outputs["predictions"], labels).mean()


def compute_metrics(prediction) -> dict[str, float]:
    values, solutions = (torch.from_numpy(array) for array in (prediction.predictions, prediction.label_ids))
    return {"relative_l2": relative_error(values, solutions).mean().item()}


def models() -> dict[str, tuple]:
    classes = {"itnet": (ITNetForSignalRegression, lambda config: config)}
    try:
        from common.peers.neural_operators import FourierNeuralOperator, GraphNeuralOperator
    except ImportError:  # the library of the peers is not installed: ITNet still trains
        return classes
    return classes | {
        "fno": (FourierNeuralOperator, lambda config: config),
        "gno": (GraphNeuralOperator, lambda config: config),
    }


def main() -> None:
    model_args, data_args, args = parse(ModelArguments, OperatorDataArguments, ExampleTrainingArguments)
    start(args)
    if data_args.problem not in ("darcy", "burgers"):
        raise ValueError(f"`problem` ({data_args.problem!r}) must be darcy or burgers")
    folder, problem = Path(data_args.dataset), data_args.problem
    sides = (16, 32) if problem == "darcy" else (16,)
    name = "darcy_{}_{}.npz" if problem == "darcy" else "burgers_{}_{}.npz"
    train = read(folder / name.format("train", 16), problem, data_args.max_train_samples)
    if data_args.holdout:
        kept, held_out = held_out_rows(len(train), data_args.holdout)
        tests = {"16": train[held_out.start :]}
        train = train[: kept.stop]
    else:
        limit = data_args.max_eval_samples
        tests = {str(side): read(folder / name.format("test", side), problem, limit) for side in sides}
    standardise = Standardise(train)
    tests = {side: standardise(rows) for side, rows in tests.items()}
    size = {"position_dim": train[0]["positions"].shape[1], "signal_feature_size": 1, "num_labels": 1}
    config = model_args.config("signal", **size)
    if args.per_device_train_batch_size > len(train):
        raise ValueError(f"`per_device_train_batch_size` must not exceed the {len(train)} training samples")
    trainer = ExampleTrainer(
        model=build_model(model_args, models(), config),
        args=args,
        train_dataset=standardise(train),
        eval_dataset=tests,
        data_collator=OperatorCollator(data_args.num_queries if model_args.model_type == "itnet" else None),
        eval_collator=OperatorCollator(),
        compute_metrics=compute_metrics,
        compute_loss_func=step_loss(relative_loss, config.proposal_loss_weight),
    )
    run(trainer, model_args, data_args, config, {"dataset": problem})


if __name__ == "__main__":
    main()
