# SPDX-License-Identifier: Apache-2.0
"""Makes new checkpoints: seeded weights, configuration, processor, tokenizer and card in one folder."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from configuration_itnet import MODALITIES, ITNetConfig, Modality, find_modality, find_task, task_settings

from ..modalities import load
from ..modeling_itnet import ITNetModel, ITNetPreTrainedModel
from .card import model_card
from .export import export_to_hub_folder

# [PAD] is number 0, as `ITNetConfig.pad_token_id` says.
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# Of a causal model. One token ends a text and so comes before the next one, where texts follow each other.
END_OF_TEXT = "<|endoftext|>"


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
        task: The head, by our name of its task or the Hub's; None, or feature-extraction, is the bare model.
        modality: What the model reads; None is the task's, or else the preset's own.
        seed: The same seed gives the same weights.
        tokenizer: A tokenizer to use, as a folder or a Hub id.
        texts: Text files to train a tokenizer of `vocab_size` tokens on. With neither, tokens are bytes.
        overrides: Further arguments of `ITNetConfig`, in place of what the preset and the task say.
    """
    model_class, bare_tasks = ITNetModel, {row.bare_task: {"modality": row.name} for row in MODALITIES.values()}
    bare_tasks |= {None: {}, Modality.bare_task: {}}  # which most modalities have
    if task in bare_tasks:
        settings = bare_tasks[task]
    else:
        model_class, settings = load(find_task(task)[0].model), task_settings(task)
    overrides |= {} if modality is None else {"modality": modality}
    config = ITNetConfig.from_preset(preset, **settings | overrides)
    processor = _make_processor(config, tokenizer, texts)
    torch.manual_seed(seed)
    model = model_class(config)
    card = model_card(Path(folder).resolve().name, config, model_class, is_random=True)
    export_to_hub_folder(model, folder, processor, card=card)
    return model


def _make_processor(config: ITNetConfig, tokenizer: str | None, texts: Sequence):
    """Returns the processor of a configuration, if it has one, whose vocabulary the configuration gets."""
    row = find_modality(config.modality)
    maker = None if row.processor is None else load(row.processor).from_model_config
    if not row.has_tokens:
        if tokenizer is not None or texts:
            names = " and ".join(repr(other.name) for other in MODALITIES.values() if other.has_tokens)
            raise ValueError(f"`modality` ({row.name!r}) has no tokenizer; only {names} have one")
        return None if maker is None else maker(config)
    if tokenizer is not None and texts:
        raise ValueError("`tokenizer` names a tokenizer and `texts` train one: give one of the two")
    if tokenizer is None:
        limits = config.vocab_size, config.max_position_embeddings
        tokenizer = make_tokenizer(texts, *limits, is_causal=config.is_causal)
    else:
        side = {"padding_side": "left"} if config.is_causal else {}  # padding must not come before what is added
        tokenizer = _load_tokenizer(tokenizer, **side)
        if config.is_causal:
            _leave_open(tokenizer)
    config.vocab_size, config.pad_token_id = len(tokenizer), tokenizer.pad_token_id
    if config.is_causal:
        config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, _end_of(tokenizer)
    return tokenizer if maker is None else maker(config, tokenizer)


def _end_of(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Returns the token that ends a text."""
    return tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id


def _leave_open(tokenizer: PreTrainedTokenizerBase) -> None:
    """Stops a tokenizer from ending a text, which a causal model is to continue."""
    ids, plain = tokenizer("a")["input_ids"], tokenizer("a", add_special_tokens=False)["input_ids"]
    if ids[-1:] != [_end_of(tokenizer)] or plain[-1:] == ids[-1:]:
        return
    if not tokenizer.is_fast:
        raise ValueError(
            f"`tokenizer` ({type(tokenizer).__name__}) ends every text with {tokenizer.decode(ids[-1:])!r}, which a "
            "causal model would have to continue: use a tokenizer that does not"
        )
    before = [tokenizer.convert_ids_to_tokens(token) for token in ids[: ids.index(plain[0])]]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A"],
        pair=[*before, "$A", "$B:1"],
        special_tokens=[(token, tokenizer.convert_tokens_to_ids(token)) for token in before],
    )


def _load_tokenizer(name: str, **settings) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(name, **settings)
    except (OSError, ValueError) as error:
        raise ValueError(f"`tokenizer` ({name!r}) is no folder here with a tokenizer, nor one on the Hub") from error


def make_tokenizer(
    texts: Sequence[str | os.PathLike], vocab_size: int, max_length: int, is_causal: bool = False
) -> PreTrainedTokenizerFast:
    """
    Makes a byte-level BPE tokenizer that knows every text: trained on files, or with one token per byte without any.

    A word's token includes the space before it. So does the mask of a trained tokenizer, which stands for a word: "the
    [MASK] of" gives the tokens that masking the middle of "the kernel of" gives in training. Pairs of texts get
    `token_type_ids`.

    That of a causal model adds nothing to a text, which is to be continued, and pads on the left. One token,
    `END_OF_TEXT`, is both `bos_token` and `eos_token`, as in GPT-2.
    """
    _check_texts(texts)
    mask = AddedToken(SPECIAL_TOKENS[-1], lstrip=bool(texts), special=True, normalized=False)
    special = [SPECIAL_TOKENS[0], END_OF_TEXT] if is_causal else [*SPECIAL_TOKENS[:-1], mask]
    backend = Tokenizer(models.BPE(unk_token=None if is_causal else "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokens = {"special_tokens": special, "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False, **tokens)
    backend.train([str(path) for path in texts], trainer)
    if is_causal:
        names = {"pad_token": special[0], "bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "padding_side": "left"}
        names["model_input_names"] = ["input_ids", "attention_mask"]
        return PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=max_length, **names)
    ends = [(token, backend.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    names = {f"{token[1:-1].lower()}_token": token for token in SPECIAL_TOKENS} | {"mask_token": mask}
    names["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=max_length, **names)


def _check_texts(paths: Sequence[str | os.PathLike]) -> None:
    """Refuses files that are missing or no text, and files that are all empty."""
    texts = []
    for path in paths:
        if not Path(path).is_file():
            raise ValueError(f"no such text file: {path}")
        try:
            texts.append(Path(path).read_text(encoding="utf-8").strip())
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is no text in UTF-8: {error}") from error
    if paths and not any(texts):
        raise ValueError(f"there is no text to train a tokenizer on in {', '.join(map(str, paths))}")
