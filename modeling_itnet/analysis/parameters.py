# SPDX-License-Identifier: Apache-2.0
"""Counts parameters by component, beside the figures that the paper prints."""

from typing import NamedTuple

import torch
from torch import nn

from configuration_itnet import ITNetConfig

from ..modeling_itnet import ITNetModel

#: Totals of Table app_configs, in parameters.
PAPER_TOTALS = {"itnet-pc": 3.1e6, "itnet-small": 22e6, "itnet-base": 86e6, "itnet-large": 307e6}
#: The parameters of each component, by parts of their names (the first match counts), and what Table
#: app_param_breakdown (ITNet-B) prints for it, if anything.
_COMPONENTS = {
    "kernel W1, b1": (("kernel.w1", "kernel.b1"), 0.89e6),
    "kernel W_mid, b_mid": (("kernel.w_mid", "kernel.b_mid"), None),
    "kernel W2, b2 of directions": (("kernel.w2_directions", "kernel.b2_directions"), None),
    "kernel W2": (("kernel.w2",), 75.5e6),
    "kernel b2": (("kernel.b2",), 0.59e6),
    "low-rank factors": (("operator.factors", "decoder.factors"), None),
    "proposal": (("operator.proposal",), None),
    "output W^O": (("operator.output",), 7.08e6),
    "gate W_g": (("operator.gate",), None),
    "residual W_theta": (("operator.residual",), 7.08e6),
    "layer norm": (("norm",), 36.9e3),
    "feed-forward": (("feed_forward.",), 56.6e6),
    "encoder": (("encoder.",), None),
    "head": (("",), None),  # what no component of ITNetModel claims
}
PAPER_BASE = {component: figure for component, (_, figure) in _COMPONENTS.items() if figure is not None}


class ParameterTable(NamedTuple):
    """Parameters of one model: ``components`` in the order of the paper's table, and their total."""

    name: str
    components: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.components.values())

    def paper_figure(self, component: str) -> float | None:
        """Returns what the paper prints for a component of ITNet-B, or None where it prints nothing."""
        return PAPER_BASE.get(component) if self.name == "itnet-base" else None

    @property
    def paper_total(self) -> float | None:
        return PAPER_TOTALS.get(self.name)


def count_parameters(model: nn.Module) -> dict[str, int]:
    """Counts parameters by component. Tied weights count once."""
    counts = dict.fromkeys(_COMPONENTS, 0)
    for name, parameter in model.named_parameters():
        component = next(label for label, (parts, _) in _COMPONENTS.items() if any(part in name for part in parts))
        counts[component] += parameter.numel()
    return {label: count for label, count in counts.items() if count}


def parameter_table(name: str, config: ITNetConfig, model_class: type[nn.Module] = ITNetModel) -> ParameterTable:
    """Counts of a model of this class and configuration. No weight is allocated."""
    with torch.device("meta"):
        return ParameterTable(name, count_parameters(model_class(config)))
