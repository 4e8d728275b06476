# SPDX-License-Identifier: Apache-2.0
"""Turns graphs into padded batches of node features, Laplacian positions and neighbour lists."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from transformers.feature_extraction_utils import BatchFeature, FeatureExtractionMixin

from .common import CheckedSettings, as_array, stack, stack_mask
from .laplacian import laplacian_positions, neighbor_table, undirected_edges


class ITNetGraphProcessor(CheckedSettings, FeatureExtractionMixin):
    """
    Turns graphs into the inputs of ITNet models with `modality="graph"`.

    A graph is a mapping, or an object with attributes, that has

    - `edge_index` `[2, E]`: the nodes that each edge joins. Edges have no direction and count once; a self-loop makes
      a node its own neighbour.
    - `x` (or `node_features`) `[n, c]`: real features, or `node_types` (or `node_type`) `[n]`: one label per node.
    - `num_nodes`, if there are no features and some nodes at the end have no edge.
    - `y` (or `label`), optional: becomes `labels`.

    A `Data` or `Batch` of PyTorch Geometric is such an object, and a NetworkX graph is read through its nodes and
    edges, with the node attribute `x` or `node_types`. All graphs of a call have the same kind of features; without
    any, every node gets the one feature 1.

    Args:
        num_positions: Laplacian eigenvectors per node, the model's `position_dim`.
    """

    model_input_names = ["node_features", "node_types", "positions", "neighbors", "attention_mask"]

    def __init__(self, num_positions: int = 8, **kwargs):
        self.check_settings(kwargs)
        if num_positions < 1:
            raise ValueError(f"`num_positions` ({num_positions}) must be at least 1")
        super().__init__(num_positions=num_positions, **kwargs)

    @classmethod
    def from_model_config(cls, config) -> "ITNetGraphProcessor":
        return cls(num_positions=config.position_dim)

    def __call__(
        self,
        graphs: Any,
        flip_signs: bool = False,
        generator: np.random.Generator | None = None,
        return_tensors: str | None = None,
    ) -> BatchFeature:
        """
        Args:
            graphs: One graph, a list of graphs, or a PyTorch Geometric `Batch`.
            flip_signs: Negate every eigenvector of every graph with probability 1/2: an augmentation for training, as
                the sign of an eigenvector means nothing.
            generator: Source of these signs.
            return_tensors: `"pt"` or `"np"`.

        Returns:
            `node_features` `[B, n, c]` or `node_types` `[B, n]`, `positions` `[B, n, num_positions]`, `neighbors`
            `[B, n, max degree]` (-1 where a node has fewer), `attention_mask` `[B, n]`, and `labels` if they have `y`.
        """
        parsed = [_parse(graph, index) for index, graph in enumerate(_as_list(graphs))]
        names, features, edges, labels = zip(*parsed, strict=True)
        kinds = {(name, array.shape[1:]) for name, array in zip(names, features, strict=True)}
        if len(kinds) > 1:
            raise ValueError(f"all graphs of a batch need features of the same kind and size, got {sorted(kinds)}")
        missing = [index for index, label in enumerate(labels) if label is None]
        if 0 < len(missing) < len(labels):
            raise ValueError(f"graph(s) {missing} have no `y`, but the others have: all need a label, or none")
        counts = [len(array) for array in features]
        positions = [laplacian_positions(*of, self.num_positions) for of in zip(edges, counts, strict=True)]
        if flip_signs:
            generator, signs = generator or np.random.default_rng(), np.float32([-1, 1])
            positions = [array * generator.choice(signs, size=self.num_positions) for array in positions]
        degree = max(np.bincount(pairs[0]).max(initial=1) for pairs in edges)
        data = {
            names[0]: stack(features),
            "positions": stack(positions),
            "neighbors": np.stack([neighbor_table(pairs, max(counts), degree) for pairs in edges]),
            "attention_mask": stack_mask(features),
        }
        if not missing:
            data["labels"] = np.stack(labels)
        return BatchFeature(data, tensor_type=return_tensors)


def _as_list(graphs: Any) -> list:
    if hasattr(graphs, "to_data_list"):  # a Batch of PyTorch Geometric
        graphs = graphs.to_data_list()
    graphs = list(graphs) if isinstance(graphs, (list, tuple)) else [graphs]
    if not graphs:
        raise ValueError("`graphs` is empty; at least one graph is needed")
    return graphs


def _parse(graph: Any, index: int) -> tuple[str, np.ndarray, np.ndarray, Any]:
    """Returns the name and the values of the node features, the undirected edges, and the label of a graph."""
    if hasattr(graph, "nodes") and hasattr(graph, "edges") and not hasattr(graph, "edge_index"):
        graph = _from_networkx(graph)
    read = graph.get if isinstance(graph, Mapping) else lambda name: getattr(graph, name, None)

    def first(*names: str) -> Any:
        return next((value for value in map(read, names) if value is not None), None)

    if read("edge_index") is None:
        raise ValueError(f"graph {index} has no `edge_index`: an array [2, edges] of the nodes that each edge joins")
    edges = as_array(read("edge_index"), f"`edge_index` of graph {index}")
    edges = edges if edges.size > 0 else np.zeros((2, 0), dtype=np.int64)
    if edges.ndim != 2 or len(edges) != 2 or not np.issubdtype(edges.dtype, np.integer):
        got = f"{edges.dtype} {list(edges.shape)}"
        raise ValueError(f"`edge_index` of graph {index} must be integers [2, edges], got {got}")
    features, types, count = first("x", "node_features"), first("node_types", "node_type"), first("num_nodes")
    name, array = ("node_types", types) if types is not None else ("node_features", features)
    if array is None:
        if count is None and edges.size == 0:
            missing = "has no features, edges or `num_nodes`"
            raise ValueError(f"graph {index} {missing}: nothing says how many nodes it has")
        array = np.ones((int(edges.max()) + 1 if count is None else int(count), 1))
    array = as_array(array, f"`{name}` of graph {index}")
    got = f"{array.dtype} {list(array.shape)}"
    if name == "node_features":
        if array.ndim != 2 or not np.isfinite(array).all():
            raise ValueError(f"`x` of graph {index} must be finite numbers [nodes, features], got {got}")
        array = array.astype(np.float32)
    elif array.ndim != 1 or not np.issubdtype(array.dtype, np.integer) or (array < 0).any():
        raise ValueError(f"`node_types` of graph {index} must be integers [nodes] from 0, got {got}")
    nodes = len(array)
    if nodes == 0:
        raise ValueError(f"graph {index} has no nodes; at least one is needed")
    if count is not None and int(count) != nodes:
        raise ValueError(f"`num_nodes` ({count}) of graph {index} must be {nodes}, the rows of `{name}`")
    if edges.size and (edges.min() < 0 or edges.max() >= nodes):
        named = f"names nodes {edges.min()} to {edges.max()}"
        raise ValueError(f"`edge_index` of graph {index} {named}, but it has {nodes} nodes")
    label = first("y", "label")
    label = None if label is None else np.asarray(label)
    if label is not None and label.size == 1:
        label = label.reshape(())  # a single class index comes as [1] from PyTorch Geometric
    return name, array, undirected_edges(edges.astype(np.int64)), label


def _from_networkx(graph: Any) -> dict:
    number = {node: index for index, node in enumerate(graph.nodes)}
    edges = np.array([(number[a], number[b]) for a, b, *_ in graph.edges], dtype=np.int64).reshape(-1, 2)
    found: dict = {"edge_index": edges.T, "num_nodes": len(number)}
    for name in ("x", "node_types"):
        values = [attributes[name] for _, attributes in graph.nodes(data=True) if name in attributes]
        if len(values) == len(number) > 0:
            found[name] = np.array(values)
    return found
