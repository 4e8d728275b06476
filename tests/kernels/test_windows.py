"""The sum over the last keys of every query: against the dense sum of these pairs, and where it may not be taken."""

import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.func import jvp

from itnet_kernels import KERNEL_INPUTS, Coordinates, integral_transform, window_blocks
from itnet_kernels.near import windows


def transform(problem, window: int | None, backend: str = "tiled"):
    """The sum over the windows of 5 positions, as ``window`` or only as blocks."""
    size = 5 if window is None else window
    blocks = window_blocks((problem.u.shape[1],), size - 1, is_causal=True)
    given = {"measure": problem.measure, "blocks": blocks, "window": window, "backend": backend}
    return integral_transform(problem.u, problem.positions, problem.weights, **given)


@pytest.fixture
def even(problem):
    """A problem on evenly spaced positions."""

    def make(n: int, **settings):
        return replace(problem(n, dim=1, **settings), positions=torch.arange(n, dtype=torch.float64)[:, None] / 8)

    return make


@pytest.fixture
def calls(monkeypatch):
    """How often the sum over windows was taken."""
    found = []

    def counted(inputs):
        found.append(len(inputs.table))
        return windows.window_sum(inputs)

    monkeypatch.setattr(sys.modules[integral_transform.__module__], "window_sum", counted)
    return found


@pytest.fixture(params=["one part", "many parts"])
def parts(request, monkeypatch):
    """With parts that hold small problems whole, and with parts of a few rows of one sample."""
    if request.param == "many parts":
        monkeypatch.setattr(windows, "_CHUNK_ELEMENTS", 9 * 6 * 4)


INPUTS = [
    KERNEL_INPUTS,
    ("x-y", "u_x", "u_y", "u_x*u_y"),
    ("x-y",),
    ("x", "distance", "u_x"),
    ("y", "u_y"),
    ("u_x*u_y",),
]


@pytest.mark.parametrize("inputs", INPUTS, ids="+".join)
@pytest.mark.parametrize("n", [8, 13, 30])
def test_equals_the_dense_sum(even, same, calls, parts, n, inputs):
    """Outputs and all gradients but that of positions, of which there is none."""
    given = even(n, inputs=inputs)
    expected = given.gradients(partial(transform, window=5, backend="reference"), position_gradients=False)
    same(given.gradients(partial(transform, window=5), position_gradients=False), expected, 1e-11)
    assert calls == [5]


def test_a_backward_inside_of_autocast(even, calls):
    """Some callers leave autocast only after the backward, which lowers the products of the parts around the sum."""
    given = even(13).to(torch.float32)
    run = partial(given.gradients, partial(transform, window=5), position_gradients=False)
    expected = run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lowered = run()
    assert torch.equal(lowered["w2"], expected["w2"])
    for name, value in expected.items():
        assert (lowered[name] - value).norm() <= 4 * torch.finfo(torch.bfloat16).eps * value.norm(), name
    assert calls == [5, 5]


@pytest.mark.parametrize("size", [1, 2, 9, 40])
def test_sizes(even, same, calls, parts, size):
    """From the position itself to more than all of them."""
    given = even(19)
    expected = given.gradients(partial(transform, window=size, backend="reference"), position_gradients=False)
    same(given.gradients(partial(transform, window=size), position_gradients=False), expected, 1e-11)
    assert calls == [size]


def test_heads_with_hidden_layers_of_their_own(even, same, calls):
    given = even(12)
    twice = {
        name: torch.stack([part, -part]) for name, part in given.weights._asdict().items() if name in ("w1", "b1")
    }
    given = replace(given, weights=given.weights._replace(**twice))
    expected = given.gradients(partial(transform, window=5, backend="reference"), position_gradients=False)
    same(given.gradients(partial(transform, window=5), position_gradients=False), expected, 1e-11)
    assert calls == [5, 5]


@pytest.mark.parametrize("case", ["uneven", "falling", "own positions", "plane", "gradient", "three layers"])
def test_other_positions_take_the_blocks(problem, even, same, calls, case):
    given = even(12, layers=3 if case == "three layers" else 2)
    if case in ("uneven", "own positions", "plane"):
        given = problem(12, dim=2 if case == "plane" else 1, per_sample=case == "own positions")
    if case == "falling":
        given = replace(given, positions=given.positions.flip(0))
    wanted = case == "gradient"
    expected = given.gradients(partial(transform, window=None, backend="reference"), position_gradients=wanted)
    same(given.gradients(partial(transform, window=5), position_gradients=wanted), expected, 1e-11)
    assert not calls


def test_derivatives_of_derivatives(even, calls):
    """The Hessian's products, in reverse over reverse, against forward over the blocks' form."""
    given = even(9)
    direction = torch.randn(given.u.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def total(u, window):
        return transform(replace(given, u=u), window).square().sum()

    u = given.u.clone().requires_grad_()
    products = []
    for window in (5, None):
        gradient = torch.autograd.grad(total(u, window), u, create_graph=True)[0]
        products.append(torch.autograd.grad((gradient * direction).sum(), u)[0])
    torch.testing.assert_close(*products, rtol=1e-10, atol=1e-10)
    _, forward = jvp(lambda u: total(u, 5), (given.u,), (direction,))
    gradient = torch.autograd.grad(total(u, None), u)[0]
    torch.testing.assert_close(forward, (gradient * direction).sum(), rtol=1e-10, atol=1e-10)
    assert len(calls) >= 1


def test_steps():
    """gamma and length of the displacements of the last positions, by the formula."""
    frequencies = torch.tensor([[0.7], [2.0]], dtype=torch.float64)
    positions = 0.3 + torch.arange(12, dtype=torch.float64)[:, None] / 16
    steps = Coordinates(positions, frequencies).steps(torch.float64, 3)
    apart = torch.tensor([[2 / 16], [1 / 16], [0.0]], dtype=torch.float64)
    angles = 2 * torch.pi * apart @ frequencies.T
    expected = torch.cat([angles.sin(), angles.cos(), apart], dim=1)
    torch.testing.assert_close(steps, expected, rtol=0, atol=1e-13)
    assert Coordinates(positions**2, frequencies).steps(torch.float64, 3) is None
