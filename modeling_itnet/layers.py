# SPDX-License-Identifier: Apache-2.0
"""One ITNet layer: LN -> operator -> residual, LN -> feed-forward -> residual (Eq. app_layer)."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from configuration_itnet import ITNetConfig
from itnet_kernels import Coordinates
from itnet_kernels.transforms import may_look_at

from .domain import Domain
from .operator import ITNetOperator

if TYPE_CHECKING:
    from .generation.cache import ITNetCacheLayer

# Hidden units of a feed-forward layer that a CPU computes at a time where no gradient is wanted: 16 MB in float32.
_HIDDEN_ELEMENTS = 2**22


class ITNetDropPath(nn.Module):
    """Stochastic depth: in training, drops the whole branch of a sample with the given probability."""

    def __init__(self, probability: float):
        super().__init__()
        self.probability = probability

    def forward(self, branch: Tensor) -> Tensor:
        if not self.training or self.probability == 0:
            return branch
        keep = 1 - self.probability
        shape = (branch.shape[0],) + (1,) * (branch.dim() - 1)
        # Drawn in float32: half precision would round `keep`, and with it the share of samples that are dropped.
        return branch * (torch.rand(shape, dtype=torch.float32, device=branch.device) < keep) / keep

    def extra_repr(self) -> str:
        return f"probability={self.probability:g}"


class ITNetFeedForward(nn.Module):
    """F(v) = W_2 act(W_1 v + b_1) + b_2 at every position, with dropout on the hidden units (Eq. app_ffn)."""

    def __init__(self, config: ITNetConfig):
        super().__init__()
        self.width = config.intermediate_size
        self.expand = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = ACT2FN[config.hidden_act]
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.contract = nn.Linear(config.intermediate_size, config.hidden_size)
        self.expand.initialization, self.contract.initialization = "xavier", "xavier_output"

    def forward(self, features: Tensor) -> Tensor:
        size = max(1, _HIDDEN_ELEMENTS // self.width)
        if not torch.is_grad_enabled() and may_look_at(features) and features[..., 0].numel() > size:
            # Nothing is kept for a gradient: a few positions at a time, whose hidden units stay in the cache.
            parts = features.flatten(0, -2).split(size)
            return torch.cat([self.forward(part) for part in parts]).view(features.shape)
        return self.contract(self.dropout(self.activation(self.expand(features))))


class ITNetLayer(GradientCheckpointingLayer):
    """z = K[LN(u)] + u;  u' = F(LN(z)) + z. ``index`` counts from 1: layer l of L drops paths with l p_drop / L."""

    def __init__(self, config: ITNetConfig, index: int):
        super().__init__()
        self.operator_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.operator = ITNetOperator(config, initialize=False)  # the model does
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.feed_forward_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.feed_forward = ITNetFeedForward(config)
        self.drop_path = ITNetDropPath(index * config.drop_path_rate / config.num_hidden_layers)

    def forward(
        self, hidden_states: Tensor, domain: Domain, kept: "ITNetCacheLayer | None" = None
    ) -> tuple[Tensor, Tensor | None]:
        """Maps hidden_states [B, n, d] to [B, n, d] and the operator's proposal loss, if it trains a proposal.

        ``kept`` is this layer's part of a cache.
        """
        normed = self.operator_norm(hidden_states)
        mixed, proposal_loss = self.operator(normed, domain, kept=kept, return_proposal_loss=True)
        hidden_states = hidden_states + self.drop_path(self.dropout(mixed))
        hidden_states = hidden_states + self.drop_path(self.feed_forward(self.feed_forward_norm(hidden_states)))
        return hidden_states, proposal_loss


def checkpointed(checkpoint: Callable, layer: Callable, hidden_states: Tensor, domain: Domain):
    """Returns ``checkpoint(layer, hidden_states, domain)``, with a gradient for what is inside of the domain.

    Reentrant checkpoints detach the tensors among their arguments and follow gradients through these alone.
    """
    roots = domain.differentiable

    def run(hidden_states: Tensor, *tensors: Tensor):
        if all(new is old for new, old in zip(tensors, roots.values(), strict=True)):
            return layer(hidden_states, domain)
        detached = dict(zip(roots, tensors, strict=True))
        if "positions" in detached:
            detached["coordinates"] = Coordinates(detached.pop("positions"), domain.frequencies)
        return layer(hidden_states, domain.replaced(**detached))

    return checkpoint(run, hidden_states, *roots.values())
