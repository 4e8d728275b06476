"""The sum over listed keys in Triton's interpreter: samples, windows, balls. Run by test_triton_modes.py."""

import sys
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from itnet_kernels import (
    Blocks,
    Coordinates,
    ball_blocks,
    integral_transform,
    listed_blocks,
    sampled_transform,
    window_blocks,
)
from itnet_kernels.exact.reference import kernel_input
from itnet_kernels.sampled.list_sum import list_sum
from itnet_kernels.sampled.sampled import SampledPairs
from itnet_kernels.validation import batched

SIZES = {"batch": 1, "heads": 1, "head_dim": 16, "width": 32}
ONE_QUERY_SEES_ALL = Blocks(
    torch.tensor([[[2]]]), torch.arange(6)[None, None], torch.ones(1, 1, 1, 6, dtype=torch.bool)
)


def line(problem, n: int, *, is_causal: bool = False, reach: int = 2, **case):
    return replace(problem(n, **SIZES | {"dim": 1} | case), blocks=window_blocks((n,), reach, is_causal=is_causal))


def near(problem, name: str):
    """Windows of text and grids, and balls; two heads or two samples where they differ in something."""
    if name == "text":
        return line(problem, 19, reach=8)  # lists of 17: two tiles of keys, the last query alone in its block
    if name == "text-causal":
        return line(problem, 7, is_causal=True, heads=2)
    if name == "text-padded":
        padded = line(problem, 6, batch=2, per_sample=True)
        padded.measure[1, 3:] = 0
        return padded
    if name == "grid":
        return replace(problem(12, **SIZES | {"frequencies": 0}), blocks=window_blocks((3, 4), 1))
    if name == "odd-sizes":
        return line(problem, 5, head_dim=24, width=48, inputs=("x", "y", "distance", "u_x", "u_x*u_y"))
    if name == "shared-output":
        return line(problem, 5, heads=2, shared_output=True, inputs=("u_y",))
    if name == "several-lists":
        return replace(line(problem, 6, reach=1), blocks=[*window_blocks((2,), 1, first=4), ONE_QUERY_SEES_ALL])
    points = problem(9, **SIZES | {"batch": 2, "per_sample": True, "dim": 3})
    points.measure[0, 7:] = 0
    return replace(points, blocks=ball_blocks(points.positions, points.positions, 0.6, None, points.measure > 0))


NEAR = ["text", "text-causal", "text-padded", "grid", "odd-sizes", "shared-output", "several-lists", "balls"]


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Deterministic algorithms fill uninitialised memory with NaN: nothing unwritten may be read."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", NEAR)
def test_near_float32(problem, same, name):
    problem_ = near(problem, name)
    same(problem_.to(torch.float32).run_backward("triton"), problem_.run_backward("reference"), 1e-5)


@pytest.mark.parametrize("name", ["text-causal", "text-padded", "balls"])
def test_near_float16(problem, name):
    """Error against float64 at most twice that of the same mathematics in plain PyTorch at that dtype."""
    problem_ = near(problem, name).to(torch.float16).to(torch.float64)
    expected = problem_.run_backward("reference")
    actual, plain = (problem_.to(torch.float16).gradients(run) for run in (lambda p: p.run("triton"), literal_half))
    assert actual["out"].dtype == torch.float16
    for key, value in expected.items():
        error, allowed = ((results[key].double() - value).norm() for results in (actual, plain))
        assert error <= 2 * allowed + torch.finfo(torch.float16).eps * value.norm(), f"{key}: {error} {allowed}"


def literal_half(problem):
    """The reassociated sum as one would write it, every operation on features in the problem's dtype."""
    weights, keys, count = problem.weights, problem.u, problem.u.shape[1]
    positions = batched(problem.positions)
    z = kernel_input(keys.unsqueeze(2), keys.unsqueeze(1), positions, positions, weights)
    hidden = torch.nn.functional.gelu(z @ weights.w1.T + weights.b1)  # [B, n, n, H, w]
    listed = sum(part.dense(count, count).to(keys.dtype) for part in problem.blocks)  # [B or 1, n, n]
    values = (listed * problem.measure.unsqueeze(1))[..., None, None] * keys.unsqueeze(1)  # [B, n, n, H, d_h]
    w2, b2 = (t.unflatten(1, (keys.shape[-1],) * 2) for t in (weights.w2, weights.b2))
    moments = torch.einsum("bijhk,bijhc->bihkc", hidden, values)
    return torch.einsum("hack,bihkc->biha", w2, moments) + torch.einsum("hac,bihc->biha", b2, values.sum(2))


LISTS = {
    "shared-positions": {"batch": 2, "heads": 2},
    "per-sample-queries": {"batch": 2, "per_sample": True, "num_queries": 3},
    "content": {"inputs": ("u_x", "u_y", "u_x*u_y")},
}


def sampled(problem, name: str):
    """A problem with lists, keys that come twice, coefficients of either sign, one of them 0."""
    problem_ = problem(6, **SIZES | LISTS[name])
    generator = torch.Generator().manual_seed(2)
    count = 6 if problem_.queries is None else problem_.queries.shape[1]
    indices = torch.randint(6, (len(problem_.u), count, 5), generator=generator)
    coefficients = torch.randn(indices.shape, generator=generator, dtype=torch.float64)
    coefficients[0, 0, 1] = 0
    return problem_, indices, coefficients


def run_sampled(problem_, indices, coefficients, backend):
    given = {"queries": problem_.queries, "query_positions": problem_.query_positions, "backend": backend}
    given |= {"indices": indices, "coefficients": coefficients}
    return sampled_transform(problem_.u, problem_.positions, problem_.weights, **given)


@pytest.mark.parametrize("name", LISTS)
def test_lists_float32(problem, same, name):
    """Against the PyTorch path in float64, whose own test is the literal sum; coefficients in the measure's place."""
    problem_, indices, coefficients = sampled(problem, name)
    results = []
    for backend, dtype in (("triton", torch.float32), ("tiled", torch.float64)):
        lists = replace(problem_.to(dtype), measure=coefficients.to(dtype))
        results.append(lists.gradients(lambda p, backend=backend: run_sampled(p, indices, p.measure, backend)))
    same(*results, 1e-5)


STEPS = {
    "exact": {"num_queries": 1, "batch": 2, "heads": 2},
    "exact-causal": {"num_queries": 1, "is_causal": True, "per_sample": True, "batch": 2},
    "raw-shared-output": {"num_queries": 1, "frequencies": 0, "shared_output": True, "heads": 2, "head_dim": 12},
    "near": {"num_queries": 1, "batch": 2, "per_sample": True, "inputs": ("x", "y", "x-y", "distance", "u_y")},
}


@torch.no_grad()
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
def test_one_query_without_gradients(problem, monkeypatch, name, dtype):
    """As a cache asks for it: one launch."""
    problem_ = problem(70 if name == "exact" else 6, **SIZES | STEPS[name])
    if name == "near":
        problem_ = replace(problem_, blocks=listed_blocks(torch.tensor([[[5, 4, 2, -1]], [[3, -1, 1, 0]]])))
    problem_ = problem_.to(dtype).to(torch.float64)
    module = sys.modules[integral_transform.__module__]
    for name_ in ("block_sum", "pair_sum"):
        monkeypatch.setattr(module, name_, None)
    expected = problem_.run("reference")
    error = (problem_.to(dtype).run("triton").double() - expected).norm()
    assert error <= (1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps) * expected.norm()


def test_many_chunks(problem, same, monkeypatch):
    """One query of one sample at a time."""
    monkeypatch.setattr("itnet_kernels.sampled.triton.lists.WORKSPACE_BYTES", 1)
    problem_ = near(problem, "text-padded")
    same(problem_.to(torch.float32).run_backward("triton"), problem_.run_backward("reference"), 1e-5)


def test_far_coordinates_in_float16(problem):
    """An extent that float16 cannot hold: the position term is stored over its range."""
    problem_ = line(problem, 5, frequencies=0)
    problem_ = replace(problem_, positions=problem_.positions * 1e5).to(torch.float16).to(torch.float64)
    problem_.weights.w1[:, :4].mul_(2.0**-5)
    expected = problem_.run("reference")
    error = (problem_.to(torch.float16).run("triton").double() - expected).norm()
    assert error <= 8 * torch.finfo(torch.float16).eps * expected.norm()


def test_repeats_bit_by_bit(problem):
    problem_ = near(problem, "balls").to(torch.float16)
    first, second = problem_.run_backward("triton"), problem_.run_backward("triton")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_derivatives_of_derivatives_and_vmap(problem):
    """By ordinary operations, whatever the backend."""
    problem_ = line(problem, 4, inputs=("x-y", "u_x*u_y"))
    seconds = []
    for backend, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        own = problem_.to(dtype)
        u = own.u.clone().requires_grad_()
        (first,) = torch.autograd.grad(replace(own, u=u).run(backend).square().sum(), u, create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), u)[0].double())
    assert (seconds[0] - seconds[1]).norm() <= 1e-4 * seconds[1].norm()
    own = problem_.to(torch.float32)
    mapped = torch.func.vmap(lambda u: replace(own, u=u).run("triton"))(torch.stack([own.u, own.u / 2]))
    torch.testing.assert_close(mapped[0], own.run("tiled"), rtol=1e-4, atol=1e-5)


def list_arguments(problem):
    problem_, indices, coefficients = sampled(problem, "content")
    own = problem_.to(torch.float32)
    x = Coordinates(own.positions, own.weights.fourier)
    pairs = SampledPairs(own.u, own.u, x, x, own.weights, "triton")
    inputs = pairs.list_inputs()._replace(indices=indices, coefficients=coefficients.float())
    return inputs._replace(queries=inputs.queries.clone().requires_grad_())


def test_opcheck_and_flops(problem):
    inputs = list_arguments(problem)
    torch.library.opcheck(list_sum.function._opoverload, tuple(inputs))
    list_sum(inputs)  # the first call registers the formula
    with FlopCounterMode(display=False) as counter:
        list_sum(inputs).sum().backward()
    # queries, d_h; two products with w units for each of 5 keys and their mean, W2 and b2
    one = 6 * 16 * (5 * (4 * 32 + 2) + 2 * 16 * (32 + 1))
    assert counter.get_total_flops() == 4 * one


def test_one_query_has_no_derivative():
    generator = torch.Generator().manual_seed(0)
    shapes = (1, 1, 16), (1, 5, 1, 16), (1, 1), (1, 5, 1), (1, 5, 1), (1, 5), (16, 16), (16,), (1, 256, 16), (1, 256)
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    rest = None, [-1, -1, -1, -1, -1, -1, 0], False, torch.float32
    torch.library.opcheck(torch.ops.itnet.list_step, (*tensors, *rest))
    out = torch.ops.itnet.list_step(tensors[0].requires_grad_(), *tensors[1:], *rest)
    with pytest.raises(NotImplementedError, match="itnet::list_step has no derivative: call integral_transform"):
        out.sum().backward()


def test_compiles_into_one_graph(problem):
    problem_ = line(problem, 4, inputs=("x-y", "u_x*u_y")).to(torch.float32)
    run = torch.compile(lambda u: replace(problem_, u=u).run("triton"), backend="aot_eager", fullgraph=True)
    u = problem_.u.clone().requires_grad_()
    run(u).sum().backward()
    expected = problem_.u.clone().requires_grad_()
    replace(problem_, u=expected).run("triton").sum().backward()
    torch.testing.assert_close(u.grad, expected.grad)


def test_autocast_lowers_float32(problem):
    problem_ = line(problem, 5).to(torch.float32)
    exact = problem_.run("triton")
    with torch.autocast("cpu", dtype=torch.float16):
        lowered = problem_.run("triton")
    assert lowered.dtype == torch.float32
    assert 1e-5 < float((lowered - exact).norm() / exact.norm()) < 5e-3


def test_unsupported_is_an_error(problem):
    problem_ = line(problem, 4, layers=3).to(torch.float32)
    with pytest.raises(ValueError, match="3-layer"):
        problem_.run("triton")
    with pytest.raises(ValueError, match="float64"):
        line(problem, 4).run("triton")
