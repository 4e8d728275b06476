# SPDX-License-Identifier: Apache-2.0
"""Parameter counts by component, beside the figures that the paper prints."""

from dataclasses import dataclass

import torch
from torch import nn

from configuration_itnet import ITNetConfig

from ..modeling_itnet import ITNetModel

#: Totals of Table app_configs, and the rows of Table app_param_breakdown (ITNet-B), in parameters.
PAPER_TOTALS = {"itnet-pc": 3.1e6, "itnet-small": 22e6, "itnet-base": 86e6, "itnet-large": 307e6}
PAPER_BASE = {
    "kernel W1, b1": 0.89e6,
    "kernel W2": 75.5e6,
    "kernel b2": 0.59e6,
    "output W^O": 7.08e6,
    "residual W_theta": 7.08e6,
    "layer norm": 36.9e3,
    "feed-forward": 56.6e6,
}

#: Component of a parameter by a part of its name; the first match counts.
_COMPONENTS = {
    "kernel.w1": "kernel W1, b1",
    "kernel.b1": "kernel W1, b1",
    "kernel.w_mid": "kernel W_mid, b_mid",
    "kernel.b_mid": "kernel W_mid, b_mid",
    "kernel.w2": "kernel W2",
    "kernel.b2": "kernel b2",
    "operator.factors": "low-rank factors",
    "operator.proposal": "proposal",
    "operator.output": "output W^O",
    "operator.residual": "residual W_theta",
    "norm": "layer norm",
    "feed_forward.": "feed-forward",
    "encoder.": "encoder",
}


@dataclass(frozen=True)
class ParameterTable:
    """Parameters of one model: ``components`` in the order of the paper's table, and their total."""

    name: str
    components: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.components.values())

    def paper_figure(self, component: str) -> float | None:
        """What the paper prints for a component (ITNet-B only); None where it prints nothing."""
        return PAPER_BASE.get(component) if self.name == "itnet-base" else None

    @property
    def paper_total(self) -> float | None:
        return PAPER_TOTALS.get(self.name)


def count_parameters(model: nn.Module) -> dict[str, int]:
    """Parameters by component; "head" is what no component of ITNetModel claims. Tied weights count once."""
    counts = dict.fromkeys(_COMPONENTS.values(), 0) | {"head": 0}
    for name, parameter in model.named_parameters():
        component = next((label for part, label in _COMPONENTS.items() if part in name), "head")
        counts[component] += parameter.numel()
    return {label: count for label, count in counts.items() if count}


def parameter_table(name: str, config: ITNetConfig, model_class: type[nn.Module] = ITNetModel) -> ParameterTable:
    """Counts of a model of this class and configuration. No weight is allocated."""
    with torch.device("meta"):
        return ParameterTable(name, count_parameters(model_class(config)))
