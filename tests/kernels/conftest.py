"""Random problems for the operator, and the comparison of backends in output and every gradient."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from itnet_kernels import KERNEL_INPUTS, Blocks, KernelWeights, integral_transform, kernel_input_size
from itnet_kernels.exact.pair_inputs import DIFFERENTIABLE, PairInputs

TRAINED = ("w1", "b1", "w_mid", "b_mid", "w2", "b2", "w2_directions", "b2_directions")


@dataclass
class Problem:
    """Arguments of one call of ``integral_transform``."""

    u: Tensor
    positions: Tensor
    weights: KernelWeights
    measure: Tensor
    queries: Tensor | None = None
    query_positions: Tensor | None = None
    is_causal: bool = False
    blocks: list[Blocks] | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a gradient is taken of, by name."""
        own = {name: getattr(self, name) for name in ("u", "positions", "measure", "queries", "query_positions")}
        own |= {name: getattr(self.weights, name) for name in TRAINED}
        return {name: tensor for name, tensor in own.items() if tensor is not None}

    def with_tensors(self, tensors: dict[str, Tensor]) -> "Problem":
        weights = self.weights._replace(**{name: tensors[name] for name in TRAINED if name in tensors})
        rest = {name: tensor for name, tensor in tensors.items() if name not in TRAINED}
        return replace(self, weights=weights, **rest)

    def to(self, dtype: torch.dtype) -> "Problem":
        """Features, measure and weights in ``dtype``; positions stay as they are."""
        cast = {name: t if "positions" in name else t.to(dtype) for name, t in self.tensors().items()}
        return self.with_tensors(cast)

    def run(self, backend: str) -> Tensor:
        return integral_transform(
            self.u,
            self.positions,
            self.weights,
            measure=self.measure,
            queries=self.queries,
            query_positions=self.query_positions,
            is_causal=self.is_causal,
            blocks=self.blocks,
            backend=backend,
        )

    def run_backward(self, backend: str, position_gradients: bool = True) -> dict[str, Tensor]:
        """Output and the gradient of a fixed random functional of it, by name."""
        return self.gradients(lambda problem: problem.run(backend), position_gradients)

    def gradients(self, function: Callable[["Problem"], Tensor], position_gradients: bool = True) -> dict[str, Tensor]:
        """The same for any function of a problem."""
        leaves = {}
        for name, tensor in self.tensors().items():
            wanted = position_gradients or "positions" not in name
            leaves[name] = tensor.detach().clone().requires_grad_(wanted)
        out = function(self.with_tensors(leaves))
        generator = torch.Generator().manual_seed(1)
        out.backward(torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype))
        gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.requires_grad}
        # A tensor that the kernel does not use (positions without position groups) may have no gradient at all.
        return {"out": out.detach()} | {
            name: torch.zeros_like(leaves[name]) if grad is None else grad for name, grad in gradients.items()
        }


def make_problem(
    n: int = 7,
    *,
    batch: int = 2,
    heads: int = 2,
    head_dim: int = 4,
    width: int = 6,
    dim: int = 2,
    frequencies: int = 3,
    inputs: tuple[str, ...] = KERNEL_INPUTS,
    layers: int = 2,
    per_sample: bool = False,
    regular: bool = False,
    shared_output: bool = False,
    num_queries: int | None = None,
    is_causal: bool = False,
    directions: bool = False,
    seed: int = 0,
) -> Problem:
    """A random float64 problem. ``regular`` puts the points on a lattice whose spacing differs by axis and sample."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def positions(count: int) -> Tensor:
        points = torch.rand(batch, count, dim, generator=generator, dtype=torch.float64)
        if regular:
            index = torch.arange(count)
            lattice = torch.stack([index % 3, index // 3, *(index % 2 for _ in range(dim - 2))], dim=1)[:, :dim]
            spacing = torch.rand(batch, 1, dim, generator=generator, dtype=torch.float64) + 0.1
            points = (lattice if dim > 1 else index[:, None]) * spacing
        return points if per_sample else points[0]

    columns = kernel_input_size(inputs, frequencies, dim, head_dim)
    outputs = 1 if shared_output else heads
    scale = 0.4
    more = {"w_mid": scale * normal(width, width), "b_mid": scale * normal(width)} if layers == 3 else {}
    if directions:
        more["w2_directions"] = scale * normal(outputs, dim, head_dim**2, width)
        more["b2_directions"] = scale * normal(outputs, dim, head_dim**2)
    weights = KernelWeights(
        w1=scale * normal(width, columns),
        b1=scale * normal(width),
        w2=scale * normal(outputs, head_dim**2, width),
        b2=scale * normal(outputs, head_dim**2),
        fourier=2 * normal(frequencies, dim),
        inputs=inputs,
        **more,
    )
    return Problem(
        u=normal(batch, n, heads, head_dim),
        positions=positions(n),
        weights=weights,
        measure=torch.rand(batch, n, generator=generator, dtype=torch.float64),
        queries=None if num_queries is None else normal(batch, num_queries, heads, head_dim),
        query_positions=None if num_queries is None else positions(num_queries),
        is_causal=is_causal,
    )


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Relative distance of every entry, in the 2-norm; entries that should vanish are measured against the output."""
    floor = 1e-3 * float(expected["out"].double().norm())
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        error = float((actual[name].double() - value.double()).norm())
        assert error <= tolerance * max(float(value.double().norm()), floor), f"{name}: {error:.3e}"


@pytest.fixture
def problem():
    return make_problem


@pytest.fixture
def same():
    return assert_same


@pytest.fixture(params=["one tile", "many tiles"])
def tiling(request, monkeypatch):
    """Runs a test with the usual tiles, which hold small problems whole, and with tiles of 2 queries and 3 keys."""
    if request.param == "many tiles":
        monkeypatch.setattr("itnet_kernels.exact.tiled._TILE_ELEMENTS", 36)
        monkeypatch.setattr("itnet_kernels.exact.tiled._TILE_KEYS", 3)
        monkeypatch.setattr("itnet_kernels.exact.tiled._MOMENT_ELEMENTS", 96)
    return request.param


@pytest.fixture
def pair_sum_arguments(monkeypatch):
    """(problem, backend) -> the arguments with which ``integral_transform`` calls ``itnet::pair_sum``."""

    def capture(problem: Problem, backend: str) -> PairInputs:
        calls = []

        def record(*arguments):
            calls.append(arguments)
            return torch.zeros_like(arguments[0])

        with monkeypatch.context() as patch:
            patch.setattr(sys.modules[integral_transform.__module__], "pair_sum", record)
            problem.run(backend)
        (arguments,) = calls
        inputs = PairInputs(*arguments)
        given = {name: getattr(inputs, name) for name in DIFFERENTIABLE if getattr(inputs, name) is not None}
        return inputs._replace(**{name: value.detach().requires_grad_() for name, value in given.items()})

    return capture


@pytest.fixture
def subprocess_environment() -> dict[str, str]:
    """For processes with settings of their own: outside the interpreter, and with the packages of this one."""
    paths = os.pathsep.join(path for path in sys.path if path)
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return inherited | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
