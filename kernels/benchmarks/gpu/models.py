"""Whole models: training steps and forward passes of ITNet in each mode and of its peers, and decoding."""

import math
from typing import NamedTuple

import torch
from contestants import Contestant
from padded import ragged_mask
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    ViltConfig,
    ViltModel,
    ViTConfig,
    ViTModel,
)

from modeling_itnet import ITNetConfig, ITNetForCausalLM, ITNetModel

from .clock import Runs, Workload
from .scope import ModelSize, Scope

MODES = ("exact", "near_far", "low_rank", "monte_carlo")
PEER = "peer"
#: What stands beside ITNet, by modality. Nothing of PCT is in Transformers: attention of the same size stands for it.
PEERS = {"image": "ViT, SDPA", "text": "BERT, SDPA", "point_cloud": "BERT on 1024 vectors, SDPA", "multimodal": "ViLT"}
DECODERS = ("exact", "near_far", "low_rank", "low_rank, matrix", "GPT-2, SDPA")
TOKENS = 8  # decoded in a run
_NO_NOISE = {"hidden_dropout_prob": 0.0, "embedding_dropout_prob": 0.0, "drop_path_rate": 0.0}
_PEER_SETTINGS = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_SDPA = {"attn_implementation": "sdpa"}


class Spec(NamedTuple):
    """One model and its input."""

    modality: str
    mode: str  # of MODES, or PEER
    size: ModelSize
    rank: int


def spec(scope: Scope, modality: str, mode: str, model: str, is_paper_rank: bool = False) -> Spec:
    """Returns the sizes of a model: ``model`` is S, B or L. The paper's low-rank rows have 64 ranks in all heads
    together, rounded up for each."""
    size = scope.models[model]
    rank = math.ceil(scope.total_rank / size.heads) if is_paper_rank and mode == "low_rank" else scope.rank
    return Spec(modality, mode, size, rank)


def positions_of(scope: Scope, modality: str) -> int:
    by_modality = {"image": scope.image, "text": scope.text, "point_cloud": scope.points}
    return by_modality.get(modality, scope.image + scope.caption)


def workload(scope: Scope, given: Spec) -> Workload:
    return Workload(("model", *given), lambda: _build(scope, given))


def _build(scope: Scope, given: Spec) -> Runs:
    torch.manual_seed(0)
    model = _peer(scope, given) if given.mode == PEER else _itnet(scope, given)
    model = model.to(scope.device)
    entry = Contestant(model, {name: tensor.to(scope.device) for name, tensor in _inputs(scope, given).items()})
    # The step that makes the optimiser's state is one of those that are not counted.
    optimizer = torch.optim.AdamW(model.parameters(), fused=scope.is_measured or None)

    def autocast():
        return torch.autocast(scope.autocast_type, dtype=scope.timed_dtype)

    def forward() -> None:
        with autocast():
            entry.forward()

    def step() -> None:
        with autocast():
            loss = entry.loss()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return Runs(forward, step)


def _fields(size: ModelSize) -> dict[str, int]:
    return {
        "hidden_size": size.width,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "intermediate_size": 4 * size.width,
    }


def _kernel_fields(scope: Scope, rank: int) -> dict[str, int]:
    return {
        "kernel_hidden_size": scope.width,
        "num_fourier_features": scope.frequencies,
        "factor_hidden_size": scope.factor_hidden,
        "near_size": scope.near_size,
        "num_samples": scope.num_samples,
        "rank": rank,
    }


def _pixels(scope: Scope) -> int:
    return 16 * math.isqrt(scope.image)


def _itnet(scope: Scope, given: Spec) -> nn.Module:
    settings = {"modality": given.modality, "integration_mode": given.mode, "backend": "triton"} | _NO_NOISE
    settings |= _fields(given.size) | _kernel_fields(scope, given.rank)
    settings |= {"image_size": _pixels(scope)} if given.modality in ("image", "multimodal") else {}
    settings |= {"vocab_size": scope.vocabulary} if given.modality in ("text", "multimodal") else {}
    settings |= {"max_position_embeddings": scope.text} if given.modality == "text" else {}
    settings |= {"local_neighbors": min(16, scope.points)} if given.modality == "point_cloud" else {}
    return ITNetModel(ITNetConfig(**settings))


def _peer(scope: Scope, given: Spec) -> nn.Module:
    fields = _fields(given.size) | _PEER_SETTINGS
    if given.modality == "image":
        return ViTModel(ViTConfig(**fields, **_SDPA, image_size=_pixels(scope)), add_pooling_layer=False)
    if given.modality == "multimodal":
        settings = {"image_size": _pixels(scope), "patch_size": 16, "max_position_embeddings": scope.caption}
        return ViltModel(ViltConfig(**fields, **settings, vocab_size=scope.vocabulary), add_pooling_layer=False)
    config = BertConfig(**fields, **_SDPA, vocab_size=scope.vocabulary,
                        max_position_embeddings=positions_of(scope, given.modality))  # fmt: skip
    return BertModel(config, add_pooling_layer=False)


def _inputs(scope: Scope, given: Spec) -> dict[str, torch.Tensor]:
    """Makes inputs. Texts are padded, as those of a tokenizer: the attention mask gives each its own positions and
    measure."""
    batch, inputs = scope.batch, {}
    if given.modality in ("image", "multimodal"):
        inputs["pixel_values"] = torch.randn(batch, 3, _pixels(scope), _pixels(scope))
    if given.modality in ("text", "multimodal"):
        length = scope.text if given.modality == "text" else scope.caption
        inputs["input_ids"] = torch.randint(1, scope.vocabulary, (batch, length))
        inputs["attention_mask"] = ragged_mask(batch, length)
    if given.modality == "point_cloud" and given.mode == PEER:
        inputs["inputs_embeds"] = torch.randn(batch, scope.points, given.size.width)
    elif given.modality == "point_cloud":
        inputs["points"] = torch.rand(batch, scope.points, 3)
    return inputs


def decoding(scope: Scope, name: str, context: int, model: str = "B") -> Workload:
    """Decodes tokens of one text behind a context, one at a time; times are those of a token."""
    size = scope.models[model]
    return Workload(("decoding", name, context, size), lambda: _decoder(scope, name, context, size))


def _decoder(scope: Scope, name: str, context: int, size: ModelSize) -> Runs:
    torch.manual_seed(0)
    longest = 2 * max(scope.contexts) + 2**10
    if name == DECODERS[-1]:
        sizes = {"n_embd": size.width, "n_layer": size.layers, "n_head": size.heads, "n_positions": longest}
        model = GPT2LMHeadModel(GPT2Config(**sizes, **_SDPA, vocab_size=256))
    else:
        mode, _, form = name.partition(", ")
        settings = {"modality": "text", "is_causal": True, "vocab_size": 256, "max_position_embeddings": longest}
        settings |= _fields(size) | _kernel_fields(scope, scope.rank) | _NO_NOISE
        settings |= {"factor_form": "matrix", "factor_decay": True} if form == "matrix" else {}
        settings |= {"integration_mode": mode, "backend": "triton"}
        model = ITNetForCausalLM(ITNetConfig(**settings))
    model = model.to(scope.device, scope.timed_dtype).eval()
    tokens = torch.randint(256, (1, TOKENS), device=scope.device)
    with torch.no_grad():
        first = torch.randint(256, (1, context), device=scope.device)
        cache = model(first, use_cache=True).past_key_values

    @torch.no_grad()
    def decode() -> None:
        nonlocal cache
        for k in range(TOKENS if scope.is_measured else 1):
            cache = model(tokens[:, k : k + 1], past_key_values=cache, use_cache=True).past_key_values

    return Runs(decode, per_run=TOKENS if scope.is_measured else 1)
