"""Small models of every modality and kind of kernel, with inputs: what the pages of the tests show."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from modeling_itnet import (
    ITNetConfig,
    ITNetForCausalLM,
    ITNetForGraphClassification,
    ITNetForImageClassification,
    ITNetForPointCloudClassification,
    ITNetForSequenceClassification,
    ITNetForSignalRegression,
    ITNetForVisualQuestionAnswering,
    ITNetGraphProcessor,
)

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "num_fourier_features": 3,
    "fourier_scale": 1.0,
    "kernel_hidden_size": 10,
    "kernel_init_scale": 1.0,
    "image_size": 16,
    "patch_size": 4,
    "vocab_size": 40,
    "max_position_embeddings": 32,
    "num_labels": 3,
    "rank": 3,
}


class Case(NamedTuple):
    model: type
    settings: dict
    inputs: Callable[[], dict[str, Tensor]]

    def make(self) -> tuple[nn.Module, dict[str, Tensor]]:
        """The model, with random weights that matter, and its inputs."""
        torch.manual_seed(0)
        model = self.model(ITNetConfig(**SIZES | self.settings)).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".operator." in name:  # untrained kernels are nearly constant
                    parameter.add_(0.3 * torch.randn_like(parameter))
        return model, self.inputs()


def images() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 16, 16)}


def tokens(length: int = 14) -> dict[str, Tensor]:
    """Two texts, of which the second has padding."""
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, -3:] = 0
    return {"input_ids": torch.randint(0, 40, (2, length)), "attention_mask": mask}


def cloud(count: int = 40) -> dict[str, Tensor]:
    mask = torch.ones(2, count, dtype=torch.long)
    mask[1, -4:] = 0
    return {"points": 2 * torch.rand(2, count, 3) - 1, "attention_mask": mask}


def mesh() -> dict[str, Tensor]:
    weights = torch.rand(1, 30) + 0.2
    return {"signal_values": torch.randn(1, 30, 2), "positions": torch.rand(30, 2), "measure": weights}


def line() -> dict[str, Tensor]:
    return {"signal_values": torch.randn(1, 20, 2), "positions": torch.linspace(0, 1, 20)[:, None]}


def graph() -> dict[str, Tensor]:
    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 2], [1, 2, 3, 4, 5, 0, 6, 7]])
    other = {"edge_index": torch.tensor([[0, 1], [1, 2]]), "x": torch.randn(3, 4)}
    graphs = [{"edge_index": edges, "x": torch.randn(8, 4)}, other]
    return dict(ITNetGraphProcessor(num_positions=4)(graphs, return_tensors="pt"))


def question() -> dict[str, Tensor]:
    return images() | tokens(6)


GRAPH = {"modality": "graph", "position_dim": 4, "node_feature_size": 4, "edge_gate": True}
CAUSAL = {"modality": "text", "is_causal": True, "near_size": 4}
SIGNAL = {"modality": "signal", "signal_feature_size": 2}
VECTOR = {"integration_mode": "low_rank", "factor_form": "vector"}
MATRIX = {"factor_form": "matrix"}
NEAR = {"integration_mode": "near_far"}
EXACT = {"integration_mode": "exact"}

CASES = {
    "image": Case(ITNetForImageClassification, {"modality": "image", "pooling": "cls"} | EXACT, images),
    "text": Case(ITNetForSequenceClassification, {"modality": "text", "kernel_num_layers": 3} | EXACT, tokens),
    "causal-text": Case(ITNetForCausalLM, CAUSAL | NEAR | MATRIX | {"factor_decay": True}, tokens),
    "points": Case(ITNetForPointCloudClassification, {"modality": "point_cloud", "local_neighbors": 4} | EXACT, cloud),
    "mesh": Case(ITNetForSignalRegression, SIGNAL | {"position_dim": 2, "num_fourier_features": 0} | EXACT, mesh),
    "graph": Case(ITNetForGraphClassification, GRAPH | EXACT, graph),
    "image-text": Case(ITNetForVisualQuestionAnswering, {"modality": "multimodal"} | EXACT, question),
    "line": Case(ITNetForSignalRegression, SIGNAL | {"position_dim": 1, "kernel_input_sharing": "per_head"}, line),
    "image-near": Case(ITNetForImageClassification, {"modality": "image", "near_size": 9} | NEAR, images),
    "causal-low-rank": Case(ITNetForCausalLM, CAUSAL | VECTOR | {"factor_decay": True}, tokens),
    "causal-anchors": Case(ITNetForCausalLM, CAUSAL | {"integration_mode": "monte_carlo", "num_samples": 4}, tokens),
    "points-low-rank": Case(ITNetForPointCloudClassification, {"modality": "point_cloud"} | VECTOR, cloud),
    "graph-near": Case(ITNetForGraphClassification, GRAPH | NEAR | MATRIX, graph),
    "mesh-anchors": Case(
        ITNetForSignalRegression,
        SIGNAL | {"position_dim": 2, "integration_mode": "monte_carlo", "num_samples": 5},
        mesh,
    ),
}
