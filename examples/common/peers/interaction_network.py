"""Interaction network (Battaglia et al., 2016): messages of all pairs by an MLP."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from modeling_itnet import ITNetConfig
from modeling_itnet.operator import ITNetFourierFeatures
from modeling_itnet.outputs import SignalRegressionOutput

from .places import Places
from .signal_peer import answer


class Interaction(nn.Module):
    """h_i <- h_i + U(LN(h)_i, Σ_j ω_j M(LN(h)_i, LN(h)_j, e_ij)), with MLPs M and U of one hidden layer each.

    e_ij [p] describes the pair. The first layer of M is linear in its three arguments, so that its parts are taken
    before pairs are formed.
    """

    def __init__(self, width: int, hidden: int, pair_size: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.receiver, self.sender = nn.Linear(width, hidden), nn.Linear(width, hidden, bias=False)
        self.pair = nn.Linear(pair_size, hidden, bias=False)
        self.message = nn.Linear(hidden, width)
        self.update = nn.Sequential(nn.Linear(2 * width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, features: Tensor, pairs: Tensor, measure: Tensor) -> Tensor:
        """Takes features [B, n, d], pairs [B, n, n, p] and the measure ω [B, n] to features [B, n, d]."""
        normed = self.norm(features)
        inner = self.receiver(normed).unsqueeze(2) + self.sender(normed).unsqueeze(1) + self.pair(pairs)
        # The last layer of M is linear too, and Σ_j ω_j = 1: the mean comes first.
        messages = self.message((measure[:, None, None] @ F.gelu(inner)).squeeze(2))
        return features + self.update(torch.cat([normed, messages], dim=-1))


class InteractionNetwork(nn.Module):
    """Interactions between all positions of a signal: [B, n, c] -> [B, n, num_labels].

    Pairs are described by γ(x_i − x_j) and |x_i − x_j|, as ITNet's kernel sees them; h starts from the values alone.
    """

    def __init__(self, config: ITNetConfig):
        super().__init__()
        self.fourier = ITNetFourierFeatures(config)
        self.lift = nn.Linear(config.signal_feature_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Interaction(config.hidden_size, config.intermediate_size, self.fourier.size + 1)
            for _ in range(config.num_hidden_layers)
        )
        self.norm = nn.LayerNorm(config.hidden_size)
        self.regressor = nn.Linear(config.hidden_size, config.num_labels)

    def forward(
        self, signal_values: Tensor, positions: Tensor, measure: Tensor | None = None, labels: Tensor | None = None
    ) -> SignalRegressionOutput:
        places = Places(positions, measure, self.fourier)
        features = self.lift(signal_values)
        for layer in self.layers:
            features = layer(features, places.pairs, places.measure)
        return answer(self.regressor(self.norm(features)), labels)
