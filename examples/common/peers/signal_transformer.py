"""A softmax transformer on signals, with positions as inputs and, if told, in the scores of pairs."""

from torch import Tensor, nn
from torch.nn import functional as F

from modeling_itnet import ITNetConfig

from .places import Places
from .signal_peer import SignalPeer


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

    def forward(self, features: Tensor, places: Places) -> Tensor:
        """Takes features [B, n, d] at some places to features [B, n, d]."""
        heads = self.projection(self.norm(features)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.transpose(1, 3).unbind(2)  # [B, H, n, d_h] each
        bias = None if self.bias is None else self.bias(places.pairs).movedim(-1, 1)  # [B, H, n, n]
        if places.log_measure is not None:
            scores = places.log_measure[:, None, None].expand(-1, -1, features.shape[1], -1)  # [B, 1, n, n]
            bias = scores if bias is None else bias + scores
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        features = features + self.output(attended.transpose(1, 2).flatten(2))
        return features + self.feed_forward(self.feed_forward_norm(features))


class SignalTransformer(SignalPeer):
    """Layers of softmax attention: [B, n, c] -> [B, n, num_labels].

    With ``relative_bias`` scores also depend on γ(x_i − x_j) and |x_i − x_j|. A measure ω adds log ω_j to scores: the
    sums of the softmax are then integrals.
    """

    def __init__(self, config: ITNetConfig, relative_bias: bool = False):
        self.relative_bias = relative_bias  # before `layer` asks for it
        super().__init__(config)

    def layer(self, config: ITNetConfig) -> nn.Module:
        return AttentionLayer(config, self.fourier.size + 1 if self.relative_bias else 0)
