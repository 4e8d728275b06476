"""Fourier neural operator (Li et al., 2021) for scattered positions of the unit square: on a grid in between."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from modeling_itnet import ITNetConfig
from modeling_itnet.operator import ITNetFourierFeatures
from modeling_itnet.outputs import SignalRegressionOutput

from .places import Places
from .signal_peer import FeedForward, answer


def grid_weights(positions: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Returns the four nodes around each position of [0, 1]² and their bilinear weights, [B, n, 4] each.

    Node (a, b) of the side × side grid is at (a, b) / (side − 1) and has the number a side + b.
    """
    scaled = positions.clamp(0, 1) * (side - 1)
    corner = scaled.floor().clamp(max=side - 2)
    part = scaled - corner  # [B, n, 2]
    first, second = corner.long().unbind(-1)
    nodes = torch.stack([(first + a) * side + second + b for a in (0, 1) for b in (0, 1)], dim=-1)
    along = [torch.stack([1 - part[..., axis], part[..., axis]], dim=-1) for axis in (0, 1)]  # [B, n, 2] each
    return nodes, (along[0].unsqueeze(-1) * along[1].unsqueeze(-2)).flatten(-2)


def to_grid(features: Tensor, measure: Tensor, nodes: Tensor, weights: Tensor, side: int) -> Tensor:
    """Means of features [B, n, d] around every node, weighted by measure and nearness, or 0: [B, d, g, g]."""
    batch, size = features.shape[0], features.shape[2]
    weights = weights * measure.unsqueeze(-1)
    places = nodes.flatten(1)
    mass = weights.new_zeros(batch, side * side).scatter_add(1, places, weights.flatten(1))
    spread = (weights.unsqueeze(-1) * features.unsqueeze(2)).flatten(1, 2)  # [B, 4n, d]
    total = features.new_zeros(batch, side * side, size).scatter_add(1, places.unsqueeze(-1).expand_as(spread), spread)
    means = total / mass.clamp_min(torch.finfo(mass.dtype).tiny).unsqueeze(-1)
    return means.where(mass.unsqueeze(-1) > 0, 0.0).transpose(1, 2).unflatten(2, (side, side))


def from_grid(fields: Tensor, nodes: Tensor, weights: Tensor) -> Tensor:
    """Interpolates [B, d, g, g] bilinearly at positions: [B, n, d]."""
    values = fields.flatten(2).transpose(1, 2)  # [B, g², d]
    places = nodes.flatten(1).unsqueeze(-1).expand(-1, -1, values.shape[-1])
    return (values.gather(1, places).unflatten(1, nodes.shape[1:]) * weights.unsqueeze(-1)).sum(2)


class SpectralConvolution(nn.Module):
    """F⁻¹ of F(v)_k R_k at frequencies −m <= k_1 < m and 0 <= k_2 < m, else of 0: [B, d, g, g] -> the same."""

    def __init__(self, width: int, modes: int):
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(2, width, width, modes, modes, 2) / width)  # rows k_1 >= 0 and < 0

    def forward(self, fields: Tensor) -> Tensor:
        spectrum, m = torch.fft.rfft2(fields, norm="forward"), self.modes
        out = torch.zeros_like(spectrum)
        weight = torch.view_as_complex(self.weight)
        out[:, :, :m, :m] = torch.einsum("bcij,cdij->bdij", spectrum[:, :, :m, :m], weight[0])
        out[:, :, -m:, :m] = torch.einsum("bcij,cdij->bdij", spectrum[:, :, -m:, :m], weight[1])
        return torch.fft.irfft2(out, s=fields.shape[-2:], norm="forward")


class SignalFNO(nn.Module):
    """Lift, bilinear means on a grid, Fourier layers, bilinear interpolation back: [B, n, c] -> [B, n, num_labels].

    The grid has ``side`` nodes along each side; layers see its frequencies below ``modes``.
    """

    def __init__(self, config: ITNetConfig, side: int = 32, modes: int = 8):
        super().__init__()
        if config.position_dim != 2:
            raise ValueError(f"`position_dim` ({config.position_dim}) must be 2: FNO has a grid of the unit square")
        if 2 * modes > side:
            raise ValueError(f"`modes` ({modes}) must be at most half of `side` ({side})")
        size, self.side = config.hidden_size, side
        self.fourier = ITNetFourierFeatures(config)
        self.lift = nn.Linear(config.signal_feature_size, size)
        self.position_projection = nn.Linear(self.fourier.size, size, bias=False)
        layers = range(config.num_hidden_layers)
        self.spectral = nn.ModuleList(SpectralConvolution(size, modes) for _ in layers)
        self.own = nn.ModuleList(nn.Conv2d(size, size, 1) for _ in layers)
        self.feed_forward = FeedForward(config)
        self.regressor = nn.Linear(size, config.num_labels)

    def forward(
        self, signal_values: Tensor, positions: Tensor, measure: Tensor | None = None, labels: Tensor | None = None
    ) -> SignalRegressionOutput:
        places = Places(positions, measure, self.fourier)
        features = self.lift(signal_values) + self.position_projection(places.gamma)
        nodes, weights = grid_weights(positions, self.side)
        fields = to_grid(features, places.measure, nodes, weights, self.side)
        for spectral, own in zip(self.spectral, self.own, strict=True):
            fields = fields + F.gelu(spectral(fields) + own(fields))
        features = features + from_grid(fields, nodes, weights)
        return answer(self.regressor(features + self.feed_forward(features)), labels)
