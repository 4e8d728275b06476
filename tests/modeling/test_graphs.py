"""Graphs: the edge gate against a dense loop, Laplacian positions, the processor."""

from types import SimpleNamespace

import networkx as nx
import numpy as np
import pytest
import torch

from itnet_kernels import kernel_matrices
from modeling_itnet import Domain, ITNetForGraphClassification, ITNetGraphProcessor, ITNetModel
from modeling_itnet.processing import laplacian
from modeling_itnet.processing.laplacian import laplacian_positions, undirected_edges


def graph_inputs(batch=2, count=9, degree=4):
    """Random neighbours, none twice, with some -1 between them; node 0 of sample 0 has no edge."""
    neighbors = torch.stack([torch.randperm(count)[:degree] for _ in range(batch * count)]).view(batch, count, degree)
    neighbors = neighbors.where(torch.rand(neighbors.shape) < 0.7, -1)
    neighbors[0, 0] = -1
    return {
        "node_features": torch.randn(batch, count, 2),
        "positions": torch.randn(batch, count, 8) / 3,
        "neighbors": neighbors,
    }


def positions_of(graph, size=8):
    edges = np.array(list(graph.edges), dtype=np.int64).reshape(-1, 2).T
    return laplacian_positions(undirected_edges(edges), len(graph), size)


class TestEdgeGate:
    @pytest.mark.parametrize("strength", [0.0, 0.3, 1.0])
    def test_operator_against_a_dense_loop(self, tiny_config, shake, strength):
        """sum_u omega_u (1[(v, u) in E] + lambda) K_vu u_u, pair by pair; lambda = 0 leaves the edges only."""
        model = shake(ITNetModel(tiny_config("graph", node_feature_size=2, edge_gate_init=strength))).eval()
        inputs, features = graph_inputs(), torch.randn(2, 9, 16)
        operator, frequencies = model.layers[0].operator, model.fourier.frequencies
        measure = torch.rand(2, 9)
        heads = features.unflatten(-1, (2, -1))
        matrices = kernel_matrices(
            heads, heads, inputs["positions"], inputs["positions"], operator.kernel(frequencies)
        )
        integral = torch.zeros_like(heads)
        for b in range(2):
            for v in range(9):
                joined = set(inputs["neighbors"][b, v].tolist())
                for u in range(9):
                    gate = (1.0 if u in joined else 0.0) + strength
                    for h in range(2):
                        integral[b, v, h] += measure[b, u] * gate * (matrices[b, v, u, h] @ heads[b, u, h])
        expected = operator.output(integral.flatten(-2)) + operator.residual(features)
        gate = torch.tensor(strength)
        edges = {"neighbors": inputs["neighbors"], "edge_gate": gate}
        actual = operator(features, Domain(inputs["positions"], measure, frequencies, **edges))
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)

    def test_initial_value(self, tiny_config):
        for value in (0.0, 0.5, 1.0):
            encoder = ITNetModel(tiny_config("graph", edge_gate_init=value)).encoder
            torch.testing.assert_close(encoder.edge_gate.detach(), torch.tensor(value))

    def test_never_negative(self, tiny_config):
        encoder = ITNetModel(tiny_config("graph")).encoder
        with torch.no_grad():
            encoder.gate_root.fill_(-2.0)
        assert encoder.edge_gate == 4

    def test_zero_ignores_what_no_edge_joins(self, tiny_config, shake):
        """With lambda = 0 and one layer, a node feels its neighbours and itself, and nobody else."""
        config = tiny_config("graph", node_feature_size=2, num_hidden_layers=1)
        model = shake(ITNetModel(config)).eval()
        with torch.no_grad():
            model.encoder.gate_root.zero_()
        inputs = graph_inputs()
        before = model(**inputs).last_hidden_state
        inputs["node_features"][0, 5] += 1
        changed = (model(**inputs).last_hidden_state[0] - before[0]).abs().amax(-1) > 1e-6
        feels = (inputs["neighbors"][0] == 5).any(-1)
        feels[5] = True
        assert changed.tolist() == feels.tolist()

    def test_without_gate_edges_do_not_matter(self, tiny_config, shake):
        model = shake(ITNetModel(tiny_config("graph", node_feature_size=2, edge_gate=False))).eval()
        inputs = graph_inputs()
        assert model.encoder.edge_gate is None
        with_edges = model(**inputs).last_hidden_state
        del inputs["neighbors"]
        assert torch.equal(model(**inputs).last_hidden_state, with_edges)

    def test_order_of_the_nodes(self, tiny_config, shake):
        model = shake(ITNetForGraphClassification(tiny_config("graph", node_feature_size=2)), 0.1).eval()
        inputs, order = graph_inputs(), torch.randperm(9)
        number = torch.empty(10, dtype=torch.long)
        number[order] = torch.arange(9)
        number[-1] = -1  # what -1 indexes
        permuted = {name: value[:, order] for name, value in inputs.items()}
        permuted["neighbors"] = number[permuted["neighbors"]]
        torch.testing.assert_close(model(**permuted).logits, model(**inputs).logits, rtol=0, atol=1e-5)


class TestErrors:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"positions": None}, r"`positions` None must be \[2, 9, 8\]"),
            ({"neighbors": None}, r"`neighbors` None must be \[2, 9, max degree\]: `edge_gate` is on"),
            ({"neighbors": torch.full((2, 9, 1), 9)}, "node indices from 0 to 8"),
            ({"node_features": torch.randn(2, 9, 3)}, "`node_feature_size` is 2"),
            ({"node_features": None, "node_types": torch.zeros(2, 9).long()}, "needs `node_features`"),
        ],
    )
    def test_bad_input(self, tiny_config, change, message):
        inputs = {**graph_inputs(), **change}
        with pytest.raises(ValueError, match=message):
            ITNetModel(tiny_config("graph", node_feature_size=2))(**inputs)


class TestLaplacian:
    @pytest.mark.parametrize("graph", [nx.path_graph(12), nx.karate_club_graph(), nx.barbell_graph(6, 3)], ids=str)
    def test_eigenvectors(self, graph):
        positions = positions_of(graph).astype(np.float64)
        operator = nx.normalized_laplacian_matrix(graph, weight=None).toarray()
        spectrum = np.linalg.eigvalsh(operator)
        np.testing.assert_allclose(positions.T @ positions, np.eye(8), atol=1e-5)
        np.testing.assert_allclose(np.diag(positions.T @ operator @ positions), spectrum[1:9], atol=1e-5)
        np.testing.assert_allclose(operator @ positions, positions * spectrum[1:9], atol=1e-5)

    def test_sparse_solver_agrees_with_the_dense_one(self, monkeypatch):
        graph = nx.random_geometric_graph(120, 0.25, seed=1)
        dense = positions_of(graph)
        monkeypatch.setattr(laplacian, "DENSE_MAX_NODES", 20)
        np.testing.assert_allclose(positions_of(graph), dense, atol=1e-5)
        np.testing.assert_array_equal(positions_of(graph), positions_of(graph))

    def test_largest_entry_is_positive(self):
        positions = positions_of(nx.karate_club_graph())
        columns = np.arange(8)
        assert (positions[np.abs(positions).argmax(0), columns] > 0).all()

    def test_few_nodes(self):
        positions = positions_of(nx.path_graph(3))
        assert (np.abs(positions[:, :2]).max(0) > 0).all()
        assert not positions[:, 2:].any()

    def test_components_are_solved_by_themselves(self):
        whole, part = nx.disjoint_union(nx.path_graph(5), nx.karate_club_graph()), nx.karate_club_graph()
        whole.add_node(99)  # isolated
        positions = positions_of(whole)
        np.testing.assert_allclose(positions[5:-1], positions_of(part), atol=1e-6)
        np.testing.assert_allclose(positions[:5], positions_of(nx.path_graph(5)), atol=1e-6)
        assert not positions[-1].any()

    def test_no_edges(self):
        assert not positions_of(nx.empty_graph(4)).any()

    def test_self_loops_do_not_count(self):
        graph = nx.karate_club_graph()
        expected = positions_of(graph)
        graph.add_edges_from((node, node) for node in list(graph)[::3])
        np.testing.assert_array_equal(positions_of(graph), expected)

    def test_missing_scipy(self, monkeypatch):
        monkeypatch.setattr(laplacian, "DENSE_MAX_NODES", 5)
        monkeypatch.setattr(laplacian, "eigsh", None)
        with pytest.raises(ImportError, match="component of 34 nodes needs the sparse solver of scipy"):
            positions_of(nx.karate_club_graph())


class TestProcessor:
    PATH = {"edge_index": [[0, 1, 2], [1, 2, 3]], "x": np.arange(8.0).reshape(4, 2), "y": 1}
    PAIR = {
        "edge_index": [[1, 0, 1], [0, 1, 1]],
        "x": np.ones((3, 2)),
        "y": 0,
    }  # both directions, a loop, node 2 alone

    def test_batch(self):
        batch = ITNetGraphProcessor()([self.PATH, self.PAIR], return_tensors="pt")
        assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
        assert batch["neighbors"].tolist() == [
            [[1, -1], [0, 2], [1, 3], [2, -1]],
            [[1, -1], [0, 1], [-1, -1], [-1, -1]],
        ]
        assert batch["labels"].tolist() == [1, 0]
        assert batch["node_features"].shape == (2, 4, 2)
        assert not batch["node_features"][1, 3].any()
        assert batch["positions"].dtype == torch.float32
        np.testing.assert_allclose(batch["positions"][0], positions_of(nx.path_graph(4)), atol=1e-6)

    def test_padded_and_single_graphs_agree(self, tiny_config, shake):
        model = shake(ITNetForGraphClassification(tiny_config("graph", node_feature_size=2)), 0.1).eval()
        processor = ITNetGraphProcessor()
        logits = [model(**processor(graph, return_tensors="pt")).logits for graph in (self.PATH, self.PAIR)]
        together = model(**processor([self.PATH, self.PAIR], return_tensors="pt")).logits
        torch.testing.assert_close(together, torch.cat(logits), rtol=0, atol=1e-5)

    def test_types(self):
        graph = {"edge_index": [[0], [1]], "node_types": [3, 1]}
        batch = ITNetGraphProcessor()(graph, return_tensors="pt")
        assert batch["node_types"].tolist() == [[3, 1]]
        assert "labels" not in batch

    def test_objects_with_attributes(self):
        """What PyTorch Geometric's Data and Batch look like."""
        tensors = {"edge_index": torch.tensor(self.PATH["edge_index"]), "x": torch.tensor(self.PATH["x"])}
        data = SimpleNamespace(**tensors, y=torch.tensor([1]), num_nodes=4)
        batch = SimpleNamespace(to_data_list=lambda: [data, data])
        expected = ITNetGraphProcessor()([self.PATH, self.PATH])
        actual = ITNetGraphProcessor()(batch)
        for name, value in expected.items():
            np.testing.assert_array_equal(actual[name], value)

    def test_torch_geometric(self):
        geometric = pytest.importorskip("torch_geometric.data", reason="PyTorch Geometric is not installed")
        data = geometric.Data(x=torch.tensor(self.PATH["x"]), edge_index=torch.tensor(self.PATH["edge_index"]), y=1)
        actual = ITNetGraphProcessor()(geometric.Batch.from_data_list([data, data]))
        for name, value in ITNetGraphProcessor()([self.PATH, self.PATH]).items():
            np.testing.assert_array_equal(actual[name], value)

    def test_networkx(self):
        graph = nx.path_graph(4)
        nx.set_node_attributes(graph, {node: [2.0 * node, 2.0 * node + 1] for node in graph}, "x")
        actual, expected = ITNetGraphProcessor()(graph), ITNetGraphProcessor()({**self.PATH, "y": None})
        for name, value in expected.items():
            np.testing.assert_array_equal(actual[name], value)

    def test_nodes_without_features_get_a_one(self):
        batch = ITNetGraphProcessor()({"edge_index": [[0], [1]], "num_nodes": 3})
        assert batch["node_features"].tolist() == [[[1.0], [1.0], [1.0]]]

    def test_flipped_signs(self):
        processor = ITNetGraphProcessor()
        plain = processor(self.PATH)["positions"]
        flipped = processor([self.PATH] * 50, flip_signs=True, generator=np.random.default_rng(0))["positions"]
        np.testing.assert_allclose(np.abs(flipped), np.abs(plain).repeat(50, 0), atol=1e-7)
        assert 10 < (flipped[:, 0, 0] * plain[0, 0, 0] < 0).sum() < 40

    def test_save_and_load(self, tmp_path):
        processor = ITNetGraphProcessor(num_positions=3)
        processor.save_pretrained(tmp_path)
        loaded = ITNetGraphProcessor.from_pretrained(tmp_path)
        assert loaded.to_dict() == processor.to_dict()
        assert loaded(self.PATH)["positions"].shape == (1, 4, 3)

    @pytest.mark.parametrize(
        ("graph", "message"),
        [
            ([], "`graphs` is empty"),
            ({"x": np.ones((2, 1))}, "graph 0 has no `edge_index`"),
            ({"edge_index": [[0.5], [1.0]]}, r"must be integers \[2, edges\], got float64"),
            ({"edge_index": [[0, 1, 2]]}, r"must be integers \[2, edges\]"),
            ({"edge_index": [[0], [5]], "x": np.ones((2, 1))}, "names nodes 0 to 5, but it has 2 nodes"),
            ({"edge_index": [[0], [1]], "x": np.full((2, 1), np.nan)}, "must be finite numbers"),
            ({"edge_index": [[0], [1]], "node_types": [0.5, 1.0]}, "`node_types` of graph 0 must be integers"),
            ({"edge_index": [[], []]}, "nothing says how many nodes"),
            ({"edge_index": [[], []], "x": np.ones((0, 2))}, "has no nodes"),
            ([PATH, {"edge_index": [[0], [1]]}], "features of the same kind"),
        ],
    )
    def test_bad_graphs(self, graph, message):
        with pytest.raises(ValueError, match=message):
            ITNetGraphProcessor()(graph)

    def test_some_labels_are_missing(self):
        with pytest.raises(ValueError, match=r"graph\(s\) \[1\] have no `y`, but the others have"):
            ITNetGraphProcessor()([self.PATH, {**self.PATH, "y": None}, self.PATH])

    def test_num_nodes_against_features(self):
        with pytest.raises(ValueError, match=r"`num_nodes` \(5\) of graph 0 must be 3, the rows of `node_features`"):
            ITNetGraphProcessor()({"edge_index": [[0], [1]], "x": np.ones((3, 1)), "num_nodes": 5})

    def test_unknown_setting(self):
        with pytest.raises(ValueError, match="`num_position` is no argument of ITNetGraphProcessor"):
            ITNetGraphProcessor(num_position=3)
