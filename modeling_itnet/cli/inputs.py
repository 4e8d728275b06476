# SPDX-License-Identifier: Apache-2.0
"""Reads what commands are given: presets, checkpoint folders, and files that become forward arguments."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoProcessor, AutoTokenizer
from transformers import PreTrainedTokenizerBase as Tokenizer

from configuration_itnet import ITNetConfig, find_modality

from ..modalities import find_heads, load
from ..modeling_itnet import ITNetModel, ITNetPreTrainedModel
from ..processing import read_points

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")
TEXT_SUFFIXES = (".txt", ".md")
ARRAY_SUFFIXES = (".npy", ".xyz", ".csv", ".txt")
MESH_SUFFIXES = (".off", ".ply")


def load_config(name: str, **overrides) -> ITNetConfig:
    """Returns the configuration of a preset, by its name, or of a checkpoint folder."""
    if not Path(name).is_dir():
        return ITNetConfig.from_preset(name, **overrides)
    config = checkpoint_config(Path(name))
    if overrides:
        raise ValueError(
            f"{', '.join(overrides)} cannot be changed: {name} is a checkpoint with its own configuration"
        )
    return config


def checkpoint_config(folder: Path) -> ITNetConfig:
    """Returns the configuration of a checkpoint folder."""
    if not folder.is_dir():
        raise ValueError(f"no such checkpoint folder: {folder}")
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is no checkpoint: it has no config.json")
    return ITNetConfig.from_pretrained(folder)


def model_class(config: ITNetConfig) -> type[ITNetPreTrainedModel]:
    """Returns the class that a model was saved in; the bare model for a preset."""
    classes = {cls.__name__: cls for cls in (ITNetModel, *(cls for cls, _, _ in find_heads()))}
    name = (config.architectures or ["ITNetModel"])[0]
    if name not in classes:
        raise ValueError(f"the checkpoint was saved as {name}, which is none of {', '.join(classes)}")
    return classes[name]


def load_model(folder: Path) -> ITNetPreTrainedModel:
    """Returns the model of a checkpoint folder, in the class that it was saved in."""
    return model_class(checkpoint_config(folder)).from_pretrained(folder).eval()


def read_processors(checkpoint: Path) -> list:
    """Returns the processors that a folder holds, if any."""
    if (checkpoint / "processor_config.json").exists():
        return [AutoProcessor.from_pretrained(checkpoint)]
    found = []
    if (checkpoint / "preprocessor_config.json").exists():
        text = (checkpoint / "preprocessor_config.json").read_text(encoding="utf-8")
        found.append(AutoImageProcessor if "image_processor_type" in text else AutoFeatureExtractor)
    if (checkpoint / "tokenizer_config.json").exists():
        found.append(AutoTokenizer)
    return [auto_class.from_pretrained(checkpoint) for auto_class in found]


def find_tokenizer(processors: list) -> Tokenizer | None:
    """Returns the tokenizer that is one of the processors, or a part of one."""
    found = (part if isinstance(part, Tokenizer) else getattr(part, "tokenizer", None) for part in processors)
    return next((tokenizer for tokenizer in found if tokenizer is not None), None)


def read_tokenizer(checkpoint: Path) -> Tokenizer:
    """Returns the tokenizer that a folder holds."""
    tokenizer = find_tokenizer(read_processors(checkpoint))
    if tokenizer is None:
        raise ValueError(f"{checkpoint} has no tokenizer; `tokenizer.save_pretrained(folder)` adds one")
    return tokenizer


def read_inputs(
    checkpoint: Path, config: ITNetConfig, paths: list[Path], limit: int, batch_size: int
) -> list[dict[str, Tensor]]:
    """
    Reads batches of forward arguments.

    - Images: files, folders of files, or the column `image` of parquet files.
    - Texts: files with one text per line, or the column `text` of parquet files.
    - Point clouds: `.npy`, `.xyz`, `.csv` or `.txt` files of `[n, 3]` each; the vertices of `.off` and `.ply` files.
    - Any modality: `.npz` files, each one batch of named forward arguments.
    """
    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        raise ValueError(f"no such file or folder: {', '.join(missing)}")
    if all(path.suffix == ".npz" for path in paths):
        arrays = [np.load(path, allow_pickle=False) for path in paths]
        return [{name: torch.from_numpy(value) for name, value in batch.items()} for batch in arrays]
    reader = find_modality(config.modality).reader
    if reader is None:
        raise ValueError(f"`modality` ({config.modality!r}) is read from .npz files of forward arguments only")
    processors = read_processors(checkpoint)
    if not processors:
        raise ValueError(f"{checkpoint} has no processor or tokenizer; save one there, or give .npz files")
    items = [item for path in paths for item in load(reader)(path)][:limit]
    if not items:
        raise ValueError(f"there is nothing for `modality` ({config.modality!r}) in {', '.join(map(str, paths))}")
    return [process(processors[0], config, items[i : i + batch_size]) for i in range(0, len(items), batch_size)]


def process(processor, config: ITNetConfig, items: list) -> dict[str, Tensor]:
    """Makes one batch of forward arguments out of what a reader has read."""
    if isinstance(processor, Tokenizer):
        limits = {"truncation": True, "max_length": config.max_position_embeddings}
        batch = processor(items, padding=True, return_tensors="pt", **limits)
        return {name: batch[name] for name in ("input_ids", "attention_mask")}
    return dict(processor(items, return_tensors="pt"))


def process_pairs(processors: list, images: list, texts: list[str]) -> dict[str, Tensor]:
    """Makes one batch of forward arguments out of images, or groups of them, and their texts."""
    if not processors:
        raise ValueError("image and text need a processor, and the checkpoint has none; give .npz files")
    return dict(processors[0](images=images, text=texts, return_tensors="pt"))


def is_text(source: str) -> bool:
    """Says whether an argument is a text itself, and not the name of a file with texts."""
    if Path(source).is_file():
        return False
    if len(source.split()) == 1 and Path(source).suffix in (*TEXT_SUFFIXES, ".parquet", ".npz"):
        raise ValueError(f"no such file: {source}")
    return True


def read_images(path: Path) -> list[Image.Image]:
    if path.suffix == ".parquet":
        return _column(path, "image")
    return [Image.open(file) for file in _files(path, IMAGE_SUFFIXES)]


def read_texts(path: Path) -> list[str]:
    if path.suffix == ".parquet":
        return _column(path, "text")
    lines = [line for file in _files(path, TEXT_SUFFIXES) for line in file.read_text(encoding="utf-8").splitlines()]
    return [line.strip() for line in lines if line.strip()]


def read_clouds(path: Path) -> list[np.ndarray]:
    if path.is_dir():
        return [cloud for file in _files(path, ARRAY_SUFFIXES + MESH_SUFFIXES) for cloud in read_clouds(file)]
    suffix = path.suffix.lower()
    if suffix in MESH_SUFFIXES:
        return [read_points(path)]
    if suffix not in ARRAY_SUFFIXES:
        raise ValueError(
            f"no point cloud can be read from {path}: it must be one of {', '.join(ARRAY_SUFFIXES)} with rows of "
            f"x, y, z, or one of {', '.join(MESH_SUFFIXES)}"
        )
    if suffix == ".npy":
        values = np.load(path, allow_pickle=False)
        return list(values) if values.ndim == 3 else [values]
    try:
        return [np.loadtxt(path, delimiter="," if suffix == ".csv" else None, ndmin=2)[:, :3]]
    except ValueError as error:
        raise ValueError(f"{path} must hold one point per line, as numbers: {error}") from error


def _files(path: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Returns a file itself; of a folder, the files in it and below that have one of the suffixes."""
    return sorted(f for f in path.rglob("*") if f.suffix.lower() in suffixes) if path.is_dir() else [path]


def _column(path: Path, name: str) -> list:
    try:
        from datasets import Dataset
    except ImportError as error:
        raise ImportError("Reading parquet files needs datasets: pip install datasets") from error
    data = Dataset.from_parquet(str(path))
    if name not in data.column_names:
        raise ValueError(f"{path} has no column {name!r}, only {', '.join(data.column_names)}")
    return list(data[name])
