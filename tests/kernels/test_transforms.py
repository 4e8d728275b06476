"""Forward mode, torch.func and derivatives of derivatives pass through every operator, against finite differences
(gradcheck, gradgradcheck) and against the definition."""

import sys

import pytest
import torch
from torch.autograd import forward_ad
from torch.autograd.functional import jacobian
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

from itnet_kernels import (
    KERNEL_INPUTS,
    Factor,
    integral_transform,
    low_rank_matrix_transform,
    low_rank_transform,
    monte_carlo_transform,
    sampled_low_rank_matrix_transform,
    sampled_low_rank_transform,
    sampled_transform,
)

CASES = {
    "full": {"n": 4},
    "causal": {"n": 4, "is_causal": True, "layers": 3, "per_sample": True},
    "query domain": {"n": 4, "num_queries": 3, "is_causal": True},
    "raw coordinates": {"n": 4, "frequencies": 0},
    "lattice": {"n": 6, "regular": True, "shared_output": True},
    "content only": {"n": 4, "inputs": ("u_x", "u_y")},
    "positions only": {"n": 4, "inputs": ("x-y", "distance")},
    "constant kernel": {"n": 4, "inputs": ()},
}
SIZES = {"batch": 2, "heads": 2, "head_dim": 2, "width": 3, "frequencies": 2}


@pytest.fixture(params=["one tile", "many tiles"])
def plain_tiles(request, monkeypatch):
    if request.param == "many tiles":
        monkeypatch.setattr("itnet_kernels.exact.plain_pair_sum._TILE_ELEMENTS", 1)  # one query at a time


@pytest.fixture(params=CASES.values(), ids=CASES)
def case(request, problem):
    return problem(**SIZES | request.param)


def as_function(problem, backend="tiled"):
    """The transform as a function of its tensors, and the tensors."""
    names = list(problem.tensors())

    def run(*values):
        return problem.with_tensors(dict(zip(names, values, strict=True))).run(backend)

    return run, tuple(problem.tensors().values())


def tangents(tensors, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in tensors)


def loss(function):
    return lambda *values: function(*values).square().sum()


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-11)


@pytest.mark.usefixtures("plain_tiles")
def test_forward_mode(case):
    """The tangent of each argument by itself: none is dropped."""
    (run, values), (reference, _) = as_function(case), as_function(case, "reference")
    for index, tangent in enumerate(tangents(values)):

        def along(value, function, index=index):
            return function(*values[:index], value, *values[index + 1 :])

        expected = jvp(lambda value: along(value, reference), (values[index],), (tangent,))
        close(jvp(lambda value: along(value, run), (values[index],), (tangent,)), expected)
        assert expected[1].any() or case.weights.inputs != KERNEL_INPUTS
        with forward_ad.dual_level():
            out = forward_ad.unpack_dual(along(forward_ad.make_dual(values[index], tangent), run))
            close(out.primal, expected[0])
            close(torch.zeros_like(out.primal) if out.tangent is None else out.tangent, expected[1])


@pytest.mark.usefixtures("plain_tiles")
def test_transforms_of_torch_func(case):
    (run, values), (reference, _) = as_function(case), as_function(case, "reference")
    every = tuple(range(len(values)))
    close(grad(loss(run), every)(*values), grad(loss(reference), every)(*values))
    expected = jacrev(reference, every)(*values)
    close(jacrev(run, every)(*values), expected)
    close(jacfwd(run, every)(*values), expected)


@pytest.mark.parametrize("argument", ["u", "positions", "measure", "w1", "w2"])
@pytest.mark.parametrize("name", ["full", "causal", "raw coordinates", "lattice"])
def test_hessian(problem, name, argument):
    case = problem(**SIZES | {"heads": 1, "head_dim": 2} | CASES[name])
    (run, values), (reference, _) = as_function(case), as_function(case, "reference")
    index = list(case.tensors()).index(argument)
    close(hessian(loss(run), index)(*values), hessian(loss(reference), index)(*values))


def test_vmap_over_every_argument(case):
    run, values = as_function(case)
    for index in range(len(values)):
        many = torch.stack([values[index], 1.25 * values[index], 0.5 * values[index]])
        in_dims = tuple(0 if other == index else None for other in range(len(values)))

        def one(value, function, index=index):
            return function(*values[:index], value, *values[index + 1 :])

        arguments = (*values[:index], many, *values[index + 1 :])
        close(vmap(run, in_dims)(*arguments), torch.stack([one(value, run) for value in many]))
        gradient = grad(loss(run), index)
        close(vmap(gradient, in_dims)(*arguments), torch.stack([one(value, gradient) for value in many]))


@pytest.mark.usefixtures("plain_tiles")
@pytest.mark.parametrize("backend", ["tiled", "reference"])
@pytest.mark.parametrize("name", ["full", "causal", "raw coordinates", "lattice"])
def test_second_derivatives_are_those_of_finite_differences(problem, name, backend):
    """Queries are keys here: distances of 0, where |x - y| has no derivative, are among the pairs."""
    case = problem(**SIZES | {"batch": 1, "heads": 1, "width": 2, "frequencies": 1} | CASES[name])
    run, values = as_function(case, backend)
    leaves = tuple(value.detach().clone().requires_grad_() for value in values)
    assert torch.autograd.gradgradcheck(run, leaves)


@pytest.mark.parametrize("name", ["full", "causal", "raw coordinates", "lattice"])
def test_first_derivatives_in_every_mode_are_those_of_finite_differences(problem, name):
    case = problem(**SIZES | {"batch": 1, "heads": 1, "width": 2, "frequencies": 1} | CASES[name])
    run, values = as_function(case)
    leaves = tuple(value.detach().clone().requires_grad_() for value in values)
    modes = {f"check_{mode}": True for mode in ("forward_ad", "batched_grad", "batched_forward_grad")}
    assert torch.autograd.gradcheck(run, leaves, **modes)


def test_batched_gradients(problem):
    """torch.autograd's own vectorised Jacobian, which is not one of torch.func."""
    case = problem(**SIZES | {"n": 4})
    (run, values), (reference, _) = as_function(case), as_function(case, "reference")
    close(jacobian(run, values, vectorize=True), jacobian(reference, values))
    close(jacobian(run, values, vectorize=True, strategy="forward-mode"), jacobian(reference, values))


def test_float32_tangents_are_as_good_as_gradients(problem, same):
    case = problem(n=33, head_dim=8, width=16, is_causal=True)
    run, values = as_function(case)
    expected = jvp(run, values, tangents(values))[1]
    single, rounded = as_function(case.to(torch.float32))
    actual = jvp(single, rounded, tuple(t.to(v.dtype) for t, v in zip(tangents(values), rounded, strict=True)))[1]
    same({"out": actual}, {"out": expected}, 100 * torch.finfo(torch.float32).eps)


def test_the_triton_backend_takes_the_plain_form(problem, monkeypatch):
    """Its kernels have one derivative, too. Nothing of Triton is needed here."""
    module = sys.modules[integral_transform.__module__]
    monkeypatch.setattr(module, "resolve_backend", lambda backend, *arguments: backend)
    case = problem(**SIZES | {"n": 4})
    (run, values), (reference, _) = as_function(case, "triton"), as_function(case, "reference")
    close(jvp(run, values, tangents(values)), jvp(reference, values, tangents(values)))


def test_a_compiled_tangent(problem):
    case = problem(**SIZES | {"n": 4})
    (run, values), (reference, _) = as_function(case), as_function(case, "reference")
    directions = tangents(values)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *primals: jvp(run, primals, directions), backend="eager", fullgraph=True)
    close(compiled(*values), jvp(reference, values, directions))


def test_values_are_checked_where_there_are_any(problem):
    case = problem(**SIZES | {"n": 4})

    def total(positions):
        return integral_transform(case.u, positions, case.weights).sum()

    spoiled = case.positions.clone()
    spoiled[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"`positions` holds values .* not finite"):
        grad(total)(spoiled)
    assert vmap(total)(torch.stack([case.positions, spoiled])).isnan().tolist() == [False, True]


# The other operators: a function of tensors, and the tensors


def sampled(problem):
    case = problem(**SIZES | {"n": 4, "num_queries": 3})
    indices = torch.tensor([[0, 3], [1, 1], [2, 0]]).expand(2, 3, 2)

    def run(u, positions, queries, query_positions, w1, b1, w2, b2, coefficients):
        weights = case.weights._replace(w1=w1, b1=b1, w2=w2, b2=b2)
        domain = {"queries": queries, "query_positions": query_positions}
        return sampled_transform(u, positions, weights, indices=indices, coefficients=coefficients, **domain)

    tensors = (case.u, case.positions, case.queries, case.query_positions, *case.weights[:4])
    return run, (*tensors, tangents([torch.zeros(2, 3, 2, dtype=torch.float64)])[0])


def monte_carlo(problem):
    case = problem(**SIZES | {"n": 3, "is_causal": True})
    indices = torch.tensor([[0, 2], [1, 0], [2, 1]]).expand(2, 3, 2)

    def run(u, positions, measure, w1, b1, w2, b2):
        weights = case.weights._replace(w1=w1, b1=b1, w2=w2, b2=b2)
        settings = {"probabilities": torch.full((2, 3, 2), 0.4, dtype=torch.float64), "is_causal": True}
        return monte_carlo_transform(u, positions, weights, indices=indices, measure=measure, **settings)

    return run, (case.u, case.positions, case.measure, *case.weights[:4])


def low_rank(problem, is_causal=False, indices=None):
    case = problem(**SIZES | {"n": 3})
    shapes = [(2, 3, 2, 4), (2, 2, 2, 4), (2, 2, 2)] * 2 + [(2, 2, 2)]  # phi, psi (hidden, weight, bias), bias

    def run(u, measure, *parts):
        phi, psi, bias = Factor(*parts[:3]), Factor(*parts[3:6]), parts[6]
        if indices is None:
            return low_rank_transform(u, phi, psi, measure=measure, is_causal=is_causal, bias=bias)
        coefficients = measure.unsqueeze(-1).expand(indices.shape)
        return sampled_low_rank_transform(u, phi, psi, indices=indices, coefficients=coefficients, bias=bias)

    return run, (case.u, case.measure, *tangents([torch.zeros(shape, dtype=torch.float64) for shape in shapes]))


def low_rank_matrix(problem, is_causal=False, has_decay=False, indices=None):
    case = problem(**SIZES | {"n": 3})
    shapes = [(2, 3, 2, 4), (2, 3, 2, 4), (2, 4, 2, 2), (2, 2, 2)]  # f, g, matrices, bias

    def run(u, measure, f, g, matrices, bias, *decay):
        if indices is not None:
            coefficients = measure.unsqueeze(-1).expand(indices.shape)
            return sampled_low_rank_matrix_transform(
                u, f, g, matrices, indices=indices, coefficients=coefficients, bias=bias
            )
        settings = dict(zip(("decay", "positions"), decay, strict=True)) if has_decay else {}
        return low_rank_matrix_transform(
            u, f, g, matrices, measure=measure, is_causal=is_causal, bias=bias, **settings
        )

    values = tangents([torch.zeros(shape, dtype=torch.float64) for shape in shapes])
    if has_decay:
        decay, steps = tangents([torch.zeros(2, 4, dtype=torch.float64), torch.zeros(2, 3, 1, dtype=torch.float64)])
        values = *values, decay.square(), (0.5 + steps.square()).cumsum(1)
    return run, (case.u, case.measure, *values)


PAIRS = torch.tensor([[0, 2], [1, 0], [2, 1]]).expand(2, 3, 2)
OTHERS = {
    "sampled": sampled,
    "monte carlo": monte_carlo,
    "low rank": low_rank,
    "causal low rank": lambda problem: low_rank(problem, is_causal=True),
    "sampled low rank": lambda problem: low_rank(problem, indices=PAIRS),
    "matrix low rank": low_rank_matrix,
    "causal matrix low rank": lambda problem: low_rank_matrix(problem, is_causal=True),
    "decaying matrix low rank": lambda problem: low_rank_matrix(problem, is_causal=True, has_decay=True),
    "sampled matrix low rank": lambda problem: low_rank_matrix(problem, indices=PAIRS),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_operators(problem, name):
    run, values = OTHERS[name](problem)
    every = tuple(range(len(values)))
    leaves = tuple(value.detach().clone().requires_grad_() for value in values)
    assert torch.autograd.gradcheck(run, leaves, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(run, leaves)
    expected = torch.autograd.grad(loss(run)(*leaves), leaves)
    close(grad(loss(run), every)(*values), expected)
    close(jacfwd(loss(run), every)(*values), expected)
    stacked = tuple(torch.stack([value, 1.25 * value]) for value in values)
    close(vmap(run)(*stacked), torch.stack([run(*(value[k] for value in stacked)) for k in range(2)]))
