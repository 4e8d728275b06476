"""PointNet (Qi et al., 2017) without its alignment networks."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import SequenceClassifierOutput

from modeling_itnet import ITNetConfig


class PointNet(nn.Module):
    """One MLP on every point, the maximum over points, another MLP: [B, n, 3] -> [B, num_labels].

    Depth and width are those of the configuration; the pooled features have the feed-forward width.
    """

    def __init__(self, config: ITNetConfig):
        super().__init__()
        width, pooled = config.hidden_size, config.intermediate_size
        sizes = [3 + config.point_feature_size] + [width] * (config.num_hidden_layers - 1) + [pooled]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.norms = nn.ModuleList(nn.BatchNorm1d(size) for size in sizes[1:])
        self.head = nn.Sequential(nn.Linear(pooled, pooled), nn.ReLU(), nn.Linear(pooled, config.num_labels))

    def forward(
        self,
        points: Tensor,
        attention_mask: Tensor,
        point_features: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> SequenceClassifierOutput:
        features = points if point_features is None else torch.cat([points, point_features], dim=-1)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            features = F.relu(norm(layer(features).transpose(1, 2)).transpose(1, 2))
        features = features.masked_fill(attention_mask.unsqueeze(-1) == 0, float("-inf")).amax(1)
        logits = self.head(features)
        loss = F.cross_entropy(logits, labels) if labels is not None else None
        return SequenceClassifierOutput(loss=loss, logits=logits)
