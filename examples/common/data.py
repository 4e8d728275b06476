"""Datasets from local files or from the Hub: rows, columns and labels.

A folder holds one file per split, <split>.parquet, .csv, .json, .jsonl or .txt, or one folder of images per split,
<split>/<class>/*.png. A single file, or a folder of classes without splits, is all training rows: --holdout says which
of them to evaluate on.
"""

import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
from datasets import ClassLabel, Dataset, Image, Value, concatenate_datasets, load_dataset

from modeling_itnet.training.recipes import ROOT

from .arguments import DataArguments

READERS = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json", ".txt": "text"}
PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
# What examples/data/download.py gets.
DOWNLOADS = ("fashion_mnist", "cifar10", "glue", "wikitext2", "gutenberg", "vqa_rad", "easy_vqa", "nlvr")
DOWNLOADS += ("modelnet10", "modelnet40", "graphs", "pde", "meshes")
# What recipes name -> what of it the repository holds.
BUNDLED = {"data/fashion_mnist": "examples/data/fashion_mnist_small"}


def find_data(name: str) -> Path | None:
    """Returns folder or file of a dataset, in the working folder or in the repository; None for what may be a Hub id.

    What recipes call data/<name> is not part of the repository: a smaller bundled version stands in for it, if there
    is one, and otherwise the error says how to get it.
    """
    folder = name.replace("\\", "/").rstrip("/")
    for path in (Path(name), ROOT / folder):
        if path.exists():
            return path
    if folder in BUNDLED:
        print(f"{folder} is not there: the bundled {BUNDLED[folder]} is used instead", file=sys.stderr)
        return ROOT / BUNDLED[folder]
    if folder.startswith("data/"):
        known = folder.split("/")[1]
        if known in DOWNLOADS:
            raise ValueError(f"no data in {folder}: get them with `python examples/data/download.py {known}`")
        raise ValueError(f"no data in {folder}: the recipe says at its top which files it needs there")
    is_path = folder.startswith((".", "/", "~")) or Path(folder).suffix in READERS
    if is_path or any(part.count("/") > 1 for part in folder.split("+")):
        raise ValueError(f"`dataset` ({name!r}) is no file or folder, and cannot be the id of a Hub dataset")
    return None


def splits_in(folder: Path) -> dict[str, Path]:
    """Returns name of a split -> its file or its folder of images."""
    found = {path.stem: path for path in sorted(folder.iterdir()) if path.suffix in READERS}
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name not in found and _has_pictures(path):
            found[path.name] = path
    return found


def _has_pictures(folder: Path) -> bool:
    return any(path.suffix.lower() in PICTURES for path in folder.rglob("*"))


def _is_class_folder(folder: Path) -> bool:
    """Says whether a folder is <class>/*.png, with the pictures directly inside."""
    return any(path.suffix.lower() in PICTURES for path in folder.iterdir())


def load_split(data: DataArguments, split: str, limit: int | None = None) -> Dataset:
    """Loads one split, or its first ``limit`` rows. Names of Hub datasets joined by + are read one after the other."""
    path = find_data(data.dataset)
    rows = _from_hub(data, split) if path is None else _from_files(path, data, split)
    if not len(rows):
        raise ValueError(f"split {split!r} of {data.dataset} is empty")
    return rows if limit is None else rows.select(range(min(limit, len(rows))))


def _from_files(path: Path, data: DataArguments, split: str) -> Dataset:
    splits = splits_in(path) if path.is_dir() else {data.train_split: path}
    if path.is_dir() and splits and all(found.is_dir() and _is_class_folder(found) for found in splits.values()):
        splits = {data.train_split: path}  # classes, not splits
    if split not in splits:
        advice = f"; --{'train' if split == data.train_split else 'eval'}_split names one of them" if splits else ""
        if split != data.train_split:
            advice += "; --holdout 0.1 evaluates on a tenth of the training rows"
        if not splits:
            advice = f"; it needs {split}.parquet, .csv, .json, .jsonl or .txt, or {split}/<class>/ with images"
        raise ValueError(f"no split {split!r} in {path}: there are {sorted(splits)}{advice}")
    source = splits[split]
    if source.is_dir():
        return load_dataset("imagefolder", data_files=f"{source.as_posix()}/**", split="train", drop_labels=False)
    if source.suffix not in READERS:
        raise ValueError(f"`dataset` ({source}) must end in one of {', '.join(READERS)}")
    return load_dataset(READERS[source.suffix], data_files=str(source), split="train")


def _from_hub(data: DataArguments, split: str) -> Dataset:
    names = data.dataset.split("+")
    configs = data.dataset_config.split("+") if data.dataset_config else [None] * len(names)
    if len(configs) != len(names):
        raise ValueError(f"`dataset_config` ({data.dataset_config!r}) must name one per dataset, joined by +")
    try:
        parts = [load_dataset(name, config or None, split=split) for name, config in zip(names, configs, strict=True)]
    except (FileNotFoundError, ConnectionError) as error:
        raise ValueError(
            f"`dataset` ({data.dataset!r}) is no file or folder here, and the Hub does not give it: {error}"
        ) from error
    common = [name for name in parts[0].column_names if all(name in part.column_names for part in parts)]
    return concatenate_datasets([part.select_columns(common) for part in parts])


def load_train_and_eval(data: DataArguments) -> tuple[Dataset, Dataset]:
    train = load_split(data, data.train_split, data.max_train_samples)
    if data.holdout:
        column = getattr(data, "label_column", None) or "label"
        if column in train.column_names and _is_sorted(train[column]):
            train = train.shuffle(seed=0)  # class after class, as folders of classes come: the last are of one class
        kept, held_out = held_out_rows(len(train), data.holdout)
        return train.select(kept), train.select(held_out[: data.max_eval_samples])
    return train, load_split(data, data.eval_split, data.max_eval_samples)


def _is_sorted(values) -> bool:
    values = list(values)
    if len(set(values)) < 2 or any(value is None for value in values):
        return False
    changes = sum(first != second for first, second in pairwise(values))
    return changes == len(set(values)) - 1


def held_out_rows(count: int, share: float) -> tuple[range, range]:
    """Returns the rows to train on and, the last ``share`` of them, those to evaluate on instead of the test."""
    kept = count - round(share * count)
    if not 0 < kept < count:
        raise ValueError(f"`holdout` ({share}) must leave some of the {count} training rows for either use")
    return range(kept), range(kept, count)


def evaluated_rows(data: DataArguments) -> str:
    """Returns which rows a score is of: a split, or the held-out part of the training rows."""
    return f"last {data.holdout:.0%} of {data.train_split}" if data.holdout else data.eval_split


def find_column(rows: Dataset, option: str, given: str | None, *candidates: str) -> str:
    """Returns the column that an option names or, without it, the first of its usual names in the data."""
    names = (given,) if given is not None else candidates
    found = next((name for name in names if name in rows.column_names), None)
    if found is None:
        wanted = repr(given) if given is not None else f"one of {', '.join(candidates)}"
        raise ValueError(f"`{option}`: the data have no column {wanted}; they have {', '.join(rows.column_names)}")
    return found


def encode_labels(train: Dataset, test: Dataset, column: str) -> tuple[Dataset, Dataset, list[str]]:
    """Returns both sets with classes as numbers, and the names of these, by the training rows.

    Classes may be given as names (strings or booleans), as numbers 0, 1, ..., or as a `ClassLabel`. The evaluation
    rows are matched by name, so that a class which they lack changes nothing; one that only they have is an error.
    """
    values = {name: _label_texts(rows, column) for name, rows in (("training", train), ("evaluation", test))}
    feature = train.features[column]
    if isinstance(feature, ClassLabel):
        names = list(feature.names)
    elif feature.dtype.startswith(("int", "uint")):
        names = [str(number) for number in range(max(map(int, values["training"])) + 1)]
    else:
        names = sorted(set(values["training"]))
    unknown = sorted(set(values["evaluation"]) - set(names))
    if unknown:
        raise ValueError(
            f"column `{column}` of the evaluation rows has classes {unknown[:5]} that are not among those of the "
            f"training rows: {names[:10]}"
        )
    known = {name: number for number, name in enumerate(names)}
    encoded = []
    for texts, rows in zip(values.values(), (train, test), strict=True):
        numbers = [known[text] for text in texts]
        if numbers != list(rows.with_format(None)[column][:]):  # rewriting is slow where rows hold images
            rows = rows.remove_columns(column).add_column(column, numbers, feature=ClassLabel(names=names))
        encoded.append(rows)
    return encoded[0], encoded[1], names


def _label_texts(rows: Dataset, column: str) -> list[str]:
    """Returns every label as a string, a `ClassLabel` by its name."""
    feature = rows.features[column]
    values = rows.with_format(None)[column][:]
    if any(value is None for value in values):
        raise ValueError(f"column `{column}` has no label in row {next(i for i, v in enumerate(values) if v is None)}")
    if isinstance(feature, ClassLabel):
        if min(values) < 0:
            raise ValueError(f"column `{column}` has the label -1: the rows of this split are unlabelled")
        return [feature.names[value] for value in values]
    if not isinstance(feature, Value) or feature.dtype.startswith("float"):
        raise ValueError(f"column `{column}` ({feature}) must hold classes: names or whole numbers")
    if feature.dtype.startswith(("int", "uint")) and min(values) < 0:
        raise ValueError(f"column `{column}` must hold numbers of classes from 0 on, but has {min(values)}")
    return [str(value) for value in values]


def check_texts(rows: Dataset, *columns: str) -> None:
    """Raises unless every row has a text in each column."""
    for column in columns:
        for number, text in enumerate(rows[column]):
            if not isinstance(text, str):
                raise ValueError(f"column `{column}` must hold texts, but row {number} has {text!r}")


def check_images(rows: Dataset, column: str) -> Dataset:
    """Returns rows whose column decodes to images: strings are the paths of image files."""
    feature = rows.features[column]
    if isinstance(feature, Value) and feature.dtype in ("string", "large_string"):
        return rows.cast_column(column, Image())
    if not isinstance(feature, Image):
        raise ValueError(f"column `{column}` ({feature}) must hold images, or the paths of image files")
    return rows


def check_numbers(rows: Dataset, column: str) -> None:
    """Raises unless every row has a finite number."""
    values = rows.with_format(None)[column][:]
    if not all(isinstance(value, (int, float)) and np.isfinite(value) for value in values):
        raise ValueError(f"column `{column}` must hold one finite number per row")


def label_names(names: list[str]) -> dict[str, dict]:
    """Returns what a configuration wants to know about classes."""
    return {"id2label": dict(enumerate(names)), "label2id": {name: index for index, name in enumerate(names)}}
