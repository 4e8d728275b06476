"""A softmax transformer on signals, with positions as inputs and, if told, in the scores of pairs."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from modeling_itnet import ITNetConfig
from modeling_itnet.operator import ITNetFourierFeatures
from modeling_itnet.outputs import SignalRegressionOutput

from .places import Places
from .signal_peer import answer


class AttentionLayer(nn.Module):
    """Softmax attention and a feed-forward network, both pre-norm with a residual connection.

    With ``pair_size`` = p > 0, every head adds an MLP of what describes a pair, [p], to its score.
    """

    def __init__(self, config: ITNetConfig, pair_size: int, bias_size: int = 16):
        super().__init__()
        size, inner, self.num_heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
        self.norm, self.feed_forward_norm = nn.LayerNorm(size), nn.LayerNorm(size)
        self.projection, self.output = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.feed_forward = nn.Sequential(nn.Linear(size, inner), nn.GELU(), nn.Linear(inner, size))
        self.bias = None
        if pair_size:
            self.bias = nn.Sequential(
                nn.Linear(pair_size, bias_size), nn.GELU(), nn.Linear(bias_size, self.num_heads, bias=False)
            )

    def forward(self, features: Tensor, pairs: Tensor | None, scores: Tensor | None = None) -> Tensor:
        """Takes features [B, n, d], pairs [B, n, n, p] or None, and what is added to all scores of a key, [B, n]."""
        heads = self.projection(self.norm(features)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.transpose(1, 3).unbind(2)  # [B, H, n, d_h] each
        bias = None if pairs is None else self.bias(pairs).movedim(-1, 1)  # [B, H, n, n]
        if scores is not None:
            scores = scores[:, None, None].expand(-1, -1, features.shape[1], -1)  # [B, 1, n, n]
            bias = scores if bias is None else bias + scores
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        features = features + self.output(attended.transpose(1, 2).flatten(2))
        return features + self.feed_forward(self.feed_forward_norm(features))


class SignalTransformer(nn.Module):
    """Attention layers on W a(x) + b + W_pos γ(x), and a linear map at every position: [B, n, c] -> [B, n, labels].

    With ``relative_bias`` scores also depend on γ(x_i − x_j) and |x_i − x_j|. A measure ω adds log ω_j to scores: the
    sums of the softmax are then integrals.
    """

    def __init__(self, config: ITNetConfig, relative_bias: bool = False):
        super().__init__()
        self.relative_bias = relative_bias
        self.fourier = ITNetFourierFeatures(config)
        self.lift = nn.Linear(config.signal_feature_size, config.hidden_size)
        self.position_projection = nn.Linear(self.fourier.size, config.hidden_size, bias=False)
        pair_size = self.fourier.size + 1 if relative_bias else 0
        self.layers = nn.ModuleList(AttentionLayer(config, pair_size) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.regressor = nn.Linear(config.hidden_size, config.num_labels)

    def forward(
        self, signal_values: Tensor, positions: Tensor, measure: Tensor | None = None, labels: Tensor | None = None
    ) -> SignalRegressionOutput:
        places = Places(positions, measure, self.fourier)
        features = self.lift(signal_values) + self.position_projection(places.gamma)
        pairs = places.pairs if self.relative_bias else None
        scores = None if measure is None else places.measure.clamp_min(torch.finfo(measure.dtype).tiny).log()
        for layer in self.layers:
            features = layer(features, pairs, scores)
        return answer(self.regressor(self.norm(features)), labels)
