"""Datasets from local parquet files or from the Hub."""

from pathlib import Path

from datasets import Dataset, concatenate_datasets, load_dataset

from .arguments import DataArguments


def load_split(data: DataArguments, split: str, limit: int | None = None) -> Dataset:
    """One split, or its first ``limit`` rows. Names of Hub datasets joined by + are read one after the other."""
    folder = Path(data.dataset)
    if folder.is_dir():
        path = folder / f"{split}.parquet"
        if not path.is_file():
            found = sorted(file.stem for file in folder.glob("*.parquet"))
            raise ValueError(f"no split {split!r} in {folder}: there are {found}")
        rows = load_dataset("parquet", data_files=str(path), split="train")
    else:
        names = data.dataset.split("+")
        configs = (data.dataset_config or "").split("+") if data.dataset_config else [None] * len(names)
        if len(configs) != len(names):
            raise ValueError(f"`dataset_config` ({data.dataset_config!r}) must name one per dataset, joined by +")
        parts = [load_dataset(name, config or None, split=split) for name, config in zip(names, configs, strict=True)]
        common = [name for name in parts[0].column_names if all(name in part.column_names for part in parts)]
        rows = concatenate_datasets([part.select_columns(common) for part in parts])
    return rows if limit is None else rows.select(range(min(limit, len(rows))))


def load_train_and_eval(data: DataArguments) -> tuple[Dataset, Dataset]:
    train = load_split(data, data.train_split, data.max_train_samples)
    if data.holdout:
        kept, held_out = held_out_rows(len(train), data.holdout)
        return train.select(kept), train.select(held_out[: data.max_eval_samples])
    return train, load_split(data, data.eval_split, data.max_eval_samples)


def held_out_rows(count: int, share: float) -> tuple[range, range]:
    """Numbers of the rows to train on and, the last ``share`` of them, of those to evaluate on instead of the test."""
    kept = count - round(share * count)
    if not 0 < kept < count:
        raise ValueError(f"`holdout` ({share}) must leave some of the {count} training rows for either use")
    return range(kept), range(kept, count)


def class_names(rows: Dataset, column: str) -> list[str]:
    """Names of the classes of a column; numbers where the data have no names."""
    feature = rows.features[column]
    if hasattr(feature, "names"):
        return list(feature.names)
    return [str(index) for index in range(max(rows[column]) + 1)]


def label_names(names: list[str]) -> dict[str, dict]:
    """What a configuration wants to know about classes."""
    return {"id2label": dict(enumerate(names)), "label2id": {name: index for index, name in enumerate(names)}}


def first_column(rows: Dataset, *candidates: str) -> str:
    """The name of a column that datasets call differently."""
    found = next((name for name in candidates if name in rows.column_names), None)
    if found is None:
        raise ValueError(f"the data need a column named one of {candidates}, but have {rows.column_names}")
    return found
