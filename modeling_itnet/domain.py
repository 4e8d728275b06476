# SPDX-License-Identifier: Apache-2.0
"""The one type that every encoder returns and the core accepts."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from itnet_kernels.transforms import may_look_at


@dataclass
class Signal:
    """A function u on a finite domain with a measure: what ITNet layers integrate.

    The measure of a sample sums to 1 over its real positions and is 0 on padding, so that neither padding nor the
    other samples of a batch change anything.
    """

    features: Tensor  # u [B, n, d]
    positions: Tensor  # x [n, s] shared by the batch, or [B, n, s]; float32
    measure: Tensor  # omega [B, n]; float32
    neighbors: Tensor | None = None  # [B, n, m] indices of the positions joined to each one by an edge, -1 for none
    edge_gate: Tensor | None = None  # lambda, a scalar: goes with neighbors, weighs pairs that no edge joins

    def pooled(self, features: Tensor, how: str) -> Tensor:
        """One vector per sample, as ``config.pooling`` says: features [B, n, d] -> [B, d]."""
        return {"cls": self.first, "mean": self.mean, "max": self.maximum}[how](features)

    def mean(self, features: Tensor) -> Tensor:
        """Integral of ``features`` [B, n, d] against the measure, over its total: [B, d]."""
        weights = (self.measure / self.measure.sum(1, keepdim=True)).to(features.dtype)
        return torch.einsum("bn,bnd->bd", weights, features)

    def maximum(self, features: Tensor) -> Tensor:
        """Largest value of each of the ``features`` [B, n, d] over the positions that are not padding: [B, d]."""
        return features.masked_fill(self.measure.unsqueeze(-1) == 0, torch.finfo(features.dtype).min).amax(1)

    def first(self, features: Tensor) -> Tensor:
        """``features`` [B, n, d] at the first position that is not padding, which is where [CLS] sits: [B, d]."""
        index = (self.measure > 0).int().argmax(1)  # the first of equals
        return features[torch.arange(features.shape[0], device=features.device), index]


def uniform_measure(features: Tensor, mask: Tensor | None) -> Tensor:
    """1/n on the n real positions of each sample, 0 on padding: features [B, n, d], mask [B, n] -> [B, n]."""
    batch, count = features.shape[:2]
    if mask is None:
        return torch.full((batch, count), 1 / count, device=features.device)
    mask = check_mask(mask, batch, count)
    return mask / mask.sum(1, keepdim=True).clamp(min=1)


def check_tensor(value: Any, name: str) -> Tensor:
    """A tensor; says what a list, array or number in its place should have been."""
    if not isinstance(value, Tensor):
        raise ValueError(
            f"`{name}` ({type(value).__name__}) must be a torch.Tensor: a processor or tokenizer makes tensors with "
            '`return_tensors="pt"`, and torch.as_tensor makes one of an array or a list'
        )
    return value


def check_mask(mask: Tensor, batch: int, count: int, name: str = "attention_mask") -> Tensor:
    """A padding mask as float32 zeros and ones [B, n]; says what is wrong with one that does not fit."""
    if list(mask.shape) != [batch, count]:
        raise ValueError(
            f"`{name}` {list(mask.shape)} must be [{batch}, {count}]: 1 for each real position, 0 for padding"
        )
    real = mask != 0
    if can_read_values(mask):
        strange = mask[real & (mask != 1)]
        if strange.numel():
            raise ValueError(
                f"`{name}` holds {strange[0].item()}, but must hold 1 for each real position and 0 for padding; masks "
                "that are added to scores, with 0 for real positions, mean the opposite"
            )
        if not bool(real.any(1).all()):
            empty = (~real.any(1)).nonzero().flatten().tolist()
            raise ValueError(f"`{name}` removes every position of sample(s) {empty}; at least one must remain")
    return real.float()


def check_ids(ids: Tensor, count: int, name: str, limit: str) -> Tensor:
    """Indices of an embedding of ``count`` rows; says which are out of its range, and what sets that range."""
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"`{name}` ({ids.dtype}) must be integers, from 0 to {count - 1}")
    if can_read_values(ids) and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < count:
        worst = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        raise ValueError(f"`{name}` hold {worst}, but `{limit}` is {count}: they must be from 0 to {count - 1}")
    return ids


def input_dtype(layer: nn.Module) -> torch.dtype:
    """The dtype in which a layer takes its input: that of its weight, or of its bias where the weight is quantised.

    Quantised layers hold integers, or a method that unpacks them, and then take the default dtype at worst.
    """
    for tensor in (layer.weight, layer.bias):
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            return tensor.dtype
    return torch.get_default_dtype()


def can_read_values(tensor: Tensor) -> bool:
    """Whether a check may look at values: not while tracing, under vmap, or where it would wait for a device."""
    return may_look_at(tensor)
