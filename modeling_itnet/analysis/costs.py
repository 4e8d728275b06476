# SPDX-License-Identifier: Apache-2.0
"""Arithmetic and memory of a model at any number of positions, in every integration mode, beside attention.

The layers of a model are alike, and both figures of a layer are polynomials of degree two in the number of positions.
So one layer runs at three small numbers, its FLOPs and what it keeps for the backward are counted, and the polynomial
through them gives the rest. Only the proposal loss of Monte Carlo training looks at more queries as there are more
positions, in steps: what a further one costs is counted apart. Encoder and head are left out.
"""

import copy
import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertModel, ViTConfig, ViTModel
from transformers.models.bert.modeling_bert import BertLayer

from configuration_itnet import ITNetConfig
from itnet_kernels.exact.pair_inputs import PairInputs

from ..domain import Domain
from ..integration.proposal import num_loss_queries
from ..layers import ITNetLayer

MODES = ("exact", "monte_carlo", "low_rank")
# Numbers of positions that are run.
_SAMPLES = (8, 16, 24)


@dataclass(frozen=True)
class Cost:
    """Of one input (batch 1) through all layers of a model."""

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
    layers = {mode: itnet_layer(config, mode) for mode in modes}
    layers[peer_name(config)] = attention_layer(config)
    fits = {model: (_fit(layer), _fit_loss_query(layer)) for model, layer in layers.items()}
    costs = []
    for count in counts:
        more = num_loss_queries(config, count) - 1
        for model, (layer, query) in fits.items():
            figures = (np.polyval(a, count) + more * np.polyval(b, count) for a, b in zip(layer, query, strict=True))
            costs.append(Cost(model, count, *(round(config.num_hidden_layers * figure) for figure in figures)))
    return costs


def peer_name(config: ITNetConfig) -> str:
    return "BERT (attention)" if config.modality == "text" else "ViT (attention)"


def peer_parameters(config: ITNetConfig) -> int:
    """Parameters of a BERT or ViT of the same width, depth, heads, vocabulary and patches. Nothing is allocated."""
    size = {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "intermediate_size": config.intermediate_size,
    }
    with torch.device("meta"):
        if config.modality == "text":
            limits = {"vocab_size": config.vocab_size, "max_position_embeddings": config.max_position_embeddings}
            return BertModel(BertConfig(**size, **limits)).num_parameters()
        image = {"image_size": config.image_shape, "patch_size": config.patch_sizes[0]}
        return ViTModel(ViTConfig(**size, **image, num_channels=config.num_channels)).num_parameters()


def itnet_layer(config: ITNetConfig, mode: str, backend: str = "tiled") -> tuple[nn.Module, Callable[[int], tuple]]:
    """A layer, and its arguments for a number of positions. What it costs is counted in the tiled backend."""
    config = copy.deepcopy(config)
    config.integration_mode, config.backend = mode, backend
    layer = _filled(ITNetLayer(config, 1))
    frequencies = config.fourier_scale * torch.randn(config.num_fourier_features, config.position_dim)

    def arguments(count: int) -> tuple:
        features = torch.randn(1, count, config.hidden_size, requires_grad=True)
        measure = torch.full((1, count), 1 / count)
        return features, Domain(torch.rand(count, config.position_dim), measure, frequencies, is_padded=False)

    return layer, arguments


def attention_layer(config: ITNetConfig) -> tuple[nn.Module, Callable[[int], tuple]]:
    """The same for a layer of BERT or ViT, which differ in the order of their layer norms only."""
    peer = BertConfig(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        intermediate_size=config.intermediate_size,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="sdpa",
    )
    return _filled(BertLayer(peer)), lambda count: (torch.randn(1, count, config.hidden_size, requires_grad=True),)


@torch.no_grad()
def _filled(layer: nn.Module) -> nn.Module:
    for parameter in layer.parameters():
        parameter.normal_(std=0.02)
    return layer.train()


def _fit(layer_and_arguments: tuple[nn.Module, Callable[[int], tuple]]) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients of the two polynomials, highest power first: FLOPs and bytes of a layer."""
    layer, arguments = layer_and_arguments
    with torch.random.fork_rng(devices=[]):
        figures = np.array([_count(layer, arguments(count)) for count in _SAMPLES], dtype=np.float64)
    return tuple(np.linalg.solve(np.vander(_SAMPLES).astype(np.float64), column) for column in figures.T)


def _fit_loss_query(layer_and_arguments: tuple[nn.Module, Callable[[int], tuple]]) -> np.ndarray:
    """Coefficients of what one more query of the proposal loss takes, linear in n: FLOPs and bytes; 0 without one."""
    layer, arguments = layer_and_arguments
    operator = getattr(layer, "operator", None)
    if operator is None or operator.proposal is None:
        return np.zeros((2, 1))

    def loss(count: int) -> np.ndarray:
        given, with_loss = arguments(count), partial(operator, return_proposal_loss=True)
        return np.subtract(_count(operator, given, with_loss), _count(operator, given)).astype(np.float64)

    def line(*counts: int) -> np.ndarray:
        return np.polyfit(counts, np.array([loss(count) for count in counts]), 1).T

    two = next(count for count in itertools.count() if num_loss_queries(operator.config, count) == 2)
    with torch.random.fork_rng(devices=[]):
        return line(two, two + 8) - line(8, 16)


def _count(layer: nn.Module, arguments: tuple, forward: Callable | None = None) -> tuple[int, int]:
    """FLOPs of a forward, and the bytes that it keeps, without the layer's own parameters."""
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    formulas = {torch.ops.itnet.pair_sum: _pair_sum_flops}
    counter = FlopCounterMode(display=False, custom_mapping=formulas)
    with counter, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        (forward or layer)(*arguments)
    own = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    kept_bytes = sum(tensor.untyped_storage().nbytes() for pointer, tensor in kept.items() if pointer not in own)
    return counter.get_total_flops(), kept_bytes


def _pair_sum_flops(*shapes, out_shape=None) -> int:
    """4 w d_h per pair and head, 2 w d_h^2 per query and head for W2, and 2 w^2 per pair if there is a third layer."""
    inputs = PairInputs(*shapes)
    (batch, num_queries, heads, head_dim), width = inputs.queries, inputs.row[-1]
    has_mid = inputs.w_mid is not None
    pairs = batch * num_queries * inputs.keys[1] * heads
    output = 2 * batch * num_queries * heads * width * head_dim**2
    return pairs * (4 * width * head_dim + 2 * width**2 * has_mid) + output
