# SPDX-License-Identifier: Apache-2.0
"""Sorts parameters into groups for AdamW."""

from torch import nn

#: Names of the tensors that count as weight matrices.
_DECAYED = ("weight", "w1", "w_mid", "w2", "w2_directions")


def optimizer_param_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Returns two groups for AdamW, with decay on weight matrices only (App. regularization).

    Biases, LayerNorm and the kernel's output bias b2, which holds the identity that the kernel starts from, are never
    pulled towards zero. Parameters that do not require a gradient are left out.
    """
    if weight_decay < 0:
        raise ValueError(f"`weight_decay` ({weight_decay}) must not be negative")
    decayed, free = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_matrix = parameter.dim() >= 2 and name.rpartition(".")[2] in _DECAYED
            (decayed if is_matrix else free).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": free, "weight_decay": 0.0}]
