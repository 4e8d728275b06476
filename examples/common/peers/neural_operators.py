"""FNO and GNO of the `neuraloperator` library (`pip install neuraloperator`), on the batches of ITNet."""

import torch
from neuralop.layers import integral_transform
from neuralop.layers.gno_block import GNOBlock
from neuralop.models import FNO
from torch import Tensor, nn
from torch.nn import functional as F

from modeling_itnet import ITNetConfig
from modeling_itnet.heads.signal import relative_l2
from modeling_itnet.outputs import SignalRegressionOutput


def segment_csr(src: Tensor, indptr: Tensor, reduction: str, use_scatter: bool = True) -> Tensor:
    """Returns sums or means of src [(B,) edges, c] over edges indptr[i] to indptr[i + 1] of each point: [(B,) n, c].

    The library's own needs torch-scatter or else loops over points, which takes most of a step.
    """
    counts = (indptr[0] if src.dim() == 3 else indptr).diff()
    points = torch.repeat_interleave(torch.arange(len(counts), device=src.device), counts)
    total = src.new_zeros(*src.shape[:-2], len(counts), src.shape[-1]).index_add(-2, points, src)
    return total / counts.clamp(min=1).unsqueeze(-1) if reduction == "mean" else total


integral_transform.segment_csr = segment_csr


class FourierNeuralOperator(nn.Module):
    """FNO (Li et al., 2021) on a square grid, or on a line: [B, n^s, c] -> [B, n^s, num_labels].

    Layers and channels are those of the configuration; it keeps half of the frequencies that the training grid holds.
    """

    def __init__(self, config: ITNetConfig, modes: int = 8):
        super().__init__()
        self.dim = config.position_dim
        self.fno = FNO(
            n_modes=(modes,) * self.dim,
            in_channels=config.signal_feature_size,
            out_channels=config.num_labels,
            hidden_channels=config.hidden_size,
            n_layers=config.num_hidden_layers,
        )

    def state_dict(self, *args, **kwargs):
        """Returns tensors only: FNO adds its constructor's arguments, which safetensors cannot hold."""
        state = super().state_dict(*args, **kwargs)
        state.pop("_metadata", None)
        return state

    def forward(
        self,
        signal_values: Tensor,
        positions: Tensor | None = None,  # a regular grid, row by row: FNO knows no other
        labels: Tensor | None = None,
    ) -> SignalRegressionOutput:
        side = round(signal_values.shape[1] ** (1 / self.dim))
        if side**self.dim != signal_values.shape[1]:
            raise ValueError(f"FNO needs a grid of n^{self.dim} positions, got {signal_values.shape[1]}")
        fields = signal_values.transpose(1, 2).unflatten(2, (side,) * self.dim)
        predictions = self.fno(fields).flatten(2).transpose(1, 2)
        loss = relative_l2(predictions, labels).mean() if labels is not None else None
        return SignalRegressionOutput(loss=loss, predictions=predictions)


class GraphNeuralOperator(nn.Module):
    """GNO (Li et al., 2020): u <- u + GELU(W u + mean over |y - x| < r of k(x, y) u(y)), on positions of any kind.

    The batch shares its positions. The radius covers about 48 neighbours of a 16 x 16 grid.
    """

    def __init__(self, config: ITNetConfig, radius: float = 0.25):
        super().__init__()
        width = config.hidden_size
        self.lifting = nn.Linear(config.signal_feature_size + config.position_dim, width)
        self.blocks = nn.ModuleList(
            GNOBlock(
                in_channels=width,
                out_channels=width,
                coord_dim=config.position_dim,
                radius=radius,
                reduction="mean",
                pos_embedding_channels=8,
                channel_mlp_layers=[config.intermediate_size],
                use_torch_scatter_reduce=False,
                use_open3d_neighbor_search=False,
            )
            for _ in range(config.num_hidden_layers)
        )
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(config.num_hidden_layers))
        self.projection = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, config.num_labels))

    def forward(
        self, signal_values: Tensor, positions: Tensor, labels: Tensor | None = None
    ) -> SignalRegressionOutput:
        if positions.dim() != 2:
            raise ValueError(f"GNO needs positions [n, s] that the batch shares, got {list(positions.shape)}")
        shared = positions.expand(len(signal_values), -1, -1)
        hidden = self.lifting(torch.cat([signal_values, shared], dim=-1))
        for block, linear in zip(self.blocks, self.linears, strict=True):
            hidden = hidden + F.gelu(linear(hidden) + block(y=positions, x=positions, f_y=hidden))
        predictions = self.projection(hidden)
        loss = relative_l2(predictions, labels).mean() if labels is not None else None
        return SignalRegressionOutput(loss=loss, predictions=predictions)
