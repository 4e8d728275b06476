"""Attention in linear time on signals: that of GNOT and OFormer, and Transolver's physics attention.

Sums over keys are integrals against the measure: key j counts ω_j instead of 1/n. With the uniform one they are the
published formulas.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from modeling_itnet import ITNetConfig

from .places import Places
from .signal_peer import FeedForward, SignalPeer, beside, in_heads


def linear_attention(query: Tensor, key: Tensor, value: Tensor, measure: Tensor) -> Tensor:
    """Returns Σ_j ω_j (q̃_i·k̃_j) v_j / Σ_j ω_j q̃_i·k̃_j, q̃ and k̃ softmax over components: [B, H, n, d_h] each.

    GNOT's normalised attention (Hao et al., 2023): the sums over keys come first, so that time is linear in n.
    """
    query, key = query.softmax(-1), key.softmax(-1) * measure[:, None, :, None]
    total = key.sum(2, keepdim=True)  # [B, H, 1, d_h]
    return (query @ (key.transpose(-2, -1) @ value)) / (query * total).sum(-1, keepdim=True)


class LinearAttentionLayer(nn.Module):
    """Linear attention and a feed-forward network, both pre-norm with a residual connection."""

    def __init__(self, config: ITNetConfig):
        super().__init__()
        size, self.num_heads = config.hidden_size, config.num_attention_heads
        self.norm = nn.LayerNorm(size)
        self.projection, self.output = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.feed_forward = FeedForward(config)

    def forward(self, features: Tensor, places: Places) -> Tensor:
        parts = self.projection(self.norm(features)).chunk(3, dim=-1)
        heads = linear_attention(*(in_heads(part, self.num_heads) for part in parts), places.measure)
        features = features + self.output(beside(heads))
        return features + self.feed_forward(features)


class SignalLinearAttention(SignalPeer):
    """GNOT/OFormer-style: linear attention on values and Fourier features of positions."""

    def layer(self, config: ITNetConfig) -> nn.Module:
        return LinearAttentionLayer(config)


def physics_attention(values: Tensor, slices: Tensor, measure: Tensor, projections: nn.Linear) -> Tensor:
    """Applies Transolver's attention (Wu et al., 2024) among M tokens, each a mean over one slice of the domain.

    values v [B, H, n, d_h], slice weights s [B, H, n, M], which sum to 1 over M:
        z_m = Σ_j ω_j s_jm v_j / Σ_j ω_j s_jm,   z' = softmax(q(z) k(z)ᵀ / √d_h) v(z),   out_i = Σ_m s_im z'_m
    """
    weights = slices * measure[:, None, :, None]
    tokens = weights.transpose(-2, -1) @ values / weights.sum(2).unsqueeze(-1).clamp_min(1e-6)  # [B, H, M, d_h]
    query, key, value = projections(tokens).chunk(3, dim=-1)
    return slices @ F.scaled_dot_product_attention(query, key, value)


class PhysicsAttentionLayer(nn.Module):
    """Physics attention and a feed-forward network, both pre-norm with a residual connection; `rank` slices a head."""

    def __init__(self, config: ITNetConfig):
        super().__init__()
        size, self.num_heads = config.hidden_size, config.num_attention_heads
        head_dim = size // self.num_heads
        self.norm = nn.LayerNorm(size)
        self.value, self.key, self.output = (nn.Linear(size, size) for _ in range(3))
        self.slices = nn.Linear(head_dim, config.rank)
        nn.init.orthogonal_(self.slices.weight)
        self.temperature = nn.Parameter(torch.full((1, self.num_heads, 1, 1), 0.5))
        self.projections = nn.Linear(head_dim, 3 * head_dim, bias=False)
        self.feed_forward = FeedForward(config)

    def forward(self, features: Tensor, places: Places) -> Tensor:
        normed = self.norm(features)
        scores = self.slices(in_heads(self.key(normed), self.num_heads)) / self.temperature.clamp(0.1, 5.0)
        values = in_heads(self.value(normed), self.num_heads)
        heads = physics_attention(values, scores.softmax(-1), places.measure, self.projections)
        features = features + self.output(beside(heads))
        return features + self.feed_forward(features)


class Transolver(SignalPeer):
    def layer(self, config: ITNetConfig) -> nn.Module:
        return PhysicsAttentionLayer(config)
