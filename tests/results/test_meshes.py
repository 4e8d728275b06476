"""Meshes: quadrature weights, distances, solutions and symmetries against what they must be; models with measures."""

import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch


@pytest.fixture(scope="module")
def data(load_script):
    return load_script("mesh_data")


@pytest.fixture(scope="module")
def fem(load_script):
    pytest.importorskip("skfem", reason="extra `fem`")
    return load_script("fem_meshes")


@pytest.fixture(scope="module")
def script(load_script):
    return load_script("mesh_problems")


def lattice(side):
    """Nodes of the unit square and its triangles, two per cell."""
    axis = np.linspace(0, 1, side)
    nodes = np.stack(np.meshgrid(axis, axis, indexing="ij"), axis=-1).reshape(-1, 2)
    corner = (np.arange(side - 1)[:, None] * side + np.arange(side - 1)).ravel()
    lower, upper = [corner, corner + 1, corner + side], [corner + 1, corner + side, corner + side + 1]
    return nodes, np.concatenate([np.stack(lower, 1), np.stack(upper, 1)])


def test_weights_integrate_linear_functions(data):
    nodes, triangles = lattice(5)
    nodes = nodes @ np.array([[1.0, 0.3], [0.1, 0.9]])  # area 0.87
    weights = data.node_measure(nodes, triangles)
    assert weights.sum() == pytest.approx(0.87)
    middle = nodes.mean(0)  # of a parallelogram: a linear function has its mean there
    assert weights @ nodes == pytest.approx(0.87 * middle)


def test_distances_are_to_segments_of_the_boundary(data):
    nodes, triangles = lattice(6)
    found = data.boundary_features(nodes, triangles)
    expected = np.minimum(nodes, 1 - nodes).min(1)
    assert found[:, 1] == pytest.approx(expected, abs=1e-12)
    assert np.array_equal(found[:, 0] == 1, expected < 1e-12)
    assert len(data.boundary_edges(triangles)) == 4 * 5


def test_solutions_converge_to_the_exact_one(fem):
    """u = sin πx sin πy solves the equation with a = 1 + x and f = π² a 2u − π cos πx sin πy."""
    errors = []
    for side in (5, 9, 17):
        nodes, triangles = lattice(side)
        found = fem.solve_darcy(
            nodes,
            triangles,
            lambda x: 1 + x[0],
            lambda x: (
                2 * math.pi**2 * (1 + x[0]) * np.sin(math.pi * x[0]) * np.sin(math.pi * x[1])
                - math.pi * np.cos(math.pi * x[0]) * np.sin(math.pi * x[1])
            ),
        )
        exact = np.sin(math.pi * nodes[:, 0]) * np.sin(math.pi * nodes[:, 1])
        errors.append(np.abs(found - exact).max())
    assert errors[0] > 6 * errors[1] > 36 * errors[2]  # at least of third order, but for a constant
    assert errors[2] < 1e-4


def test_samples_are_meshes_of_their_own(fem, data):
    samples = fem.draw_samples(3, 8, fem.GRADED, 7)
    assert samples.values.shape == (3, 64, 4) and samples.labels.shape == (3, 64, 1)
    assert not torch.allclose(samples.positions[0], samples.positions[1], atol=1e-3)
    torch.testing.assert_close(samples.measure.sum(1), torch.ones(3))
    on_boundary = samples.values[..., 2] == 1
    assert (on_boundary.sum(1) == 28).all() and not samples.labels[on_boundary].any()
    assert samples.labels[~on_boundary].all() and (samples.values[..., 3][~on_boundary] > 0).all()
    again = fem.draw_samples.__wrapped__(3, 8, fem.GRADED, 7)
    assert torch.equal(again.labels, samples.labels)
    other = fem.draw_samples(3, 8, fem.GRADED, 8)
    assert not torch.equal(other.labels, samples.labels)
    assert samples.positions.min() >= 0 and samples.positions.max() <= 1


def test_shifted_densities_are_far_from_those_of_training(fem):
    """The largest weight of an inner node over the smallest: what a uniform measure gets wrong."""
    ratios = []
    for grading in (fem.GRADED, fem.STRONGLY):
        samples = fem.draw_samples(4, 10, grading, 3)
        inner = samples.values[..., 2] == 0
        ratios.append(
            np.median([(w[i].max() / w[i].min()).item() for w, i in zip(samples.measure, inner, strict=True)])
        )
    assert ratios[1] > 2 * ratios[0]


def random_samples(data, count=3, nodes=20):
    generator = np.random.default_rng(0)
    shapes = (count, nodes, 2), (count, nodes, 2), (count, nodes), (count, nodes, 3)
    return data.tensors(*(generator.random(shape) for shape in shapes))


def test_splits_share_no_row(data):
    samples = random_samples(data, 10)
    parts = data.split(samples, 5, 2)
    assert [len(part) for part in parts.values()] == [5, 2, 3]
    rows = [tuple(part.values[row].flatten().tolist()) for part in parts.values() for row in range(len(part))]
    assert len(set(rows)) == 10
    torch.testing.assert_close(parts["train"].labels.square().mean((0, 1)), torch.ones(3))


def test_groups_stay_together(data):
    samples = random_samples(data, 12)
    groups = np.array([0, 0, 0, 1, 1, 2, 3, 3, 4, 4, 4, 5])
    parts = data.split(samples, 4, 3, groups)
    found = [
        {groups[i].item() for row in part.values for i in range(12) if torch.equal(row, samples.values[i])}
        for part in parts.values()
    ]
    assert set.union(*found) == set(range(6)) and sum(map(len, found)) == 6
    assert len(parts["train"]) >= 4 and len(parts["validation"]) >= 3 and len(parts["test"]) > 0


def test_mirror_images_of_bodies_are_alike(data, tmp_path):
    """Three bodies, the second a mirror image of the first, among three nodes of flow."""
    first = np.array([[0.0, 0.0], [1.0, 0.2], [0.3, 1.0]])
    second, third = first * [1, -1] + [0, 1], np.array([[0.0, 0.5], [1.0, 0.0], [1.0, 1.0]])
    positions = np.stack([np.concatenate([body, [[2, 2], [3, 2], [2, 3]]]) for body in (first, second, third)])
    flow = np.concatenate([np.zeros((3, 3)), np.ones((3, 3))], axis=1)
    np.savez(tmp_path / "flow_past_shapes.npz", positions=positions, p=flow, u=flow, v=flow)
    found = data.bodies_alike(tmp_path).tolist()
    assert found[0] == found[1] != found[2]


def test_holes_that_motions_map_onto_each_other_are_alike(data, tmp_path):
    corners = np.array([[0.1, 0.2], [0.6, 0.2], [0.2, 0.1], [0.5, 0.6], [0.35, 0.35], [0.1, 0.35], [0.1, 0.6]])
    np.savez(tmp_path / "holed_poisson.npz", mu=corners)
    found = data.holes_alike(tmp_path).tolist()
    assert found[0] == found[1] == found[2] == found[3] and len(set(found)) == 4


def test_nodes_are_drawn_with_all_that_belongs_to_them(data, script):
    samples = random_samples(data)
    few = script.drawn(samples, 7, torch.Generator().manual_seed(0))
    torch.testing.assert_close(few.measure.sum(1), torch.ones(3))
    for row in range(3):
        for node in range(7):
            place = (samples.positions[row] == few.positions[row, node]).all(-1).nonzero().item()
            assert torch.equal(few.values[row, node], samples.values[row, place])
            assert torch.equal(few.labels[row, node], samples.labels[row, place])
        assert len({tuple(x) for x in few.positions[row].tolist()}) == 7
    assert script.drawn(samples, None, None) is samples


def test_motions_move_positions_and_vectors(data, script):
    samples = random_samples(data, 8)
    turned = samples.turned(script.MOTIONS, slice(1, 3))
    assert len({tuple(m.flatten().tolist()) for m in script.MOTIONS}) == 8
    for row, motion in enumerate(script.MOTIONS):
        assert torch.equal(motion @ motion.T, torch.eye(2))
        moved = torch.stack([motion @ (x - 0.5) + 0.5 for x in samples.positions[row]])
        torch.testing.assert_close(turned.positions[row], moved)
        vectors = torch.stack([motion @ v for v in samples.labels[row, :, 1:]])
        torch.testing.assert_close(turned.labels[row, :, 1:], vectors)
    assert torch.equal(turned.labels[..., 0], samples.labels[..., 0])
    assert torch.equal(samples.turned(script.MOTIONS, None).labels, samples.labels)


def test_motions_are_symmetries_of_the_equation(fem, script):
    """The solution of a moved problem is the moved solution."""
    generator = np.random.default_rng(5)
    nodes, triangles = fem.draw_mesh(7, fem.GRADED, generator)
    waves = [fem.Waves.draw(generator, 0.5, 1.5) for _ in range(2)]
    before = fem.solve_darcy(nodes, triangles, lambda x: np.exp(waves[0](x)), waves[1])
    for motion in script.MOTIONS.double().numpy()[1:6:2]:

        def back(x, motion=motion):
            return np.tensordot(motion.T, x - 0.5, 1) + 0.5

        after = fem.solve_darcy(
            (nodes - 0.5) @ motion.T + 0.5,
            triangles,
            lambda x, back=back: np.exp(waves[0](back(x))),
            lambda x, back=back: waves[1](back(x)),
        )
        assert after == pytest.approx(before, rel=1e-8, abs=1e-12)


@pytest.fixture(scope="module")
def small(fem, script):
    problem = script.problems(Path("data"))["darcy-meshes"]
    return replace(
        problem,
        **{"steps": 2, "tuning_steps": 1, "batch_size": 2, "parameters": 9000, "budget": 2, "curve": 1},
        shared={**problem.shared, "num_hidden_layers": 1, "num_fourier_features": 4},
        load=partial(fem.deformed_darcy, 4, 4, 5),
        seeds=(1, 2),
    )


def test_every_model_makes_a_row(load_script, small, tmp_path):
    """With and without the measure; the measure matters to each that sees it, and to no other."""
    protocol = load_script("protocol")
    batch = small.batch(1, 1)
    other = {**batch, "measure": batch["measure"].flip(1)}
    for model, rival in small.contestants.items():
        tuned = rival.tuned_as or model
        point = protocol.Point(
            1e-3, tuple(v[0] if n != "num_hidden_layers" else 1 for n, v in small.space(tuned).knobs.items())
        )
        problem = small.at(model, point)
        built = problem.build(model).eval()
        count = sum(parameter.numel() for parameter in built.parameters())
        assert abs(count - 9000) < 0.25 * 9000, (model, count)
        inputs = [{k: v for k, v in given.items() if k != "labels"} for given in (batch, other)]
        with torch.no_grad():
            first, second = (built(**given).predictions for given in inputs)
        sees = not rival.tuned_as and model != "mlp"
        assert first.shape == batch["labels"].shape
        assert torch.equal(first, second) != sees, model
    log = protocol.Entry.of(small, "gno", protocol.Point(1e-3, small.space("gno").start), 1).run(tmp_path)
    assert list(log["test"]) == ["as trained", "4 × finer", "shifted density", "4 × finer, shifted"]
    assert all(len(errors) == (2 if "finer" in test else 4) for test, errors in log["test_errors"].items())


def test_errors_are_integrals(load_script):
    models = load_script("field_models")
    predictions, labels = torch.randn(2, 5, 3).double(), torch.randn(2, 5, 3).double()
    measure = torch.rand(2, 5).double()
    found = models.weighted_errors(predictions, labels, measure)
    for row in range(2):
        above = sum(measure[row, i] * ((predictions - labels)[row, i] ** 2).sum() for i in range(5))
        below = sum(measure[row, i] * (labels[row, i] ** 2).sum() for i in range(5))
        assert found[row].item() == pytest.approx(math.sqrt(above / below))


def test_baselines(data, script):
    """On a linear problem with nodes of their own, ridge regression is exact, and the nearest sample is not."""
    generator = torch.Generator().manual_seed(0)
    nodes = torch.rand(6, 2, generator=generator)
    values = torch.randn(30, 6, 2, generator=generator)
    labels = (values.flatten(1) @ torch.randn(12, 6, generator=generator)).unsqueeze(-1)
    samples = data.Samples(values, nodes.expand(30, 6, 2), torch.full((30, 6), 1 / 6), labels)
    problem = replace(
        script.problems(Path("data"))["linear-elastic"], load=lambda: data.split(samples, 20, 5), num_nodes=None
    )
    found = problem.trivial()
    assert found["ridge regression"]["test"].max() < 1e-3
    assert found["nearest training sample"]["test"].mean() > 0.3
    assert 0.5 < found["mean of all nodes"]["test"].mean() < 1.5
    few = replace(problem, num_nodes=4)
    assert list(few.trivial()["ridge regression"]) == ["test, n = 6"]


def test_missing_files_say_how_to_get_them(load_script, data, tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"holed_poisson.npz: python examples/data/download.py meshes"):
        data.holed_poisson(tmp_path)
    monkeypatch.setitem(sys.modules, "skfem", None)
    with pytest.raises(ImportError):
        load_script("fem_meshes").solve_darcy(*lattice(3), None, None)
