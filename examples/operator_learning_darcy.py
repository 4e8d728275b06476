"""Darcy flow: from a permeability a(x) on [0, 1]^2 to the pressure p(x), on grids and on points that no grid holds.

    python examples/operator_learning_darcy.py --epochs 8

Every training step asks for the solution at other random points of the grid, so the model learns a function of the
position. It is then asked for the whole 16 x 16 grid that it was trained on, and for a 32 x 32 grid in and out, whose
points it never saw. Data: `<data>/pde/darcy_{train_16,test_16,test_32}.npz` with `x` (bool) and `y`, both [N, n, n].
Printed is the relative L2 error |p_model - p| / |p|, averaged over test samples, beside that of the mean training
solution.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from modeling_itnet import ITNetConfig, ITNetForSignalRegression, optimizer_param_groups


def load(path: Path) -> tuple[Tensor, Tensor]:
    """Permeability and solution, [N, n^2, 1] each, row by row."""
    with np.load(path) as arrays:
        return tuple(torch.from_numpy(arrays[name].astype(np.float32)).flatten(1).unsqueeze(-1) for name in ("x", "y"))


def grid(side: int) -> Tensor:
    """Cell centres of a side x side grid on [0, 1]^2, row by row: [side^2, 2]."""
    centres = (torch.arange(side) + 0.5) / side
    return torch.cartesian_prod(centres, centres)


def relative_error(predictions: Tensor, solution: Tensor) -> float:
    return ((predictions - solution).norm(dim=(1, 2)) / solution.norm(dim=(1, 2))).mean().item()


def train(model: nn.Module, data: tuple[Tensor, Tensor], args) -> None:
    values, solutions = data
    positions = grid(16)
    optimizer = torch.optim.AdamW(optimizer_param_groups(model, weight_decay=1e-4), lr=args.learning_rate)
    steps = args.epochs * -(-len(values) // args.batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.learning_rate, total_steps=steps, pct_start=0.1)
    model.train()
    for epoch in range(args.epochs):
        losses = []
        for chosen in torch.randperm(len(values)).split(args.batch_size):
            asked = torch.randperm(len(positions))[: args.queries]
            loss = model(
                signal_values=values[chosen],
                positions=positions,
                query_positions=positions[asked],
                labels=solutions[chosen][:, asked],
            ).loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        print(f"epoch {epoch + 1:2d}  loss {np.mean(losses):.5f}", flush=True)


@torch.no_grad()
def predict(model: nn.Module, values: Tensor, side: int, query_side: int) -> Tensor:
    parts = [
        model(signal_values=part, positions=grid(side), query_positions=grid(query_side)).predictions
        for part in values.split(10)
    ]
    return torch.cat(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of the data sets")
    parser.add_argument("--limit", type=int, help="number of training samples")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch_size", type=int, default=20)
    parser.add_argument("--queries", type=int, default=64, help="points of the solution per step")
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    args = parser.parse_args()
    start = time.perf_counter()
    torch.manual_seed(0)
    values, solutions = load(args.data / "pde" / "darcy_train_16.npz")
    values, solutions = values[: args.limit], solutions[: args.limit]
    config = ITNetConfig.from_preset(
        "itnet-tiny",
        modality="signal",
        position_dim=2,
        signal_feature_size=1,
        num_labels=1,
        num_hidden_layers=2,
        hidden_size=32,
        num_attention_heads=2,
        fourier_scale=1.0,
        integration_mode="low_rank",
    )
    model = ITNetForSignalRegression(config)
    train(model, (values, solutions), args)
    model.eval()
    coarse, fine = (load(args.data / "pde" / f"darcy_test_{side}.npz") for side in (16, 32))
    mean = solutions.mean(0, keepdim=True)
    print(f"16 x 16: {relative_error(predict(model, coarse[0], 16, 16), coarse[1]):.3f}", end="; ")
    print(f"mean of the training solutions: {relative_error(mean, coarse[1]):.3f}")
    print(f"32 x 32 in and out, untrained: {relative_error(predict(model, fine[0], 32, 32), fine[1]):.3f}")
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
