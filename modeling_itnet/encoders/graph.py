# SPDX-License-Identifier: Apache-2.0
"""The encoder of graphs: nodes lie at their Laplacian positions (s = 8 by default) and are joined by edges."""

import math

import torch
from torch import Tensor, nn
from transformers import initialization as init

from configuration_itnet import ITNetConfig
from itnet_kernels.measure import uniform_measure
from itnet_kernels.transforms import may_look_at

from ..checks import check_ids, check_mask, check_shape, input_dtype
from ..domain import Domain, Signal
from ..operator import ITNetFourierFeatures


class ITNetGraphEncoder(nn.Module):
    """u(v) = W_gph h_v + b, at the Laplacian position of node v; uniform measure over the real nodes (App. enc_graph).

    With ``num_node_types`` the features of a node are the embedding of its type instead. With ``edge_gate`` the
    operator multiplies the kernel by 1[edge] + lambda, where lambda = rho^2 is one number for the whole model, learned
    through rho. It lives here and not in the layers, which are the same for all modalities.
    """

    required = ("node_features", "node_types")
    optional = ("positions", "neighbors", "attention_mask")

    def __init__(self, config: ITNetConfig, position_size: int):
        super().__init__()
        self.position_dim = config.position_dim
        self.main_input_name = "node_types" if config.num_node_types else "node_features"
        if config.num_node_types:
            self.embedding = nn.Embedding(config.num_node_types, config.hidden_size)
        else:
            self.embedding = nn.Linear(config.node_feature_size, config.hidden_size)
            self.embedding.initialization = "xavier"
        self.gate_root = nn.Parameter(torch.empty(())) if config.edge_gate else None  # rho
        self.dropout = nn.Dropout(config.embedding_dropout_prob)

    def reset_own_parameters(self, config: ITNetConfig) -> None:
        if self.gate_root is not None:
            init.constant_(self.gate_root, math.sqrt(config.edge_gate_init))

    def input_embeddings(self) -> nn.Module:
        return self.embedding

    @property
    def edge_gate(self) -> Tensor | None:
        """lambda, the weight of pairs that no edge joins, or None if the operator ignores edges."""
        return None if self.gate_root is None else self.gate_root.square()

    def forward(
        self,
        fourier: ITNetFourierFeatures,
        node_features: Tensor | None = None,  # [B, n, c]
        node_types: Tensor | None = None,  # [B, n]
        positions: Tensor | None = None,  # [B, n, s]
        neighbors: Tensor | None = None,  # [B, n, m]
        attention_mask: Tensor | None = None,  # [B, n]
    ) -> Signal:
        nodes = self._nodes(node_features, node_types)
        batch, count = nodes.shape[:2]
        note = ", the Laplacian positions of the nodes; ITNetGraphProcessor computes them"
        check_shape(positions, "positions", [batch, count, self.position_dim], note=note)
        mask = check_mask(attention_mask, batch, count)
        features = self.embedding(nodes)
        edges = {}
        if self.gate_root is not None:
            note = ": `edge_gate` is on, which needs the edges; ITNetGraphProcessor lists them"
            check_shape(neighbors, "neighbors", [batch, count, "max degree"], note=note, may_be_empty=True)
            if may_look_at(neighbors) and not bool(((neighbors >= -1) & (neighbors < count)).all()):
                raise ValueError(f"`neighbors` must hold node indices from 0 to {count - 1}, and -1 for none")
            edges = {"neighbors": neighbors, "edge_gate": self.edge_gate}
        measure, is_padded = uniform_measure(features, mask), mask is not None
        domain = Domain(positions.float(), measure, fourier.frequencies, is_padded=is_padded, **edges)
        return Signal(self.dropout(features), domain)

    def _nodes(self, node_features: Tensor | None, node_types: Tensor | None) -> Tensor:
        """Returns the input that this model was made for, checked and in the right dtype."""
        given = node_features if self.main_input_name == "node_features" else node_types
        if given is None:
            raise ValueError(
                f"this model needs `{self.main_input_name}`: its embedding is {type(self.embedding).__name__}"
                f"({self.embedding.weight.shape[0 if self.main_input_name == 'node_types' else 1]} inputs)"
            )
        if self.main_input_name == "node_types":
            if given.dim() != 2 or given.is_floating_point():
                raise ValueError(f"`node_types` {list(given.shape)} ({given.dtype}) must be integers [batch, nodes]")
            return check_ids(given, self.embedding.weight.shape[0], "node_types", "num_node_types")
        size = self.embedding.in_features
        check_shape(given, "node_features", ["batch", "nodes", size], note=f": `node_feature_size` is {size}")
        return given.to(input_dtype(self.embedding))
