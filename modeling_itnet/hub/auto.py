# SPDX-License-Identifier: Apache-2.0
"""Tells Transformers' Auto classes and pipelines what the table of modalities says."""

import transformers
from transformers import AutoConfig, AutoFeatureExtractor, AutoImageProcessor, AutoModel, AutoProcessor
from transformers.image_processing_utils import BaseImageProcessor
from transformers.pipelines import PIPELINE_REGISTRY
from transformers.processing_utils import ProcessorMixin

from configuration_itnet import MODALITIES, ITNetConfig, Modality

from ..modalities import find_heads, load
from ..modeling_itnet import ITNetModel


def register_modality(modality: Modality) -> None:
    """
    Adds a row to the table of modalities. From then on `ITNetConfig(modality=...)`, `ITNetModel`, the Auto classes,
    model cards, exported folders and the commands know it.

    The encoder, the heads and the processor are classes of modules that can be imported by name. An exported model
    takes along these modules and what they import of their own packages: call this function from another module.
    """
    if MODALITIES.get(modality.name, modality) != modality:
        raise ValueError(f"`modality` ({modality.name!r}) is in the table already, with other values")
    for reference in filter(None, (*modality.exported, modality.reader, modality.plot, modality.example)):
        load(reference)  # an error here leaves the table as it was
    MODALITIES[modality.name] = modality
    register_auto_classes()


def processor_classes() -> dict[type, type]:
    """Returns class -> Auto class of every processor. Tokenizers are Transformers' own, which AutoTokenizer knows."""
    bases = {BaseImageProcessor: AutoImageProcessor, ProcessorMixin: AutoProcessor, object: AutoFeatureExtractor}
    processors = [load(row.processor) for row in MODALITIES.values() if row.processor is not None]
    return {cls: next(auto for base, auto in bases.items() if issubclass(cls, base)) for cls in processors}


def register_auto_classes() -> None:
    AutoConfig.register("itnet", ITNetConfig, exist_ok=True)
    AutoModel.register(ITNetConfig, ITNetModel, exist_ok=True)
    by_auto_class: dict[str, list[type]] = {}
    for cls, head, _ in find_heads():
        by_auto_class.setdefault(head.auto_class, []).append(cls)
        task = f"itnet-{head.hub_task}"
        if head.pipeline is not None and task not in PIPELINE_REGISTRY.get_supported_tasks():
            auto_class = getattr(transformers, head.auto_class)
            PIPELINE_REGISTRY.register_pipeline(task, load(head.pipeline), auto_class, type="multimodal")
    for name, classes in by_auto_class.items():
        # Of several classes, Transformers takes the one in `config.architectures`, and by default the first.
        entry = tuple(classes) if len(classes) > 1 else classes[0]
        getattr(transformers, name).register(ITNetConfig, entry, exist_ok=True)
    for processor, auto_class in processor_classes().items():
        if auto_class is AutoImageProcessor:
            auto_class.register(ITNetConfig, image_processor_classes={"pil": processor}, exist_ok=True)
        else:
            # These are found by the name in the checkpoint's files, not by its configuration: a folder of images has
            # no tokenizer, and one of texts no image processor. So the key only has to be unique.
            auto_class.register(processor, processor, exist_ok=True)
