# SPDX-License-Identifier: Apache-2.0
"""Computes positions for the nodes of a graph: eigenvectors of its normalised Laplacian (App. enc_graph)."""

import numpy as np

try:
    from scipy.sparse import coo_array
    from scipy.sparse.linalg import eigsh
except ImportError:  # only large graphs need it
    eigsh = None

#: Components of up to this many nodes are solved densely.
DENSE_MAX_NODES = 512
# Entries of an eigenvector whose magnitudes differ by less than this count as equal.
_TIE = 1e-6


def undirected_edges(edge_index: np.ndarray) -> np.ndarray:
    """Returns both directions of every edge, each once, sorted by (from, to): [2, E]. Self-loops stay."""
    return np.unique(np.concatenate([edge_index, edge_index[::-1]], axis=1), axis=1)


def neighbor_table(edges: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Lists the nodes next to each node, ascending, then -1, from :func:`undirected_edges`: [rows, columns]."""
    table = np.full((rows, columns), -1, dtype=np.int64)
    begin = np.searchsorted(edges[0], edges[0])  # number of the first edge from the same node
    table[edges[0], np.arange(edges.shape[1]) - begin] = edges[1]
    return table


def laplacian_positions(edges: np.ndarray, num_nodes: int, size: int) -> np.ndarray:
    """Returns x_v = [phi_1(v); ...; phi_size(v)] [n, size], of eigenvectors phi of I - D^(-1/2) A D^(-1/2).

    - Every connected component is solved by itself. Its eigenvalue 0, whose eigenvector only holds degrees, is left
      out; the others follow in ascending order, each a unit vector on the nodes of the component.
    - A component of m nodes has m - 1 of them; further coordinates are 0. So is all of an isolated node.
    - An eigenvector may be negated: the sign is chosen so that the entry of largest magnitude is positive, the first
      of equals. Where symmetry makes magnitudes equal, or an eigenvalue is repeated, the choice depends on the order
      of the nodes; random signs in training (``flip_signs`` of the processor) teach a model not to rely on it.
    - Self-loops do not count; A holds 0 and 1.

    ``edges`` come from :func:`undirected_edges`.
    """
    positions = np.zeros((num_nodes, size))
    edges = edges[:, edges[0] != edges[1]]
    label = connected_components(edges, num_nodes)
    order = np.argsort(label, kind="stable")
    for nodes in np.split(order, np.flatnonzero(np.diff(label[order])) + 1):
        if len(nodes) > 1:
            # The edges of the component, with the numbers that its nodes have in it.
            inside = np.searchsorted(nodes, edges[:, label[edges[0]] == label[nodes[0]]])
            vectors = _eigenvectors(inside, len(nodes), size)
            magnitude = np.abs(vectors)
            leader = (magnitude > magnitude.max(axis=0) - _TIE).argmax(axis=0)  # the entry that is made positive
            positions[nodes, : vectors.shape[1]] = vectors * np.sign(vectors[leader, np.arange(vectors.shape[1])])
    return positions.astype(np.float32)


def connected_components(edges: np.ndarray, num_nodes: int) -> np.ndarray:
    """Returns the lowest node of each node's component: [n]."""
    label = np.arange(num_nodes)
    while True:
        lower = label.copy()
        np.minimum.at(lower, edges[0], label[edges[1]])
        lower = lower[lower]  # follow the label of the label, which halves the way
        if (lower == label).all():
            return label
        label = lower


def _eigenvectors(edges: np.ndarray, count: int, size: int) -> np.ndarray:
    """Returns the non-trivial eigenvectors of a connected graph, at most ``size``, as columns."""
    degree = np.bincount(edges[0], minlength=count)
    values = 1 / np.sqrt(degree[edges[0]] * degree[edges[1]])
    if count <= max(DENSE_MAX_NODES, size + 1):
        adjacency = np.zeros((count, count))
        adjacency[edges[0], edges[1]] = values
        return np.linalg.eigh(np.eye(count) - adjacency)[1][:, 1 : size + 1]
    if eigsh is None:
        raise ImportError(
            f"a graph component of {count} nodes needs the sparse solver of scipy: pip install scipy "
            f"(up to {DENSE_MAX_NODES} nodes work without)"
        )
    adjacency = coo_array((values, (edges[0], edges[1])), shape=(count, count)).tocsr()
    start = np.random.default_rng(0).standard_normal(count)  # eigsh would draw another one each time
    # The smallest eigenvalues of the Laplacian are the largest of the normalised adjacency.
    eigenvalues, vectors = eigsh(adjacency, k=size + 1, which="LA", v0=start)
    return vectors[:, np.argsort(-eigenvalues)[1:]]
