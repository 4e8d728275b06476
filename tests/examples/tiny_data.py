"""Random data in the form of every dataset that the scripts read: a few rows each."""

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import ClassLabel, Dataset, Features, Image, Value
from PIL import Image as PILImage

ROWS = 8
WORDS = ["the", "red", "blue", "green", "circle", "square", "is", "above", "below", "left", "of", "right", "box"]


def write(folder: Path) -> dict[str, Path]:
    """Folder of the data for every script, under ``folder``."""
    random = np.random.default_rng(0)
    makers = {
        "run_image_classification": _images,
        "run_point_cloud": _clouds,
        "run_operator_learning": _fields,
        "run_glue": _glue,
        "run_mlm": _lines,
        "run_clm": _lines,
        "run_vqa": _questions,
        "run_nlvr": _statements,
        "run_graph_classification": _graphs,
    }
    folders = {}
    for script, make in makers.items():
        folders[script] = folder / script
        folders[script].mkdir(parents=True)
        make(folders[script], random)
    return folders


def _picture(random) -> bytes:
    buffer = io.BytesIO()
    PILImage.fromarray(random.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def _sentence(random) -> str:
    return " ".join(random.choice(WORDS, 8))


def _save(rows: dict, folder: Path, features: dict, splits=("train", "test", "validation")) -> None:
    for split in splits:
        Dataset.from_dict(rows, Features(features)).to_parquet(folder / f"{split}.parquet")


def _images(folder, random) -> None:
    rows = {"image": [{"bytes": _picture(random), "path": None} for _ in range(ROWS)], "label": [0, 1] * (ROWS // 2)}
    _save(rows, folder, {"image": Image(), "label": ClassLabel(names=["cat", "dog"])})


def _clouds(folder, random) -> None:
    points = random.normal(size=(ROWS, 40, 3)).astype(np.float32)
    rows = pa.table({"points": points.tolist(), "label": [0, 1] * (ROWS // 2)})
    for split in ("train", "test"):
        pq.write_table(rows, folder / f"{split}.parquet")


def _fields(folder, random) -> None:
    for name, side in (("darcy_train_16", 16), ("darcy_test_16", 16), ("darcy_test_32", 32)):
        x, y = random.normal(size=(2, ROWS, side, side))
        np.savez(folder / f"{name}.npz", x=x > 0, y=y)
    for split in ("train", "test"):
        x, y = random.normal(size=(ROWS, 16)), random.normal(size=(ROWS, 17, 16))
        np.savez(folder / f"burgers_{split}_16.npz", x=x, y=y)


def _glue(folder, random) -> None:
    tasks = {"cola": ["sentence"], "sst2": ["sentence"]}
    tasks |= {task: ["sentence1", "sentence2"] for task in ("mrpc", "stsb", "rte")}
    for task, columns in tasks.items():
        (folder / task).mkdir()
        texts = {column: [_sentence(random) for _ in range(ROWS)] for column in columns}
        is_regression = task == "stsb"
        labels = random.uniform(0, 5, ROWS).tolist() if is_regression else [0, 1] * (ROWS // 2)
        kind = Value("float32") if is_regression else ClassLabel(names=["no", "yes"])
        features = {**dict.fromkeys(columns, Value("string")), "label": kind}
        _save({**texts, "label": labels}, folder / task, features)


def _lines(folder, random) -> None:
    rows = {"text": [" ".join(_sentence(random) for _ in range(4)) for _ in range(10 * ROWS)]}
    _save(rows, folder, {"text": Value("string")})


def _pictures_and_texts(random, text: str) -> tuple[dict, dict]:
    rows = {
        "image": [{"bytes": _picture(random), "path": None} for _ in range(ROWS)],
        text: [_sentence(random) for _ in range(ROWS)],
    }
    return rows, {"image": Image(), text: Value("string")}


def _questions(folder, random) -> None:
    rows, features = _pictures_and_texts(random, "question")
    rows["answer"] = ["red", "blue"] * (ROWS // 2)
    _save(rows, folder, {**features, "answer": Value("string")})


def _statements(folder, random) -> None:
    """Pairs for NLVR2 beside single pictures for NLVR, as one more folder."""
    rows, features = _pictures_and_texts(random, "sentence")
    rows["label"] = [0, 1] * (ROWS // 2)
    features["label"] = ClassLabel(names=["false", "true"])
    _save(rows, folder, features)
    pairs = {("left_image" if name == "image" else name): value for name, value in rows.items()}
    pairs["right_image"] = pairs["left_image"][::-1]
    kinds = {
        "left_image": Image(),
        "right_image": Image(),
        "sentence": features["sentence"],
        "label": features["label"],
    }
    (folder / "pairs").mkdir()
    _save(pairs, folder / "pairs", kinds)


def _graphs(folder, random) -> None:
    for name, has_attributes in (("mutag", False), ("proteins", True)):
        rows = {"edge_index": [], "node_label": [], "y": []}
        if has_attributes:
            rows["node_attr"] = []
        for index in range(2 * ROWS):
            count = int(random.integers(4, 8))
            path = np.stack([np.arange(count - 1), np.arange(1, count)])
            rows["edge_index"].append(np.concatenate([path, path[::-1]], axis=1).tolist())
            rows["node_label"].append(random.integers(0, 3, count).tolist())
            rows["y"].append(index % 2)
            if has_attributes:
                rows["node_attr"].append(random.normal(size=count).tolist())
        pq.write_table(pa.table(rows), folder / f"{name}.parquet")
