# SPDX-License-Identifier: Apache-2.0
"""Counts arithmetic and memory of a model at any number of positions, in every integration mode, beside attention.

The layers of a model are alike: one of them runs, on tensors that have a shape and no values, and the FLOPs and what
is kept for the backward are counted. Encoder and head are left out.

Neighbourhoods depend on where the positions are. Those of images lie on the most nearly square grid of their number,
those of text and of causal signals in a row, and all others anywhere in the unit cube. Pairs are counted as they are
computed: in blocks, which also hold some that do not count.
"""

import copy
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertModel, ViTConfig, ViTModel
from transformers.models.bert.modeling_bert import BertLayer

from configuration_itnet import ITNetConfig, find_modality
from itnet_kernels import Blocks
from itnet_kernels.exact.flops import pair_sum_flops

from ..domain import Domain
from ..integration.near import Near
from ..layers import ITNetLayer

MODES = ("exact", "near_far", "monte_carlo", "low_rank")


class Cost(NamedTuple):
    """What one input (a batch of 1) costs in all layers of a model."""

    model: str  # an integration mode, or the peer
    positions: int
    forward_flops: int  # two per multiply-add of matrix products; a backward takes twice as many
    activation_bytes: int  # what a forward in training keeps for the backward, in float32


def possible_modes(config: ITNetConfig) -> tuple[str, ...]:
    """Returns :data:`MODES`, without near and far fields where nothing says how large a neighbourhood is."""
    has_near = _layout(config, 1) is not None or config.near_radius is not None
    return tuple(mode for mode in MODES if mode != "near_far" or has_near)


def model_costs(config: ITNetConfig, counts: list[int], modes: tuple[str, ...] | None = None) -> list[Cost]:
    """Returns the costs at every number of positions in ``counts``, in every mode and for attention of this size."""
    config, modes = copy.deepcopy(config), possible_modes(config) if modes is None else modes
    for name in ("hidden_dropout_prob", "embedding_dropout_prob", "drop_path_rate"):
        setattr(config, name, 0.0)  # dropout keeps a mask, here as in the peer
    with torch.random.fork_rng(devices=[]), FakeTensorMode():
        layers = {mode: itnet_layer(config, mode) for mode in modes} | {peer_name(config): attention_layer(config)}
        return [
            Cost(model, count, *(config.num_hidden_layers * figure for figure in _count(layer, arguments(count))))
            for count in counts
            for model, (layer, arguments) in layers.items()
        ]


def peer_name(config: ITNetConfig) -> str:
    return "BERT (attention)" if _is_text(config) else "ViT (attention)"


def peer_parameters(config: ITNetConfig) -> int:
    """Counts the parameters of a BERT or ViT of the same sizes. Nothing is allocated."""
    with torch.device("meta"):
        if _is_text(config):
            return BertModel(BertConfig(**_shared(config, "vocab_size", "max_position_embeddings"))).num_parameters()
        image = {"image_size": config.image_shape, "patch_size": config.patch_sizes[0]}
        return ViTModel(ViTConfig(**_shared(config, "num_channels"), **image)).num_parameters()


def _is_text(config: ITNetConfig) -> bool:
    row = find_modality(config.modality)
    return row.has_tokens and not row.parts


def _shared(config: ITNetConfig, *more: str) -> dict[str, int]:
    """Returns what the configuration of a peer has in common with the model's."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", *more)
    return {name: getattr(config, name) for name in names}


def itnet_layer(config: ITNetConfig, mode: str, backend: str = "tiled") -> tuple[nn.Module, Callable[[int], tuple]]:
    """Returns a layer, and its arguments for a number of positions. What it costs is counted in the tiled backend."""
    config = copy.deepcopy(config)
    config.integration_mode, config.backend = mode, backend
    layer = _filled(ITNetLayer(config, 1))
    frequencies = config.fourier_scale * torch.randn(config.num_fourier_features, config.position_dim)

    def arguments(count: int) -> tuple:
        features = torch.randn(1, count, config.hidden_size, requires_grad=True)
        measure = torch.full((1, count), 1 / count)
        domain = Domain(
            _positions(config, count), measure, frequencies, is_padded=False, layout=_layout(config, count)
        )
        if mode == "near_far" and domain.layout is None and isinstance(measure, FakeTensor):
            domain.set_near(config, _found_near(config, count, measure.fake_mode))
        return features, domain

    return layer, arguments


def _positions(config: ITNetConfig, count: int) -> Tensor:
    """Returns positions [n, s] in the unit cube. On a line they rise, as decay along it wants them."""
    positions = torch.rand(count, config.position_dim)
    return positions.sort(0).values if config.position_dim == 1 else positions


def _layout(config: ITNetConfig, count: int) -> tuple[tuple[int, ...], ...] | None:
    """Returns the grids that ``count`` positions of this modality form: patches beside a [CLS], tokens, or none."""
    dimension = find_modality(config.modality).grid_dim
    if dimension < 2:
        return ((count,),) if dimension == 1 or config.is_causal else None
    patches = count - (config.pooling == "cls")
    rows = max((rows for rows in range(1, math.isqrt(max(patches, 0)) + 1) if patches % rows == 0), default=0)
    return (((),) if config.pooling == "cls" else ()) + (((rows, patches // rows),) if rows else ())


def _found_near(config: ITNetConfig, count: int, mode: FakeTensorMode) -> Near:
    """Returns the balls around real positions, as tensors without values: to find them takes values."""
    with unset_fake_temporarily():
        domain = Domain(
            _positions(config, count), torch.full((1, count), 1 / count), torch.empty(0, config.position_dim)
        )
        near = domain.near(config)
    blocks = [Blocks(*map(mode.from_tensor, part)) for part in near.blocks]
    return Near(blocks, mode.from_tensor(near.scale))


def attention_layer(config: ITNetConfig) -> tuple[nn.Module, Callable[[int], tuple]]:
    """Does the same for a layer of BERT or ViT, which differ in the order of their layer norms only."""
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    peer = BertConfig(**_shared(config), **dropout, attn_implementation="sdpa")
    return _filled(BertLayer(peer)), lambda count: (torch.randn(1, count, config.hidden_size, requires_grad=True),)


@torch.no_grad()
def _filled(layer: nn.Module) -> nn.Module:
    for parameter in layer.parameters():
        parameter.normal_(std=0.02)
    return layer.train()


def _count(layer: nn.Module, arguments: tuple) -> tuple[int, int]:
    """Returns the FLOPs of a forward, and the bytes that it keeps, without the layer's own parameters."""
    kept: list[Tensor] = []
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.itnet.pair_sum: pair_sum_flops})
    with counter, torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(*arguments)
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in kept}
    for parameter in layer.parameters():
        storages.pop(parameter.untyped_storage()._cdata, None)
    return counter.get_total_flops(), sum(storages.values())
