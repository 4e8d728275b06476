"""Point Transformer (Zhao et al., 2021): vector attention over nearest neighbours, without its down-sampling."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import SequenceClassifierOutput

from modeling_itnet import ITNetConfig


class VectorAttention(nn.Module):
    """y_i = sum_j softmax_j( g(q_i - k_j + d_ij) ) * (v_j + d_ij), j over the neighbours, d_ij an MLP of x_i - x_j."""

    def __init__(self, width: int, dimension: int = 3):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.position = nn.Sequential(nn.Linear(dimension, width), nn.ReLU(), nn.Linear(width, width))
        self.weight = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, features: Tensor, offsets: Tensor, neighbors: Tensor, visible: Tensor) -> Tensor:
        """Takes features [B, n, d], offsets [B, n, K, s], neighbors and visible [B, n, K]."""
        normed = self.norm(features)
        samples = torch.arange(len(features), device=features.device)[:, None, None]
        position = self.position(offsets)  # [B, n, K, d]
        key, value = (layer(normed)[samples, neighbors] for layer in (self.key, self.value))
        scores = self.weight(self.query(normed).unsqueeze(2) - key + position)
        scores = scores.masked_fill(~visible.unsqueeze(-1), -1e9).softmax(2)
        return features + (scores * (value + position)).sum(2)


class PointTransformer(nn.Module):
    """Layers of vector attention and feed-forward networks, then the mean over points: [B, n, 3] -> [B, labels]."""

    def __init__(self, config: ITNetConfig):
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.neighbors = max(config.local_neighbors, 1)
        self.embedding = nn.Linear(3 + config.point_feature_size, width)
        self.attention = nn.ModuleList(VectorAttention(width) for _ in range(config.num_hidden_layers))
        self.feed_forward = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))
            for _ in range(config.num_hidden_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, config.num_labels)

    def forward(
        self,
        points: Tensor,
        attention_mask: Tensor,
        point_features: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> SequenceClassifierOutput:
        mask = attention_mask.bool()
        distance = torch.cdist(points, points).masked_fill(~mask.unsqueeze(1), float("inf"))
        distance, neighbors = distance.topk(min(self.neighbors, points.shape[1]), largest=False)  # [B, n, K]
        samples = torch.arange(len(points), device=points.device)[:, None, None]
        offsets = points.unsqueeze(2) - points[samples, neighbors]
        features = self.embedding(points if point_features is None else torch.cat([points, point_features], dim=-1))
        for attention, feed_forward in zip(self.attention, self.feed_forward, strict=True):
            features = attention(features, offsets, neighbors, distance.isfinite())
            features = features + feed_forward(features)
        weights = mask / mask.sum(1, keepdim=True)
        logits = self.classifier((self.norm(features) * weights.unsqueeze(-1)).sum(1))
        loss = F.cross_entropy(logits, labels) if labels is not None else None
        return SequenceClassifierOutput(loss=loss, logits=logits)
