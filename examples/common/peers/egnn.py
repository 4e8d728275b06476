"""EGNN (Satorras et al., 2021): messages of distances, whose vectors turn with the positions."""

import torch
from torch import Tensor, nn

from modeling_itnet import ITNetConfig
from modeling_itnet.outputs import SignalRegressionOutput

from .signal_peer import answer


class EquivariantLayer(nn.Module):
    """Moves positions along differences of positions, by messages of all pairs:

        m_ij = φ_e(h_i, h_j, |x_i − x_j|²)
        x_i <- x_i + 1/n Σ_j (x_i − x_j) φ_x(m_ij)
        h_i <- h_i + φ_h(h_i, 1/n Σ_j m_ij)

    φ_e, φ_x and φ_h are MLPs of one hidden layer with SiLU. The first layer of φ_e is linear, so that its parts are
    taken before pairs are formed.
    """

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.receiver, self.sender = nn.Linear(width, hidden), nn.Linear(width, hidden, bias=False)
        self.distance = nn.Linear(1, hidden, bias=False)
        self.message = nn.Sequential(nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU())
        self.vector = nn.Sequential(nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, 1, bias=False))
        self.update = nn.Sequential(nn.Linear(width + hidden, hidden), nn.SiLU(), nn.Linear(hidden, width))

    def forward(self, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Turns features h [B, n, d] and positions x [B, n, s] into those of the next layer."""
        offsets = positions.unsqueeze(2) - positions.unsqueeze(1)  # [B, n, n, s]
        squares = offsets.square().sum(-1, keepdim=True)
        inner = self.receiver(features).unsqueeze(2) + self.sender(features).unsqueeze(1) + self.distance(squares)
        messages = self.message(inner)  # [B, n, n, hidden]
        moved = positions + (offsets * self.vector(messages)).mean(2)
        return features + self.update(torch.cat([features, messages.mean(2)], dim=-1)), moved


class EGNN(nn.Module):
    """Vectors at every position, by how far layers move it, times a constant: [B, n, c] -> [B, n, s].

    It takes no measure: its messages are means over particles.
    """

    def __init__(self, config: ITNetConfig):
        super().__init__()
        if config.num_labels != config.position_dim:
            raise ValueError(f"`num_labels` ({config.num_labels}) must be `position_dim` ({config.position_dim})")
        self.lift = nn.Linear(config.signal_feature_size, config.hidden_size)
        self.layers = nn.ModuleList(
            EquivariantLayer(config.hidden_size, config.intermediate_size) for _ in range(config.num_hidden_layers)
        )
        self.scale = nn.Parameter(torch.ones(()))

    def forward(
        self, signal_values: Tensor, positions: Tensor, measure: Tensor | None = None, labels: Tensor | None = None
    ) -> SignalRegressionOutput:
        features, moved = self.lift(signal_values), positions
        for layer in self.layers:
            features, moved = layer(features, moved)
        return answer(self.scale * (moved - positions), labels)
