"""Train a small ITNet on point clouds, graphs, or image and text, on a CPU in a few minutes.

    python examples/train_small.py modelnet10 --limit 1500 --epochs 8
    python examples/train_small.py mutag --folds 5 --epochs 25 --learning_rate 1e-2
    python examples/train_small.py easy_vqa --epochs 8

Prints the accuracy on the test rows, beside that of always giving the most frequent training label (for easy_vqa: the
most frequent one for that question, which is what can be known without the image). MUTAG has no official split;
`--folds 5` averages over five.
"""

import argparse
import random
import time
from collections import Counter, defaultdict
from pathlib import Path

import torch
from small_tasks import TASKS, Task
from torch import nn

from modeling_itnet import optimizer_param_groups


def batches(rows: list[dict], size: int) -> list[list[dict]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def train(task: Task, epochs: int, batch_size: int, learning_rate: float, seed: int) -> nn.Module:
    """AdamW with a short warm-up and cosine decay."""
    torch.manual_seed(seed)
    shuffle, rows = random.Random(seed), list(task.train)
    model = task.make_model().train()
    optimizer = torch.optim.AdamW(optimizer_param_groups(model, weight_decay=0.05), lr=learning_rate)
    steps = epochs * len(batches(rows, batch_size))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps, pct_start=0.1)
    for epoch in range(epochs):
        shuffle.shuffle(rows)
        total = 0.0
        for part in batches(rows, batch_size):
            loss = model(**task.collate(part, True)).loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            total += loss.item() * len(part)
        print(f"epoch {epoch + 1:2d}  loss {total / len(rows):.4f}", flush=True)
    return model


@torch.no_grad()
def accuracy(model: nn.Module, task: Task, rows: list[dict], batch_size: int = 64) -> float:
    model.eval()
    right = 0
    for part in batches(rows, batch_size):
        inputs = task.collate(part, False)
        labels = inputs.pop("labels")
        right += (model(**inputs).logits.argmax(-1) == labels).sum().item()
    return right / len(rows)


def baseline(task: Task) -> float:
    """Accuracy of the most frequent training label, of those with the same question where rows have one."""
    counts = defaultdict(Counter)
    for row in task.train:
        counts[row.get("question")][row[task.label]] += 1
    best = {question: count.most_common(1)[0][0] for question, count in counts.items()}
    return sum(best.get(row.get("question")) == row[task.label] for row in task.test) / len(task.test)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of the data sets")
    parser.add_argument("--limit", type=int, help="use this many rows of each split")
    parser.add_argument("--integration_mode", default="low_rank", help="low_rank is by far the fastest on a CPU")
    parser.add_argument("--folds", type=int, default=1, help="average over this many splits (mutag)")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    results, baselines, start = [], [], time.perf_counter()
    for fold in range(args.folds):
        extra = {"fold": fold} if args.task == "mutag" else {}
        task = TASKS[args.task](args.data, args.limit, integration_mode=args.integration_mode, **extra)
        model = train(task, args.epochs, args.batch_size, args.learning_rate, args.seed)
        results.append(accuracy(model, task, task.test))
        baselines.append(baseline(task))
        print(f"test accuracy {results[-1]:.3f} on {len(task.test)} rows; baseline {baselines[-1]:.3f}")
    if args.folds > 1:
        means = (sum(values) / args.folds for values in (results, baselines))
        print("mean of {} folds {:.3f}; baseline {:.3f}".format(args.folds, *means))
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
