"""What peers on signals share: a lift of values and positions, layers, a linear map at every position."""

import torch
from torch import Tensor, nn

from modeling_itnet import ITNetConfig
from modeling_itnet.heads.signal import relative_l2
from modeling_itnet.operator import ITNetFourierFeatures
from modeling_itnet.outputs import SignalRegressionOutput

from .places import Places


class SignalPeer(nn.Module):
    """Layers on W a(x) + b + W_pos γ(x), a layer norm, and a linear map: [B, n, c] -> [B, n, num_labels].

    Subclasses say what a layer is: `layer(config)` makes a module that takes features [B, n, d] and :class:`Places`.
    """

    def __init__(self, config: ITNetConfig):
        super().__init__()
        self.fourier = ITNetFourierFeatures(config)
        self.lift = nn.Linear(config.signal_feature_size, config.hidden_size)
        self.position_projection = nn.Linear(self.fourier.size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(self.layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.regressor = nn.Linear(config.hidden_size, config.num_labels)

    def layer(self, config: ITNetConfig) -> nn.Module:
        raise TypeError(f"{type(self).__name__} does not say what a layer is")

    def forward(
        self,
        signal_values: Tensor,  # a(x) [B, n, c]
        positions: Tensor,  # [B, n, s]
        measure: Tensor | None = None,  # quadrature weights [B, n]; default: uniform
        labels: Tensor | None = None,
    ) -> SignalRegressionOutput:
        places = Places(positions, measure, self.fourier)
        features = self.lift(signal_values) + self.position_projection(places.gamma)
        for layer in self.layers:
            features = layer(features, places)
        return answer(self.regressor(self.norm(features)), labels)


class FeedForward(nn.Sequential):
    """Layer norm and an MLP of one hidden layer: [..., d] -> [..., d]."""

    def __init__(self, config: ITNetConfig):
        size, inner = config.hidden_size, config.intermediate_size
        super().__init__(nn.LayerNorm(size), nn.Linear(size, inner), nn.GELU(), nn.Linear(inner, size))


def answer(predictions: Tensor, labels: Tensor | None) -> SignalRegressionOutput:
    loss = None if labels is None else relative_l2(predictions, labels).mean()
    return SignalRegressionOutput(loss=loss, predictions=predictions)


def in_heads(features: Tensor, num_heads: int) -> Tensor:
    """Turns [B, n, H d_h] into [B, H, n, d_h]."""
    return features.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def beside(heads: Tensor) -> Tensor:
    """Turns [B, H, n, d_h] into [B, n, H d_h]."""
    return heads.transpose(1, 2).flatten(2)


class PointwiseMLP(SignalPeer):
    """Every position by itself, a trivial baseline: it knows nothing of the rest of the signal."""

    def layer(self, config: ITNetConfig) -> nn.Module:
        return _Alone(config)


class _Alone(nn.Module):
    def __init__(self, config: ITNetConfig):
        super().__init__()
        self.feed_forward = FeedForward(config)

    def forward(self, features: Tensor, places: Places) -> Tensor:
        return features + self.feed_forward(features)


class SignalPointNet(SignalPeer):
    """PointNet (Qi et al., 2017) for a value at every point, as its segmentation network.

    A layer is an MLP at every point that also sees the maximum and the mean of all points.
    """

    def layer(self, config: ITNetConfig) -> nn.Module:
        return _Pooled(config)


class _Pooled(nn.Module):
    def __init__(self, config: ITNetConfig):
        super().__init__()
        size = config.hidden_size
        self.norm, self.own, self.pooled = nn.LayerNorm(size), nn.Linear(size, size), nn.Linear(2 * size, size)
        self.feed_forward = FeedForward(config)

    def forward(self, features: Tensor, places: Places) -> Tensor:
        normed = self.norm(features)
        mean = (normed * places.measure.unsqueeze(-1)).sum(1, keepdim=True)
        whole = self.pooled(torch.cat([normed.amax(1, keepdim=True), mean], dim=-1))
        features = features + nn.functional.gelu(self.own(normed) + whole)
        return features + self.feed_forward(features)
