"""Learning the solution operator of a differential equation, with ITNet, an FNO or a GNO.

python examples/run_operator_learning.py configuration/recipes/darcy-cpu.yaml  # after examples/data/download.py pde
python examples/run_operator_learning.py --problem own --dataset my_fields --config_overrides fourier_scale=1.0

`darcy`: from a permeability a(x) on [0, 1]^2 to the pressure; trained on 16 x 16 points, tested on these and on
32 x 32 points, a resolution that no model has seen. `burgers`: from u(0, x) to u(1, x) on 16 points of a line. The
folder holds darcy_{train_16,test_16,test_32}.npz and burgers_{train,test}_16.npz with arrays `x` and `y`.

`own`: any function to any other, on any points. The folder holds train.npz and test.npz (or what --train_split and
--eval_split name; --holdout does without the second) with N samples each:

    x                [N, n, f] or [N, n]       values of the input function
    positions        [n, s] or [N, n, s]       where they were taken; points of all samples, or of each its own
    y                [N, m, c] or [N, m]       values of the output function
    query_positions  [m, s] or [N, m, s]       where these were taken; without it at `positions`
    measure          [n] or [N, n]             area that each point stands for (optional; without it all the same)

Coordinates of `own` data are moved and scaled into [0, 1]^s, by one factor for all axes and all samples: Fourier
features count waves per unit, and `fourier_scale` near the number of waves that matter across the domain, 1 for smooth
fields, is a good start. Loss and metric are the relative L2 error |p_model - p| / |p|, averaged over samples.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from common.arguments import DataArguments, ExampleTrainingArguments, ModelArguments, parse
from common.data import find_data, held_out_rows
from common.draws import drawn_by
from common.runs import Models, build_model, run, start
from common.trainer import ExampleTrainer
from torch import Tensor

from modeling_itnet import ITNetForSignalRegression
from modeling_itnet.heads.signal import relative_l2

Rows = list[dict[str, Tensor]]


@dataclass
class OperatorDataArguments(DataArguments):
    problem: str = field(default="darcy", metadata={"help": "darcy, burgers, or own: your own npz files."})
    num_queries: int | None = field(
        default=None,
        metadata={"help": "Ask ITNet for this many random points of the solution per training step, not for all."},
    )


def grid(side: int, dim: int) -> Tensor:
    """Returns nodes i / side of a regular grid on [0, 1)^dim, row by row: [side^dim, dim].

    That is where the solutions are sampled: every second node of the 32 x 32 grid is one of the 16 x 16 grid.
    """
    nodes = torch.arange(side) / side
    return torch.cartesian_prod(*[nodes] * dim).reshape(-1, dim)


def read(path: Path, problem: str, limit: int | None) -> Rows:
    """Returns input and solution [n, 1] per sample, and the positions [n, s] that all share."""
    with np.load(path) as arrays:
        inputs, solutions = (torch.from_numpy(arrays[name].astype(np.float32))[:limit] for name in ("x", "y"))
    if problem == "burgers":
        solutions = solutions[:, -1]  # [N, times, n] -> the last time
    positions = grid(inputs.shape[-1], inputs.dim() - 1)
    inputs, solutions = (values.flatten(1).unsqueeze(-1) for values in (inputs, solutions))
    return [{"signal_values": x, "positions": positions, "labels": y} for x, y in zip(inputs, solutions, strict=True)]


def read_own(path: Path, limit: int | None) -> Rows:
    """Reads rows of a file in the layout that the head of this file describes."""
    if not path.is_file():
        found = sorted(file.stem for file in path.parent.glob("*.npz"))
        raise ValueError(f"no {path.name} in {path.parent}: there are {found}")
    with np.load(path) as arrays:
        missing = [name for name in ("x", "positions", "y") if name not in arrays]
        if missing:
            raise ValueError(f"{path} needs an array `{missing[0]}`, but has {', '.join(arrays.files)}")
        given = {name: torch.from_numpy(np.asarray(arrays[name], dtype=np.float32)) for name in arrays.files}

    def fail(name: str, wanted: str) -> None:
        raise ValueError(f"array `{name}` {list(given[name].shape)} of {path} must be {wanted}")

    for name, array in given.items():
        if not array.isfinite().all():
            raise ValueError(f"array `{name}` of {path} holds values that are not finite")
    for name in ("x", "y"):
        if given[name].dim() not in (2, 3):
            fail(name, "[samples, points, components] or [samples, points]")
    inputs, solutions = (given[name] if given[name].dim() == 3 else given[name].unsqueeze(-1) for name in "xy")
    count, points = inputs.shape[:2]
    columns = {"signal_values": list(inputs), "labels": list(solutions)}
    sizes = {"positions": points, "query_positions": solutions.shape[1], "measure": points}
    for name, size in sizes.items():
        if name not in given:
            continue
        array, tail = given[name], [size] if name == "measure" else [size, given["positions"].shape[-1]]
        if list(array.shape) not in (tail, [count, *tail]):
            fail(name, f"{tail} or {[count, *tail]}, to fit `x` and `y`")
        columns[name] = list(array) if array.dim() > len(tail) else [array] * count
    if "query_positions" not in given and solutions.shape[1] != points:
        fail("y", f"[{count}, {points}, components], as `x`: there are no `query_positions`")
    if len(solutions) != count:
        fail("y", f"of {count} samples, as `x`")
    return [{name: each[row] for name, each in columns.items()} for row in range(count)][:limit]


class Rescale:
    """Positions of any unit into [0, 1]^s: minus the lowest corner of the training rows, over their largest extent."""

    def __init__(self, rows: Rows):
        places = torch.cat([row[name] for row in rows for name in ("positions", "query_positions") if name in row])
        self.low = places.amin(0)
        self.extent = (places.amax(0) - self.low).max()
        if not self.extent > 0:
            raise ValueError("all `positions` are the same point")

    def __call__(self, rows: Rows) -> Rows:
        scaled: dict[int, Tensor] = {}  # samples that share their positions go on sharing them

        def move(points: Tensor) -> Tensor:
            if id(points) not in scaled:
                scaled[id(points)] = (points - self.low) / self.extent
            return scaled[id(points)]

        names = ("positions", "query_positions")
        return [{name: move(value) if name in names else value for name, value in row.items()} for row in rows]


class Standardise:
    """Inputs to mean 0 and deviation 1, solutions to root mean square 1, each component by the training rows."""

    def __init__(self, rows: Rows):
        inputs, solutions = (torch.cat([row[name] for row in rows]) for name in ("signal_values", "labels"))
        self.mean, self.std = inputs.mean(0), inputs.std(0)
        self.std = torch.where(self.std > 0, self.std, 1.0)  # a constant component
        self.scale = solutions.square().mean(0).sqrt()
        if not (self.scale > 0).all():
            raise ValueError("`y` of the training samples is zero everywhere")

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
    """Rows to inputs [B, n, f] and solutions [B, m, c] on positions [n, s] that they share, or [B, n, s] of their own.

    With ``num_queries`` the solution is asked for at that many of its points: the cost of the query layer is n per
    query.
    """

    def __init__(self, num_queries: int | None = None):
        self.num_queries = num_queries

    def __call__(self, rows: Rows) -> dict[str, Tensor]:
        batch = {name: torch.stack([row[name] for row in rows]) for name in ("signal_values", "labels")}
        if "measure" in rows[0]:
            batch["measure"] = torch.stack([row["measure"] for row in rows])
        for name in ("positions", "query_positions"):
            if name in rows[0]:
                is_shared = all(row[name] is rows[0][name] for row in rows)
                batch[name] = rows[0][name] if is_shared else torch.stack([row[name] for row in rows])
        if self.num_queries is not None:
            places = batch.get("query_positions", batch["positions"])
            with drawn_by([batch["labels"]]):
                asked = torch.randperm(places.shape[-2])[: self.num_queries]
            batch |= {"query_positions": places[..., asked, :], "labels": batch["labels"][:, asked]}
        return batch


def compute_metrics(prediction) -> dict[str, float]:
    values, solutions = (torch.from_numpy(array) for array in (prediction.predictions, prediction.label_ids))
    return {"relative_l2": relative_l2(values, solutions).mean().item()}


def models(model_type: str) -> Models:
    classes = {"itnet": ITNetForSignalRegression}
    if model_type not in ("fno", "gno"):
        return classes | dict.fromkeys(("fno", "gno"))
    try:
        from common.peers.neural_operators import FourierNeuralOperator, GraphNeuralOperator
    except ImportError as error:
        raise ValueError(
            f"`model_type` ({model_type!r}) needs the neuraloperator library: "
            'pip install -c constraints.txt -e ".[peers]"'
        ) from error
    return classes | {"fno": FourierNeuralOperator, "gno": GraphNeuralOperator}


def load(data: OperatorDataArguments) -> tuple[Rows, dict[int, Rows]]:
    """Returns training rows, and those to evaluate on by the side of their grid, which `own` data do not have."""
    folder, is_own = find_data(data.dataset), data.problem == "own"
    if folder is None or not folder.is_dir():
        raise ValueError(f"`dataset` ({data.dataset!r}) must be a folder of npz files")

    def rows(split: str, side: int, limit: int | None) -> Rows:
        if is_own:
            return read_own(folder / f"{split}.npz", limit)
        return read(folder / f"{data.problem}_{split}_{side}.npz", data.problem, limit)

    train = rows(data.train_split, 16, data.max_train_samples)
    if data.holdout:
        kept, held_out = held_out_rows(len(train), data.holdout)
        train, tests = train[: kept.stop], {16: train[held_out.start :]}
    else:
        sides = (16, 32) if data.problem == "darcy" else (16,)
        tests = {side: rows(data.eval_split, side, data.max_eval_samples) for side in sides}
    if is_own:
        rescale = Rescale(train)
        train, tests = rescale(train), {side: rescale(test) for side, test in tests.items()}
    return train, tests


def main(recipe: dict | None = None, options: list[str] | None = None) -> None:
    model_args, data_args, args = parse(
        ModelArguments, OperatorDataArguments, ExampleTrainingArguments, recipe=recipe, options=options
    )
    start(args)
    if data_args.problem not in ("darcy", "burgers", "own"):
        raise ValueError(f"`problem` ({data_args.problem!r}) must be darcy, burgers or own")
    train, tests = load(data_args)
    standardise = Standardise(train)
    tests = {str(side): standardise(rows) for side, rows in tests.items()}
    only_itnet = [name for name in ("query_positions", "measure") if name in train[0]]
    if only_itnet and model_args.model_type != "itnet":
        raise ValueError(f"`model_type` ({model_args.model_type!r}) cannot use the array `{only_itnet[0]}`: itnet can")
    size = {
        "position_dim": train[0]["positions"].shape[-1],
        "signal_feature_size": train[0]["signal_values"].shape[-1],
        "num_labels": train[0]["labels"].shape[-1],
    }
    config = model_args.config("signal", signal_loss="relative_l2", **size)
    if args.per_device_train_batch_size > len(train):
        raise ValueError(f"`per_device_train_batch_size` must not exceed the {len(train)} training samples")
    trainer = ExampleTrainer(
        model=build_model(model_args, models(model_args.model_type), config),
        args=args,
        train_dataset=standardise(train),
        eval_dataset=tests["16"] if data_args.problem == "own" else tests,
        data_collator=OperatorCollator(data_args.num_queries if model_args.model_type == "itnet" else None),
        eval_collator=OperatorCollator(),
        compute_metrics=compute_metrics,
    )
    name = find_data(data_args.dataset).name if data_args.problem == "own" else data_args.problem
    run(trainer, model_args, data_args, config, {"dataset": name})


if __name__ == "__main__":
    main()
