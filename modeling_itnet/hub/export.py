# SPDX-License-Identifier: Apache-2.0
"""Writes folders that load anywhere: weights, configuration, processor, card, and the code that they need."""

import json
import os
import tempfile
from pathlib import Path

from huggingface_hub import create_repo

from configuration_itnet import Head, ITNetConfig, find_modality

from ..modalities import load
from ..modeling_itnet import ITNetModel, ITNetPreTrainedModel
from .auto import processor_classes
from .card import model_card
from .flatten import flat_reference, write_flat_sources

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
        processor: A processor, an image processor, a tokenizer, or a list of them.
        card (`ModelCard`, *optional*): Becomes `README.md`. By default one is made, unless there is one already.
        is_main_process, args, kwargs: As in `save_pretrained`.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, is_main_process, *args, with_code=True, processor=processor, **kwargs)
    if card is not None and is_main_process:
        card.save(folder / "README.md")
    return folder


def add_code(model: ITNetPreTrainedModel, folder: Path) -> None:
    """
    Adds the code that the saved files of a folder need, says in them where it is, and adds a card if there is none.

    The code is that of the configuration, the encoder, the bare model, the processors in the folder, and the model's
    head, with the other heads in its file. A bare model takes all heads of its modality along, to be trained with one.
    """
    heads = _exported_heads(find_modality(model.config.modality).heads, type(model))
    models = {"AutoConfig": ITNetConfig, "AutoModel": ITNetModel} | {h.auto_class: load(h.model) for h in heads}
    entries = {"auto_map": {auto_class: flat_reference(cls) for auto_class, cls in models.items()}}
    pipelines = {f"itnet-{head.hub_task}": head for head in heads if head.pipeline and load(head.model) is type(model)}
    if pipelines:  # Transformers has no task for these: the folder brings its own
        entries["custom_pipelines"] = {
            task: {"impl": flat_reference(load(head.pipeline)), "pt": [head.auto_class], "type": "multimodal"}
            for task, head in pipelines.items()
        }
    _edit_json(folder / "config.json", lambda values: values.update(entries))
    processors: set[type] = set()
    for name in _PROCESSOR_FILES:
        if (folder / name).exists():
            _edit_json(folder / name, lambda values: processors.update(_map_processors(values)))
    code = [*models.values(), *processors, *(load(head.pipeline) for head in pipelines.values())]
    write_flat_sources(folder, model.config, *code)
    if not (folder / "README.md").exists():
        model_card(folder.resolve().name, model.config, type(model)).save(folder / "README.md")


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


def _exported_heads(heads: tuple[Head, ...], model_class: type) -> list[Head]:
    """Returns the heads in the file of the model's own head; all of them for a bare model."""
    files = {head.model.split(":")[0] for head in heads if issubclass(model_class, load(head.model))}
    return [head for head in heads if not files or head.model.split(":")[0] in files]


def _map_processors(values: dict) -> set[type]:
    """Adds ``auto_map`` to the description of a processor and of those inside it; returns their classes."""
    names = {values.get(key) for key in ("processor_class", "image_processor_type", "feature_extractor_type")}
    found = set()
    for cls, auto_class in processor_classes().items():
        if cls.__name__ in names:
            values["auto_map"] = {auto_class.__name__: flat_reference(cls)}
            found.add(cls)
    return found.union(*(_map_processors(value) for value in list(values.values()) if isinstance(value, dict)))


def _edit_json(path: Path, edit) -> None:
    values = json.loads(path.read_text(encoding="utf-8"))
    edit(values)
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
