# Copyright 2026 The ITNet Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""New checkpoints: seeded weights, configuration, processor, tokenizer and card in one folder."""

import os
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from configuration_itnet import ITNetConfig

from ..auto import AUTO_MODELS
from ..modeling_itnet import ITNetModel, ITNetPreTrainedModel
from ..processing import ITNetGraphProcessor, ITNetImageProcessor, ITNetPointCloudProcessor, ITNetProcessor
from .card import model_card
from .export import export_to_hub_folder

# [PAD] is number 0, as `ITNetConfig.pad_token_id` says.
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def task_classes() -> dict[str, tuple[type[ITNetPreTrainedModel], str]]:
    """Name of a task -> the class of its head, and the modality that it reads."""
    return {
        _task_name(cls): (cls, modality)
        for classes in AUTO_MODELS.values()
        for modality, cls in classes.items()
        if cls is not ITNetModel
    }


def create_checkpoint(
    preset: str,
    folder: str | os.PathLike,
    *,
    task: str | None = None,
    modality: str | None = None,
    seed: int = 0,
    tokenizer: str | None = None,
    texts: Sequence[str | os.PathLike] = (),
    **overrides,
) -> ITNetPreTrainedModel:
    """
    Writes a new, untrained model of a preset's size to a folder, with its code, and returns it.

    Args:
        preset: A name of `configuration_itnet.preset_names()`.
        folder: Where to.
        task: Which head, a key of :func:`task_classes`; None is the bare model.
        modality: What it reads; None is the task's, or else the preset's own.
        seed: Of the weights: the same seed gives the same file.
        tokenizer: A tokenizer to use, a folder or a Hub id.
        texts: Text files to train a tokenizer of `vocab_size` tokens on. With neither, tokens are bytes.
        overrides: Further arguments of `ITNetConfig`.
    """
    known = {field.name for field in fields(ITNetConfig)} | {"num_labels"}
    unknown = sorted(overrides.keys() - known)
    if unknown:
        raise ValueError(f"ITNetConfig has no argument {', '.join(unknown)}")
    tasks = task_classes()
    if task is not None and task not in tasks:
        raise ValueError(f"unknown task {task!r}; available: {', '.join(tasks)}")
    model_class, needed = (ITNetModel, modality) if task is None else tasks[task]
    modality = modality or needed
    if modality is not None:
        overrides["modality"] = modality
    config = ITNetConfig.from_preset(preset, **overrides)
    config, processor = _with_processor(config, tokenizer, texts)
    torch.manual_seed(seed)
    model = model_class(config)
    card = model_card(Path(folder).resolve().name, config, model_class, is_random=True)
    export_to_hub_folder(model, folder, processor, card=card)
    return model


def _with_processor(config: ITNetConfig, tokenizer: str | None, texts: Sequence) -> tuple[ITNetConfig, object]:
    """The processor of a configuration, and the configuration with the vocabulary of its tokenizer."""
    words = None
    if config.modality in ("text", "multimodal"):
        if tokenizer is not None:
            words = AutoTokenizer.from_pretrained(tokenizer)
        else:
            words = make_tokenizer(texts, config.vocab_size, config.max_position_embeddings)
        config.vocab_size, config.pad_token_id = len(words), words.pad_token_id
    elif tokenizer is not None or texts:
        raise ValueError(f"a tokenizer does not go with `modality` ({config.modality!r}); only text has one")
    if config.modality == "text":
        return config, words
    if config.modality == "image":
        return config, ITNetImageProcessor.from_model_config(config)
    if config.modality == "multimodal":
        return config, ITNetProcessor(ITNetImageProcessor.from_model_config(config), words)
    if config.modality == "point_cloud":
        return config, ITNetPointCloudProcessor()
    if config.modality == "graph":
        return config, ITNetGraphProcessor(num_positions=config.position_dim)
    return config, None


def make_tokenizer(texts: Sequence[str | os.PathLike], vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that knows every text: trained on files, or with one token per byte without any."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if texts:
        missing = [str(path) for path in texts if not Path(path).is_file()]
        if missing:
            raise ValueError(f"no such text file: {', '.join(missing)}")
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=alphabet, show_progress=False
        )
        backend.train([str(path) for path in texts], trainer)
    ends = [(token, backend.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    names = {f"{token[1:-1].lower()}_token": token for token in SPECIAL_TOKENS}
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=max_length, **names)


def _task_name(cls: type) -> str:
    """ITNetForImageClassification -> image-classification."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", cls.__name__.removeprefix("ITNetFor")).lower()
