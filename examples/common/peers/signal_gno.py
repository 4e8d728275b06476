"""Graph neural operator (Li et al., 2020) on positions that differ from sample to sample."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from modeling_itnet import ITNetConfig

from .places import Places
from .point_transformer import VectorAttention
from .signal_peer import FeedForward, SignalPeer


class BallIntegral(nn.Module):
    """Σ_(|x_j − x_i| < r) ω_j k(x_i, x_j) ⊙ v_j / Σ_(|x_j − x_i| < r) ω_j: [B, n, d] -> [B, n, d].

    k is an MLP of γ(x_j) and γ(x_i) with one hidden layer, as in neuraloperator's IntegralTransform of the linear
    kind, which has 1 in place of ω. Its first layer is linear: its parts are taken before pairs are formed.
    """

    def __init__(self, width: int, hidden: int, position_size: int, radius: float):
        super().__init__()
        self.radius = radius
        self.sender, self.receiver = nn.Linear(position_size, hidden), nn.Linear(position_size, hidden, bias=False)
        self.kernel = nn.Linear(hidden, width)

    def forward(self, values: Tensor, places: Places) -> Tensor:
        samples, queries, keys = places.edges(self.radius)
        hidden = self.sender(places.gamma)[samples, keys] + self.receiver(places.gamma)[samples, queries]
        weights = places.measure[samples, keys].unsqueeze(-1)  # [E, 1]
        terms = weights * self.kernel(F.gelu(hidden)) * values[samples, keys]  # [E, d]
        rows = samples * values.shape[1] + queries
        total = terms.new_zeros(values.shape[:2].numel(), values.shape[2]).index_add(0, rows, terms)
        mass = weights.new_zeros(values.shape[:2].numel(), 1).index_add(0, rows, weights)
        return (total / mass).view_as(values)


class GNOLayer(nn.Module):
    """u <- u + GELU(W LN(u) + integral of LN(u) over a ball of `near_radius`), then a feed-forward network.

    The feed-forward network and the norms are those of the other peers; the published layer has neither.
    """

    def __init__(self, config: ITNetConfig, position_size: int):
        super().__init__()
        size = config.hidden_size
        self.norm, self.own = nn.LayerNorm(size), nn.Linear(size, size)
        self.integral = BallIntegral(size, config.kernel_hidden_size, position_size, config.near_radius)
        self.feed_forward = FeedForward(config)

    def forward(self, features: Tensor, places: Places) -> Tensor:
        normed = self.norm(features)
        features = features + F.gelu(self.own(normed) + self.integral(normed, places))
        return features + self.feed_forward(features)


class SignalGNO(SignalPeer):
    def layer(self, config: ITNetConfig) -> nn.Module:
        if config.near_radius is None:
            raise ValueError("`near_radius` (None) must be given: the radius of the balls of GNO")
        return GNOLayer(config, self.fourier.size)


class SignalPointTransformer(SignalPeer):
    """Point Transformer (Zhao et al., 2021): vector attention over the `local_neighbors` nearest positions."""

    def layer(self, config: ITNetConfig) -> nn.Module:
        return _NeighbourLayer(config)


class _NeighbourLayer(nn.Module):
    def __init__(self, config: ITNetConfig):
        super().__init__()
        self.count = max(config.local_neighbors, 1)
        self.attention = VectorAttention(config.hidden_size, config.position_dim)
        self.feed_forward = FeedForward(config)

    def forward(self, features: Tensor, places: Places) -> Tensor:
        neighbors = places.nearest(self.count)
        samples = torch.arange(len(features), device=features.device)[:, None, None]
        offsets = places.positions.unsqueeze(2) - places.positions[samples, neighbors]
        features = self.attention(features, offsets, neighbors, torch.ones_like(neighbors, dtype=torch.bool))
        return features + self.feed_forward(features)
