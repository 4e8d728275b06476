"""Coordinates give the results of the positions they were made of, and compute everything once."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from itnet_kernels import (
    Coordinates,
    integral_transform,
    integrand_norms,
    kernel_matrices,
    monte_carlo_transform,
    positions,
    sampled_transform,
)

CASES = {
    "irregular": {"n": 9},
    "lattice": {"n": 36, "regular": True},
    "lattice per sample": {"n": 36, "regular": True, "per_sample": True},
    "causal": {"n": 9, "per_sample": True, "is_causal": True},
    "query domain": {"n": 36, "num_queries": 30, "regular": True, "per_sample": True},
    "raw coordinates": {"n": 36, "frequencies": 0, "regular": True},
}


def prepared(case):
    """The same problem with Coordinates instead of positions."""
    case = case.with_tensors({})
    for name in ("positions", "query_positions"):
        if getattr(case, name) is not None:
            setattr(case, name, Coordinates(getattr(case, name), case.weights.fourier))
    return case


@pytest.fixture
def searches(monkeypatch):
    """The lattices and features that were looked for or computed."""
    calls = []
    originals = {name: getattr(positions, name) for name in ("find_lattice", "fourier_features")}
    for name, function in originals.items():

        def record(*arguments, name=name, function=function, **rest):
            calls.append(name)
            return function(*arguments, **rest)

        monkeypatch.setattr(positions, name, record)
    return calls


@pytest.mark.parametrize("backend", ["tiled", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_integral_transform(problem, name, backend):
    case = problem(**CASES[name])
    torch.testing.assert_close(prepared(case).run(backend), case.run(backend), rtol=0, atol=0)


@pytest.mark.parametrize("name", CASES)
def test_gradients_flow_to_positions_and_weights_in_every_layer(problem, same, name):
    """Two layers that share Coordinates, against the reference with positions."""
    results = {}
    for backend in ("tiled", "reference"):
        case = problem(**CASES[name])
        leaves = {key: tensor.detach().clone().requires_grad_() for key, tensor in case.tensors().items()}
        case = case.with_tensors(leaves)
        shared = prepared(case) if backend == "tiled" else case
        first = shared.run(backend)
        out = (first + shared.run(backend) * first).square().sum()
        out.backward()
        results[backend] = {"out": out.detach()} | {key: leaf.grad for key, leaf in leaves.items()}
    same(results["tiled"], results["reference"], 1e-10)


def test_everything_is_computed_once(problem, searches):
    case = prepared(problem(n=36, regular=True, per_sample=True))
    case.u.requires_grad_()
    out = case.run("tiled")
    assert searches.count("find_lattice") == 2  # one for each sample
    found = len(searches)
    case = case.with_tensors({"u": out})
    case.run("tiled").sum().backward()
    sampled_transform(case.u, case.positions, case.weights, indices=INDICES, coefficients=INDICES.double())
    assert len(searches) == found


def test_a_query_domain_is_searched_once(problem, searches):
    case = prepared(problem(n=36, num_queries=30, regular=True))
    for _ in range(2):
        case.run("tiled")
    assert searches.count("find_lattice") == 1


def test_equal_positions_of_a_batch_are_shared(problem):
    case = problem(n=9)
    shared = Coordinates(case.positions.expand(2, -1, -1).clone(), case.weights.fourier)
    assert len(shared.exact) == len(shared.features) == 1
    own = Coordinates(case.positions.expand(2, -1, -1).clone().requires_grad_(), case.weights.fourier)
    assert len(own.exact) == len(own.features) == 2


INDICES = torch.arange(9).expand(2, 36, 9)


def test_other_operators(problem):
    case = problem(n=36, per_sample=True)
    arguments, weights = (case.u, case.positions, case.weights), case.weights
    coordinates = (case.u, Coordinates(case.positions, weights.fourier), weights)
    indices = INDICES
    half = torch.full(indices.shape, 0.5, dtype=torch.float64)
    for function, settings in (
        (sampled_transform, {"coefficients": half}),
        (monte_carlo_transform, {"probabilities": half, "is_causal": True}),
        (integrand_norms, {}),
    ):
        expected = function(*arguments, indices=indices, **settings)
        assert torch.equal(function(*coordinates, indices=indices, **settings), expected)
    expected = kernel_matrices(case.u, case.u, case.positions, case.positions, weights)
    assert torch.equal(kernel_matrices(case.u, case.u, coordinates[1], coordinates[1], weights), expected)


@pytest.mark.parametrize("samples", [slice(1, 3), torch.tensor([2, 0])], ids=["slice", "numbers"])
@pytest.mark.parametrize("per_sample", [False, True], ids=["shared", "per-sample"])
def test_select(problem, searches, samples, per_sample):
    case = problem(n=36, batch=3, per_sample=per_sample)
    whole = Coordinates(case.positions, case.weights.fourier)
    expected = integral_transform(case.u, whole, case.weights)[samples]
    found = searches.count("fourier_features")
    part = whole.select(samples)
    assert torch.equal(part.positions, case.positions[samples] if per_sample else case.positions)
    torch.testing.assert_close(integral_transform(case.u[samples], part, case.weights), expected)
    assert searches.count("fourier_features") == found
    assert not per_sample or len(part.exact) == 2


def test_large_tables_are_not_kept(problem, monkeypatch, searches):
    case = problem(n=36, regular=True)
    expected = case.run("tiled")
    monkeypatch.setattr(positions, "_KEPT_ELEMENTS", 10)
    case = prepared(case)
    assert case.positions.lattice(torch.float64) == (None, None)
    torch.testing.assert_close(case.run("tiled"), expected)


def test_inference_mode_leaves_nothing_behind(problem):
    case = prepared(problem(n=9))
    with torch.inference_mode():
        expected = case.run("tiled")
    case.weights.w1.requires_grad_()
    out = case.run("tiled")
    out.sum().backward()
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("inside", [True, False], ids=["made inside", "given"])
def test_two_compiled_layers(problem, inside):
    case = problem(n=36, regular=True)

    def run(u, x):
        coordinates = Coordinates(x, case.weights.fourier) if inside else x
        for _ in range(2):
            u = integral_transform(u, coordinates, case.weights)
        return u

    x = case.positions if inside else Coordinates(case.positions, case.weights.fourier)
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(case.u, x), run(case.u, x))


def test_checkpointed_layers(problem, same):
    case = problem(n=36, regular=True)
    results = []
    for use_reentrant in (None, False, True):
        leaves = {key: tensor.detach().clone().requires_grad_() for key, tensor in case.tensors().items()}
        shared = prepared(case.with_tensors(leaves))

        def layer(u, shared=shared):
            return shared.with_tensors({"u": u}).run("tiled")

        u = leaves["u"]
        for _ in range(2):
            u = layer(u) if use_reentrant is None else torch.utils.checkpoint.checkpoint(
                layer, u, use_reentrant=use_reentrant
            )  # fmt: skip
        u.square().sum().backward()
        results.append({"out": u.detach()} | {key: leaf.grad for key, leaf in leaves.items()})
    same(results[1], results[0], 1e-10)
    same(results[2], results[0], 1e-10)


def test_tensors_without_values(problem):
    """Shapes alone, as when the memory of a model is estimated."""
    case = problem(n=36, regular=True)
    with FakeTensorMode() as mode:
        fake = case.with_tensors({name: mode.from_tensor(tensor) for name, tensor in case.tensors().items()})
        fake.weights = fake.weights._replace(fourier=mode.from_tensor(case.weights.fourier))
        assert prepared(fake).run("tiled").shape == case.u.shape


def test_errors(problem):
    case = problem(n=9)
    with pytest.raises(ValueError, match=r"`positions` \[9\] must be \[n, 2\] or \[B, n, 2\]"):
        Coordinates(torch.zeros(9), case.weights.fourier)
    with pytest.raises(ValueError, match=r"`positions` must be a floating-point tensor, got torch.int64"):
        Coordinates(torch.zeros(9, 2, dtype=torch.long), case.weights.fourier)
    with pytest.raises(ValueError, match="`positions` holds values that are not finite"):
        Coordinates(torch.full((9, 2), torch.nan), case.weights.fourier)
    other = Coordinates(case.positions, 2 * case.weights.fourier)
    with pytest.raises(ValueError, match="`positions` were prepared with other frequencies"):
        integral_transform(case.u, other, case.weights)
    short = Coordinates(case.positions[:8], case.weights.fourier)
    with pytest.raises(ValueError, match=r"`positions` \[8, 2\] must be \[9, 2\]"):
        integral_transform(case.u, short, case.weights)
