# SPDX-License-Identifier: Apache-2.0
"""Collects what an explorer page needs of a model: weights of its kernels, and the signals that its layers see."""

import copy
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from configuration_itnet import ITNetConfig
from itnet_kernels import KernelWeights

from ...domain import Domain, Signal
from ...integration.anchors import find_anchors
from ...integration.capture import evaluating, forward_arguments, operator_inputs
from ...operator import ITNetOperator, find_operators

# Copies of a text that run together, one for each position whose prediction is differentiated.
_COPIES = 16
#: Most likely labels that are listed for every prediction.
TOP = 5


class Predictions(NamedTuple):
    """The most likely labels of a sample, or of each of its positions; all are of the model's output."""

    labels: Tensor  # [n or 1, TOP], integers
    probabilities: Tensor  # [n or 1, TOP]
    gradients: list[Tensor]  # per layer [n, d]: of log p of the first label, in the integral at each position


@dataclass
class Sample:
    """One input: what does not change from layer to layer, and the features that every operator sees."""

    row: int  # in the batch
    num_rows: int
    domain: Domain  # of its real positions alone
    kept: Tensor  # [n] where these are among all positions of the batch
    starts: list[int]  # where the parts of the layout begin among these
    mode: str  # in which the model integrates it
    features: list[Tensor]  # per layer [n, d]
    near_pairs: Tensor | None = None  # [n, n], the neighbourhoods that a near field has here
    near_scale: Tensor | None = None  # [n]
    anchors: tuple[Tensor, Tensor] | None = None  # indices and measure: [M], or [n, M] of a causal model
    predictions: Predictions | None = None

    @property
    def count(self) -> int:
        return len(self.kept)


@dataclass
class LayerWeights:
    """The kernels of one layer by name; a checkpoint has those of its modes."""

    kernel: KernelWeights | None
    factors: dict[str, Tensor] = field(default_factory=dict)


def collect(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    *,
    num_samples: int | None = None,
    near_size: int | None = None,
    near_radius: float | None = None,
) -> tuple[list[LayerWeights], list[Sample]]:
    """Runs the model on ``inputs`` once, and once more with gradients if it predicts labels."""
    operators = find_operators(model)
    if not operators:
        raise ValueError(f"`model` ({type(model).__name__}) has no kernels to explore: it has no ITNet layers")
    if any(operator.kernel is not None and operator.kernel.w2_directions is not None for operator in operators):
        raise ValueError("`model` has kernels with directions (`kernel_directions`), which the page cannot compute")
    calls = operator_inputs(model, inputs)
    domain = calls[0].domain
    if domain.documents is not None:
        raise ValueError("`inputs` hold several documents in a row; give each document a row of its own")
    layers = [_layer_weights(operator, domain.frequencies) for operator in operators]
    config = _with_neighbourhood(operators[0].config, domain, near_size, near_radius)
    samples = []
    for part in domain.resolve(operators[0].config, training=False):
        rows = range(len(domain.measure)) if part.samples is None else part.samples.tolist()
        samples += [_sample(row, part.mode, calls) for row in rows]
    samples.sort(key=lambda sample: sample.row)
    for sample in samples:
        _add_neighbourhoods(sample, config)
        _add_anchors(sample, config, num_samples)
    _add_predictions(model, inputs, operators, samples)
    return layers, samples


def _layer_weights(operator: ITNetOperator, frequencies: Tensor) -> LayerWeights:
    kernel = None if operator.kernel is None else operator.kernel(frequencies)
    factors = {} if operator.factors is None else dict(operator.factors.state_dict())
    return LayerWeights(kernel, factors)


def _sample(row: int, mode: str, calls: list[Signal]) -> Sample:
    """Returns the real positions of one row of the batch. Padding changes nothing, so that it can be left out."""
    domain = calls[0].domain
    kept = (domain.measure[row] > 0).nonzero().flatten()
    positions = domain.positions if domain.positions.dim() == 2 else domain.positions[row]
    measure = domain.measure[row, kept].double()
    measure = (measure / measure.sum()).float().unsqueeze(0)
    layout, starts, start = None, [], 0
    if domain.layout is not None:  # grids are complete; a line of text may be shorter
        layout = []
        for shape in domain.layout:
            size = int(torch.Size(shape).numel())
            inside = int(((kept >= start) & (kept < start + size)).sum())
            layout.append((inside,) if len(shape) == 1 else shape)
            starts.append(start)
            start += size
        layout = tuple(layout)
    edges = {}
    if domain.neighbors is not None:
        place = kept.new_full((domain.measure.shape[1] + 1,), -1)  # the last: no neighbour
        place[kept] = torch.arange(len(kept), device=kept.device)
        edges = {"neighbors": place[domain.neighbors[row, kept]].unsqueeze(0), "edge_gate": domain.edge_gate}
    own = Domain(positions[kept], measure, domain.frequencies, is_padded=False, layout=layout, **edges)
    return Sample(row, len(domain.measure), own, kept, starts, mode, [call.features[row, kept] for call in calls])


def _with_neighbourhood(
    config: ITNetConfig, domain: Domain, near_size: int | None, near_radius: float | None
) -> ITNetConfig:
    """Returns the configuration with neighbourhoods of the given size, or of one that fits if the model has none."""
    config = copy.deepcopy(config)
    if near_size is None and config.integration_mode != "near_far":  # about a quarter of the positions
        near_size = min(config.near_size, max(9, domain.measure.shape[1] // 4))
    config.near_size = config.near_size if near_size is None else near_size
    config.near_radius = config.near_radius if near_radius is None else near_radius
    if config.near_radius is None:
        places = domain.positions.flatten(0, -2)
        config.near_radius = float(torch.linalg.vector_norm(places.amax(0) - places.amin(0))) / 4 or 1.0
    return config


@torch.no_grad()
def _add_neighbourhoods(sample: Sample, config: ITNetConfig) -> None:
    near = sample.domain.near(config)
    sample.near_pairs = near.pairs(sample.count)[0]
    sample.near_scale = near.scale[0]


@torch.no_grad()
def _add_anchors(sample: Sample, config: ITNetConfig, count: int | None) -> None:
    """Adds the anchors of Monte Carlo integration: as many as the model has, or a quarter of the positions."""
    if count is None:
        count = config.num_samples if sample.mode == "monte_carlo" else max(1, sample.count // 4)
    if count >= sample.count:
        return
    anchors = find_anchors(sample.domain.coordinates, sample.domain.measure, count, config.is_causal)
    sample.anchors = anchors.indices[0], anchors.measure[0]


def _add_predictions(
    model: nn.Module, inputs: Mapping[str, Tensor], operators: list[ITNetOperator], samples: list[Sample]
) -> None:
    """Adds the first-order effect of every integral on the prediction, where the model has logits.

    A classifier [B, C] has one prediction per sample, which several rows may belong to (pairs of images). Models of
    tokens [B, n, C] have one per position, and its gradient is taken in the integral at that same position.
    """
    arguments = forward_arguments(model, inputs, "inputs")
    logits, gradients = _logit_gradients(model, arguments, operators, positions=None)
    if logits is None or logits.dim() not in (2, 3):
        return
    probabilities = logits.float().softmax(-1)
    top = probabilities.topk(min(TOP, logits.shape[-1]), dim=-1)
    rows_per_sample = max(1, len(gradients[0]) // len(logits))
    for sample in samples:
        if logits.dim() == 2:
            number = sample.row // rows_per_sample
            own = [gradient[sample.row, sample.kept] for gradient in gradients]
            chosen = slice(number, number + 1)
            sample.predictions = Predictions(top.indices[chosen], top.values[chosen], own)
        else:
            own = _gradients_by_position(model, arguments, operators, sample)
            chosen = sample.row, sample.kept
            sample.predictions = Predictions(top.indices[chosen], top.values[chosen], own)


def _gradients_by_position(
    model: nn.Module, arguments: dict[str, Tensor], operators: list[ITNetOperator], sample: Sample
) -> list[Tensor]:
    """Returns in row i the gradient of prediction i in the integral at i. Copies of the sample run together."""
    own = [torch.zeros_like(features) for features in sample.features]
    for positions in torch.arange(sample.count).split(_COPIES):
        copies = {
            name: value[sample.row : sample.row + 1].expand(len(positions), *value.shape[1:])
            for name, value in arguments.items()
            if isinstance(value, Tensor)
        }
        places = sample.kept[positions]
        _, found = _logit_gradients(model, copies, operators, positions=places)
        for part, gradient in zip(own, found, strict=True):
            part[positions] = gradient[torch.arange(len(places)), places]
    return own


def _logit_gradients(
    model: nn.Module, arguments: Mapping[str, Tensor], operators: list[ITNetOperator], positions: Tensor | None
) -> tuple[Tensor | None, list[Tensor]]:
    """Returns the logits, and the gradients of log p of the most likely label in all integrals: [B, n, d] per layer.

    With ``positions`` [B], sample b counts at its position b alone. Integrals are what enters W^O.
    """
    probes: list[Tensor] = []

    def add_probe(_, given):
        probes.append(torch.zeros_like(given[0], requires_grad=True))
        return (given[0] + probes[-1], *given[1:])

    with evaluating(model), torch.enable_grad(), ExitStack() as hooks:
        for operator in operators:
            hooks.callback(operator.output.register_forward_pre_hook(add_probe).remove)
        logits = getattr(model(**arguments), "logits", None)
        if logits is None or (logits.dim() == 3 and positions is None):
            return None if logits is None else logits.detach(), probes
        scores = logits[..., 0] if logits.shape[-1] == 1 else logits.float().log_softmax(-1).amax(-1)
        if positions is not None:
            scores = scores.gather(1, positions.unsqueeze(1))
        found = torch.autograd.grad(scores.sum(), probes, allow_unused=True)
    found = [torch.zeros_like(p) if g is None else g for g, p in zip(found, probes, strict=True)]
    return logits.detach(), found
