"""Graph isomorphism network (Xu et al., 2019)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import SequenceClassifierOutput

from modeling_itnet import ITNetConfig


class GIN(nn.Module):
    """h_i <- MLP((1 + eps) h_i + sum of h over neighbours of i); sums over nodes of all layers are read out."""

    def __init__(self, config: ITNetConfig):
        super().__init__()
        width, depth = config.hidden_size, config.num_hidden_layers
        self.types = nn.Embedding(config.num_node_types, width) if config.num_node_types else None
        self.features = nn.Linear(config.node_feature_size, width) if self.types is None else None
        self.epsilon = nn.Parameter(torch.zeros(depth))
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, config.intermediate_size), nn.ReLU()) for _ in range(depth)
        )
        self.outputs = nn.ModuleList(nn.Linear(config.intermediate_size, width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(depth))
        self.readouts = nn.ModuleList(nn.Linear(width, config.num_labels) for _ in range(depth + 1))
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        neighbors: Tensor,  # [B, n, degree], -1 where a node has fewer
        attention_mask: Tensor,
        node_features: Tensor | None = None,
        node_types: Tensor | None = None,
        positions: Tensor | None = None,  # Laplacian positions: not used
        labels: Tensor | None = None,
    ) -> SequenceClassifierOutput:
        mask = attention_mask.unsqueeze(-1).float()
        hidden = (self.types(node_types) if self.types is not None else self.features(node_features)) * mask
        samples = torch.arange(len(hidden), device=hidden.device)[:, None, None]
        is_edge = (neighbors >= 0).unsqueeze(-1)
        logits = self.readouts[0](hidden.sum(1))
        for index, (layer, output, norm) in enumerate(zip(self.layers, self.outputs, self.norms, strict=True)):
            messages = (hidden[samples, neighbors.clamp_min(0)] * is_edge).sum(2)
            hidden = output(layer((1 + self.epsilon[index]) * hidden + messages))
            real = attention_mask.bool()
            normed = torch.zeros_like(hidden)
            normed[real] = norm(hidden[real])  # statistics over real nodes only
            hidden = F.relu(normed) * mask
            logits = logits + self.readouts[index + 1](self.dropout(hidden.sum(1)))
        loss = F.cross_entropy(logits, labels) if labels is not None else None
        return SequenceClassifierOutput(loss=loss, logits=logits)
