# SPDX-License-Identifier: Apache-2.0
"""Arithmetic and memory of a model at any number of positions, in every integration mode, beside attention.

The layers of a model are alike: one of them runs, on tensors that have a shape and no values, and the FLOPs and what
is kept for the backward are counted. Encoder and head are left out.
"""

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertModel, ViTConfig, ViTModel
from transformers.models.bert.modeling_bert import BertLayer

from configuration_itnet import ITNetConfig
from itnet_kernels.exact.pair_inputs import PairInputs

from ..domain import Domain
from ..layers import ITNetLayer

MODES = ("exact", "monte_carlo", "low_rank")


@dataclass(frozen=True)
class Cost:
    """What one input (batch 1) costs in all layers of a model."""

    model: str  # an integration mode, or the peer
    positions: int
    forward_flops: int  # two per multiply-add of matrix products; a backward takes twice as many
    activation_bytes: int  # what a forward in training keeps for the backward, in float32

    def to_dict(self) -> dict:
        return asdict(self)


def model_costs(config: ITNetConfig, counts: list[int], modes: tuple[str, ...] = MODES) -> list[Cost]:
    """Costs at every number of positions in ``counts``, for every mode and for attention of the same size."""
    config = copy.deepcopy(config)
    for name in ("hidden_dropout_prob", "embedding_dropout_prob", "drop_path_rate"):
        setattr(config, name, 0.0)  # dropout keeps a mask, here as in the peer
    costs = []
    with torch.random.fork_rng(devices=[]), FakeTensorMode():
        layers = {mode: itnet_layer(config, mode) for mode in modes}
        layers[peer_name(config)] = attention_layer(config)
        for count in counts:
            for model, (layer, arguments) in layers.items():
                figures = _count(layer, arguments(count))
                costs.append(Cost(model, count, *(config.num_hidden_layers * figure for figure in figures)))
    return costs


def peer_name(config: ITNetConfig) -> str:
    return "BERT (attention)" if config.modality == "text" else "ViT (attention)"


def peer_parameters(config: ITNetConfig) -> int:
    """Parameters of a BERT or ViT of the same width, depth, heads, vocabulary and patches. Nothing is allocated."""
    with torch.device("meta"):
        if config.modality == "text":
            limits = {"vocab_size": config.vocab_size, "max_position_embeddings": config.max_position_embeddings}
            return BertModel(BertConfig(**_size(config), **limits)).num_parameters()
        image = {"image_size": config.image_shape, "patch_size": config.patch_sizes[0]}
        return ViTModel(ViTConfig(**_size(config), **image, num_channels=config.num_channels)).num_parameters()


def _size(config: ITNetConfig) -> dict[str, int]:
    """What a peer has in common with the model."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    return {name: getattr(config, name) for name in names}


def itnet_layer(config: ITNetConfig, mode: str, backend: str = "tiled") -> tuple[nn.Module, Callable[[int], tuple]]:
    """A layer, and its arguments for a number of positions. What it costs is counted in the tiled backend."""
    config = copy.deepcopy(config)
    config.integration_mode, config.backend = mode, backend
    layer = _filled(ITNetLayer(config, 1))
    frequencies = config.fourier_scale * torch.randn(config.num_fourier_features, config.position_dim)

    def arguments(count: int) -> tuple:
        features = torch.randn(1, count, config.hidden_size, requires_grad=True)
        measure = torch.full((1, count), 1 / count)
        positions = torch.rand(count, config.position_dim).sort(0).values  # rising, as decay along a line wants them
        return features, Domain(positions, measure, frequencies, is_padded=False)

    return layer, arguments


def attention_layer(config: ITNetConfig) -> tuple[nn.Module, Callable[[int], tuple]]:
    """The same for a layer of BERT or ViT, which differ in the order of their layer norms only."""
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    peer = BertConfig(**_size(config), **dropout, attn_implementation="sdpa")
    return _filled(BertLayer(peer)), lambda count: (torch.randn(1, count, config.hidden_size, requires_grad=True),)


@torch.no_grad()
def _filled(layer: nn.Module) -> nn.Module:
    for parameter in layer.parameters():
        parameter.normal_(std=0.02)
    return layer.train()


def _count(layer: nn.Module, arguments: tuple) -> tuple[int, int]:
    """FLOPs of a forward, and the bytes that it keeps, without the layer's own parameters."""
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.itnet.pair_sum: _pair_sum_flops})
    with counter, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(*arguments)
    for parameter in layer.parameters():
        kept.pop(parameter.untyped_storage()._cdata, None)
    return counter.get_total_flops(), sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def _pair_sum_flops(*shapes, out_shape=None) -> int:
    """4 w d_h per pair and head, 2 w d_h^2 per query and head for W2, and 2 w^2 per pair if there is a third layer."""
    inputs = PairInputs(*shapes)
    (batch, num_queries, heads, head_dim), width = inputs.queries, inputs.row[-1]
    has_mid = inputs.w_mid is not None
    pairs = batch * num_queries * inputs.keys[1] * heads
    output = 2 * batch * num_queries * heads * width * head_dim**2
    return pairs * (4 * width * head_dim + 2 * width**2 * has_mid) + output
