"""What models that hardly look at their input reach on the tasks of docs/results.md: a floor to read its tables from.

python examples/results/trivial_baselines.py --data data
python examples/results/table.py

Writes docs/results/trivial.json, from which table.py takes a line for each task whose data are there.
"""

import argparse
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import examples_path  # noqa: F401
import numpy as np
import torch
from common.arguments import DataArguments
from common.data import load_split
from grid import RESULTS, ROOT
from run_operator_learning import OperatorDataArguments, load
from run_point_cloud import read_clouds
from run_vqa import answers_of, without_yes_no
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, f1_score
from tokenizers import BertWordPieceTokenizer
from torch.nn import functional as F

from modeling_itnet.heads.signal import relative_l2
from modeling_itnet.training.recipes import find_recipe, read_recipe

Scores = tuple[str, dict[str, float]]  # what the model does, and its metrics


def rows(folder: Path, split: str, limit: int | None = None):
    return load_split(DataArguments(dataset=str(folder)), split, limit)


def majority(train: list[int], test: list[int]) -> float:
    """Accuracy of the class that training rows have most often."""
    best = Counter(train).most_common(1)[0][0]
    return float(np.mean(np.asarray(test) == best))


def pixels(folder: Path, limit: int | None) -> Scores:
    """A linear classifier on raw pixels: ten epochs of Adam, batches of 250."""
    parts = []
    for split, count in (("train", limit), ("test", None)):
        found = rows(folder, split, count)
        images = np.stack([np.asarray(image, dtype=np.float32).ravel() for image in found["image"]])
        parts.append((torch.from_numpy(images) / 127.5 - 1, torch.tensor(found["label"][:])))
    (inputs, classes), (test_inputs, test_classes) = parts
    torch.manual_seed(0)
    model = torch.nn.Linear(inputs.shape[1], 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    for _ in range(10):
        for batch in torch.randperm(len(inputs)).split(250):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[batch]), classes[batch]).backward()
            optimizer.step()
    with torch.no_grad():
        accuracy = (model(test_inputs).argmax(-1) == test_classes).float().mean().item()
    return "a linear map of the pixels", {"accuracy": accuracy}


def clouds(folder: Path, count: int) -> Scores:
    """A linear classifier on the deciles of each coordinate over the first ``count`` points of a cloud."""

    def deciles(split: str) -> tuple[np.ndarray, list[int]]:
        found = rows(folder, split)
        points = np.stack([row["points"][:count] for row in read_clouds(found)])  # [N, count, 3]
        values = np.quantile(points, np.linspace(0, 1, 11), axis=1)  # [11, N, 3]
        return values.transpose(1, 0, 2).reshape(len(points), -1), found["label"][:]

    (inputs, classes), (test_inputs, test_classes) = deciles("train"), deciles("test")
    model = LogisticRegression(max_iter=2000).fit(inputs, classes)
    score = accuracy_score(test_classes, model.predict(test_inputs))
    return f"a linear map of the deciles of each coordinate, {count} points", {"accuracy": float(score)}


def mean_solution(folder: Path, problem: str) -> Scores:
    """The mean of the training solutions, whatever the input."""
    train, tests = load(OperatorDataArguments(dataset=str(folder), problem=problem))
    mean = torch.stack([row["labels"] for row in train]).mean(0)  # [16^s, 1]
    scores = {}
    for side, test in tests.items():
        solutions = torch.stack([row["labels"] for row in test])
        guess = mean
        if side != 16:  # the finer grid holds the coarser: linear between its nodes
            fine = F.interpolate(mean.view(1, 1, 16, 16), scale_factor=2, mode="bilinear", align_corners=False)
            guess = fine.view(-1, 1)
        scores[f"{side}_relative_l2"] = relative_l2(guess.expand_as(solutions), solutions).mean().item()
    return "the mean of the training solutions", scores


def words(folder: Path, limit: int) -> Scores:
    """Logistic regression on which words a text holds."""
    train, test = rows(folder, "train", limit), rows(folder, "validation")
    count = CountVectorizer(binary=True, min_df=2)
    model = LogisticRegression(max_iter=1000).fit(count.fit_transform(train["sentence"][:]), train["label"][:])
    score = accuracy_score(test["label"][:], model.predict(count.transform(test["sentence"][:])))
    return "logistic regression on the words", {"accuracy": float(score)}


def one_class(folder: Path) -> Scores:
    """The class of most training rows, whatever the text; its F1 is that of class 1."""
    train, test = (rows(folder, split)["label"][:] for split in ("train", "validation"))
    best = Counter(train).most_common(1)[0][0]
    guesses = [best] * len(test)
    scores = {"accuracy": majority(train, test), "f1": float(f1_score(test, guesses)), "matthews_correlation": 0.0}
    return "the most frequent class", scores


def unigrams(folder: Path, recipe: dict) -> Scores:
    """Every token by its frequency in training, in a vocabulary made as run_mlm.py makes it."""
    train, test = rows(folder, "train"), rows(folder, "validation", recipe["max_eval_samples"])
    tokenizer = BertWordPieceTokenizer(lowercase=True)
    tokenizer.train_from_iterator(train["text"], vocab_size=recipe["vocab_size"], min_frequency=2, show_progress=False)
    counts = [Counter(i for text in part["text"] for i in tokenizer.encode(text).ids[1:-1]) for part in (train, test)]
    total, size = sum(counts[0].values()), tokenizer.get_vocab_size()
    loss = -sum(n * np.log((counts[0][token] + 1) / (total + size)) for token, n in counts[1].items())
    asked = sum(counts[1].values())
    best = counts[0].most_common(1)[0][0]
    loss = float(loss / asked)
    scores = {"loss": loss, "perplexity": float(np.exp(loss)), "accuracy": counts[1][best] / asked}
    return "the frequency of each token", scores


def prior(folder: Path, skip_yes_no: bool) -> Scores:
    """The most frequent answer to questions that begin with the same two words."""
    parts = [rows(folder, split) for split in ("train", "test")]
    parts = [without_yes_no(part) if skip_yes_no else part for part in parts]
    names = getattr(parts[0].features["answer"], "names", None)
    pairs = [
        [
            (" ".join(row["question"].lower().split()[:2]), answers_of(row, names)[0])
            for row in part.remove_columns("image")
        ]
        for part in parts
    ]
    by_start: dict[str, Counter] = {}
    for start, answer in pairs[0]:
        by_start.setdefault(start, Counter())[answer] += 1
    overall = Counter(answer for _, answer in pairs[0])
    right = [by_start.get(start, overall).most_common(1)[0][0] == answer for start, answer in pairs[1]]
    return "the usual answer to the question's first two words", {"accuracy": float(np.mean(right))}


def statements(folder: Path) -> Scores:
    train, test = (rows(folder, split)["label"][:] for split in ("train", "validation"))
    return "the most frequent class", {"accuracy": majority(train, test)}


def graphs(folder: Path, name: str) -> Scores:
    """Folds have equal shares of the classes, so that the share of the larger is the accuracy of guessing it."""
    classes = Counter(rows(folder, name)["y"][:])
    return "the most frequent class", {"accuracy": max(classes.values()) / classes.total()}


def baselines(data: Path) -> dict[str, Callable[[], Scores]]:
    """Table of grid.py -> what computes its floor."""
    glue = {f"{task}-pretrained": task for task in ("cola", "mrpc", "rte")}
    fashion = read_recipe(find_recipe("fashion_mnist-cpu"))["max_train_samples"]
    return {
        "cifar10": lambda: pixels(data / "cifar10", None),
        "fashion_mnist": lambda: pixels(data / "fashion_mnist", fashion),
        "modelnet10": lambda: clouds(data / "modelnet10", read_recipe(find_recipe("modelnet10-cpu"))["num_points"]),
        "darcy": lambda: mean_solution(data / "pde", "darcy"),
        "burgers": lambda: mean_solution(data / "pde", "burgers"),
        **{table: lambda: words(data / "glue" / "sst2", 10000) for table in ("sst2", "sst2-pretrained")},
        "wikitext2": lambda: unigrams(data / "wikitext2", read_recipe(find_recipe("wikitext2-cpu"))),
        **{table: lambda task=task: one_class(data / "glue" / task) for table, task in glue.items()},
        "mutag": lambda: graphs(data / "graphs", "mutag"),
        "proteins": lambda: graphs(data / "graphs", "proteins"),
        "easy_vqa": lambda: prior(data / "easy_vqa", True),
        "vqa_rad": lambda: prior(data / "vqa_rad", False),
        "nlvr": lambda: statements(data / "nlvr"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT / "data", help="folder of the data sets")
    args = parser.parse_args()
    path = RESULTS / "trivial.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for table, compute in baselines(args.data).items():
        try:
            label, metrics = compute()
        except (ValueError, FileNotFoundError) as error:
            print(f"{table}: left out, {error}")
            continue
        found[table] = {"label": label, "metrics": {name: float(f"{value:.4g}") for name, value in metrics.items()}}
        print(table, found[table])
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
