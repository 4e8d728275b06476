# SPDX-License-Identifier: Apache-2.0
"""Folders that load anywhere: weights, configuration, processor, card, and the code that they need."""

import json
import os
import tempfile
from pathlib import Path

from huggingface_hub import create_repo

from configuration_itnet import ITNetConfig

from ..heads.multimodal import ITNetForVisualQuestionAnswering
from ..modeling_itnet import ITNetPreTrainedModel
from .auto import AUTO_MODELS, AUTO_PROCESSORS, model_classes
from .card import model_card
from .flatten import flat_reference, write_flat_sources
from .pipelines import TASK, ITNetVisualQuestionAnsweringPipeline

# All that a folder can be asked for. Every folder gets the same code, whatever its modality.
_CLASSES = (
    ITNetConfig,
    *(cls for classes in AUTO_MODELS.values() for cls in classes.values()),
    *(cls for classes in AUTO_PROCESSORS.values() for cls in classes),
    ITNetVisualQuestionAnsweringPipeline,
)
# Transformers has no task for these models: the folder brings its own, for `pipeline(..., trust_remote_code=True)`.
_CUSTOM_PIPELINES = {
    TASK: {
        "impl": flat_reference(ITNetVisualQuestionAnsweringPipeline),
        "pt": ["AutoModelForVisualQuestionAnswering"],
        "type": "multimodal",
    }
}
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")


def export_to_hub_folder(
    model: ITNetPreTrainedModel,
    folder: str | os.PathLike,
    processor=None,
    is_main_process: bool = True,
    *args,
    card=None,
    **kwargs,
) -> Path:
    """
    Writes a folder that `AutoModel.from_pretrained(folder, trust_remote_code=True)` loads where this package is not
    installed; torch and transformers are enough. Upload it as it is.

    Args:
        model: Any ITNet model.
        folder: Where to; made if need be.
        processor: A processor, an image processor, a tokenizer, or a list of them.
        is_main_process (`bool`, *optional*, defaults to `True`):
            As in `save_pretrained`: of several processes, one writes.
        card (`ModelCard`, *optional*): Becomes `README.md`. By default one is made, unless there is one already.
        kwargs: Further arguments of `save_pretrained`, such as `max_shard_size`.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config
    entries = {"auto_map": auto_map(config)}
    if isinstance(model, ITNetForVisualQuestionAnswering):
        entries["custom_pipelines"] = _CUSTOM_PIPELINES
    before = {name: getattr(config, name) for name in entries if hasattr(config, name)}
    try:
        for name, value in entries.items():
            setattr(config, name, value)
        model.save_pretrained(folder, is_main_process, *args, with_code=False, **kwargs)
    finally:
        for name in entries:
            delattr(config, name)
        for name, value in before.items():
            setattr(config, name, value)
    if not is_main_process:
        return folder
    for part in processor if isinstance(processor, (list, tuple)) else [processor]:
        if part is not None:
            part.save_pretrained(folder)
    write_code(folder)
    if card is None and not (folder / "README.md").exists():
        card = model_card(folder.resolve().name, config, type(model))
    if card is not None:
        card.save(folder / "README.md")
    return folder


def auto_map(config: ITNetConfig) -> dict[str, str]:
    """Every Auto class -> "file.Class", for `config.json`."""
    classes = {"AutoConfig": ITNetConfig} | model_classes(config)
    return {auto_class: flat_reference(cls) for auto_class, cls in classes.items()}


def write_code(folder: Path) -> None:
    """Adds the flat modules to a folder of saved files, and tells its processors where their code is."""
    write_flat_sources(folder, *_CLASSES)
    for name in _PROCESSOR_FILES:
        path = folder / name
        if path.exists():
            values = json.loads(path.read_text(encoding="utf-8"))
            _add_processor_maps(values)
            path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def push_with_code(model: ITNetPreTrainedModel, repo_id: str, processor=None, **kwargs) -> str:
    """Uploads what :func:`export_to_hub_folder` writes; ``kwargs`` are those of `push_to_hub`."""
    settings = {name: kwargs.pop(name) for name in ("max_shard_size",) if name in kwargs}
    private, tags = kwargs.pop("private", None), kwargs.pop("tags", None)
    repo_id = create_repo(repo_id, private=private, token=kwargs.get("token"), exist_ok=True).repo_id
    card = model_card(repo_id, model.config, type(model))
    card.data.tags = [*card.data.tags, *([tags] if isinstance(tags, str) else tags or [])]
    with tempfile.TemporaryDirectory() as folder:
        export_to_hub_folder(model, folder, processor, card=card, **settings)
        return model._upload_modified_files(folder, repo_id, files_timestamps={}, **kwargs)


def _add_processor_maps(values: dict) -> None:
    """Adds ``auto_map`` to the description of a processor and of those inside it, which name their own class."""
    names = {values.get(key) for key in ("processor_class", "image_processor_type", "feature_extractor_type")}
    for auto_class, classes in AUTO_PROCESSORS.items():
        for cls in classes:
            if cls.__name__ in names:
                values["auto_map"] = {auto_class.__name__: flat_reference(cls)}
    for value in list(values.values()):
        if isinstance(value, dict):
            _add_processor_maps(value)
