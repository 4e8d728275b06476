"""The low-rank kernels in Triton's interpreter. Run by test_triton_modes.py."""

import importlib

import pytest
import torch

from itnet_kernels import Factor, LowRankState, low_rank_matrix_transform, low_rank_transform
from itnet_kernels.low_rank import fused

B, N, H, R, D, W = 2, 11, 2, 3, 12, 20
CASES = {
    "complete": {},
    "fewer-queries": {"num_queries": 4},
    "causal": {"is_causal": True},
    "causal-fewer-queries": {"is_causal": True, "num_queries": 4},
    "causal-decay": {"is_causal": True, "has_decay": True},
    "causal-decay-state": {"is_causal": True, "has_decay": True, "has_state": True},
    "causal-padded": {"is_causal": True, "padding": 3},
}


def make(form: str, *, num_queries: int = N, has_decay=False, has_state=False, padding=0, is_causal=False):
    """Tensors in float64 and what else a call takes."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tensors = {"u": normal(B, N, H, D), "bias": normal(H, D, D), "measure": normal(B, N).abs()}
    if form == "matrix":
        tensors |= {"f": normal(B, num_queries, H, R), "g": normal(B, N, H, R), "matrices": normal(H, R, D, D)}
    else:
        for name, count in (("phi", num_queries), ("psi", N)):
            parts = {"hidden": normal(B, count, H, W), "weight": 0.3 * normal(H, R, D, W), "bias": normal(H, R, D)}
            tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
    if padding:
        tensors["measure"][1, -padding:] = 0
    if has_decay:
        tensors |= {"decay": normal(H, R).abs(), "positions": normal(B, N, 1).abs().cumsum(1)}
    if has_state:
        tensors["state.moments"] = normal(B, H, R, *((D,) if form == "matrix" else ()))
        tensors |= {"state.mean": normal(B, H, D), "state.mass": normal(B).abs()}
    return tensors, {"is_causal": is_causal}


def run(tensors: dict, settings: dict, backend: str):
    given = {name: tensor for name, tensor in tensors.items() if "." not in name}
    if "state.mass" in tensors:
        position = tensors["positions"][:, 0, 0].detach() - 0.5 if "decay" in tensors else None
        state = (tensors[f"state.{name}"] for name in ("moments", "mean", "mass"))
        given["state"] = LowRankState(*state, position)
    given |= {"state": given.get("state")} | settings | {"backend": backend, "return_state": True}
    if "f" in tensors:
        return low_rank_matrix_transform(**given)
    for name in ("phi", "psi"):
        given[name] = Factor(*(tensors[f"{name}.{part}"] for part in Factor._fields))
    return low_rank_transform(**given)


def gradients(tensors: dict, settings: dict, backend: str, dtype: torch.dtype) -> dict:
    """Output, state and the gradient of a fixed random functional of both, by name."""
    exact = ("positions", "decay")
    leaves = {
        name: t.to(torch.float32 if name in exact and dtype == torch.float16 else dtype) for name, t in tensors.items()
    }
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in leaves.items()}
    out, state = run(leaves, settings, backend)
    results = {"out": out} | {name: value for name, value in state._asdict().items() if name != "position"}
    generator = torch.Generator().manual_seed(1)
    total = 0
    for value in results.values():
        weights = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        total = total + (value * weights.to(value.dtype)).sum()
    total.backward()
    found = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}
    return {
        name: value.detach().double() for name, value in (results | {f"d {n}": g for n, g in found.items()}).items()
    }


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Nothing unwritten may be read. Blocks have 4 positions: there are several, and the last one is short."""
    monkeypatch.setattr("itnet_kernels.low_rank.matrix._FUSED_BLOCK", 4)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", ["vector", "matrix"])
def test_float32(form, case):
    """Against the PyTorch path in float64, which its own tests compare with the literal sum."""
    given = make(form, **CASES[case])
    actual, expected = gradients(*given, "triton", torch.float32), gradients(*given, "tiled", torch.float64)
    for name, value in expected.items():
        error = float((actual[name] - value).norm())
        assert error <= 1e-5 * max(float(value.norm()), 1e-3 * float(expected["out"].norm())), f"{name}: {error}"


@pytest.mark.parametrize("case", ["complete", "causal-decay-state"])
@pytest.mark.parametrize("form", ["vector", "matrix"])
def test_float16(monkeypatch, form, case):
    """Error at most twice that of the same mathematics with PyTorch's operations on rounded operands."""
    tensors, settings = make(form, **CASES[case])
    exact = ("positions", "decay")
    tensors = {name: t if name in exact else t.half().double() for name, t in tensors.items()}
    expected = gradients(tensors, settings, "tiled", torch.float64)
    actual = gradients(tensors, settings, "triton", torch.float16)
    plain = gradients(tensors, settings, "tiled", torch.float16)
    eps = torch.finfo(torch.float16).eps
    for name, value in expected.items():
        error, allowed = (float((results[name] - value).norm()) for results in (actual, plain))
        # PyTorch's path multiplies in float32 and rounds its results only: two roundings of operands come on top.
        assert error <= 2 * allowed + 2 * eps * float(value.norm()), f"{name}: {error} {allowed} {value.norm()}"


@torch.no_grad()
@pytest.mark.parametrize("case", ["causal", "causal-decay-state", "causal-padded"])
@pytest.mark.parametrize("form", ["vector", "matrix"])
def test_tokens_one_by_one(monkeypatch, form, case):
    """Each is one launch, but for the first one, which has no state; padding, and a state at the start."""
    calls = []
    step = importlib.import_module("itnet_kernels.low_rank.triton.step")
    launch = step.launch_step
    monkeypatch.setattr(step, "launch_step", lambda *given: (calls.append(1), launch(*given)))
    tensors, settings = make(form, **CASES[case])
    expected, after = run(tensors, settings, "tiled")
    tensors = {name: tensor.float() for name, tensor in tensors.items()}
    along = [name for name in tensors if name in ("u", "measure", "f", "g", "positions") or name.endswith("hidden")]
    if "state.mass" in tensors:
        parts = (tensors.pop(f"state.{part}") for part in ("moments", "mean", "mass"))
        state = LowRankState(*parts, tensors["positions"][:, 0, 0] - 0.5)
    else:
        state = None
    outs = []
    for k in range(N):
        token = tensors | {name: tensors[name][:, k : k + 1] for name in along}
        out, state = run(token, settings | {"state": state}, "triton")
        outs.append(out)
    assert len(calls) == N - (0 if "state" in case else 1)
    torch.testing.assert_close(torch.cat(outs, dim=1).double(), expected, rtol=1e-4, atol=1e-5)
    for name, value in after._asdict().items():
        if value is not None:
            torch.testing.assert_close(getattr(state, name).double(), value.double(), rtol=1e-4, atol=1e-5)


def test_repeats_bit_by_bit():
    given = make("matrix", **CASES["causal-decay"])
    first, second = (gradients(*given, "triton", torch.float16) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_transforms_take_ordinary_operations():
    tensors, settings = make("matrix", **CASES["causal-decay"])
    tensors = {name: tensor.float() for name, tensor in tensors.items()}

    def function(u):
        return run(tensors | {"u": u}, settings, "triton")[0]

    mapped = torch.func.vmap(function)(torch.stack([tensors["u"], tensors["u"] / 2]))
    torch.testing.assert_close(mapped[1], function(tensors["u"] / 2), rtol=1e-4, atol=1e-4)
    u = tensors["u"].clone().requires_grad_()
    (first,) = torch.autograd.grad(function(u).square().sum(), u, create_graph=True)
    assert torch.autograd.grad(first.sum(), u)[0].isfinite().all()


def operators():
    """Arguments of every operator."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).requires_grad_()

    f, u, hidden = normal(1, 5, 1, 2), normal(1, 5, 1, 4), normal(1, 5, 1, 3)
    weight, bias, dtype = normal(1, 2, 4, 3), normal(1, 2, 4), torch.float32
    rates, times = normal(1, 2).detach().abs().requires_grad_(), torch.rand(1, 5).cumsum(1).requires_grad_()
    return {
        fused.feature_sum: (f, u, torch.rand(1, 5), dtype),
        fused.feature_apply: (f, normal(1, 1, 3, 4), dtype),
        fused.fused_running_sum: (u, torch.rand(1, 5, 1, 4)),
        fused.factor_project: (u, hidden, weight, bias, dtype),
        fused.factor_expand: (f, hidden, weight, bias, dtype),
        fused.within_blocks: (f, f, u, normal(1, 2, 4, 4), rates, times, dtype),
    }


def test_opcheck():
    for operator, arguments in operators().items():
        torch.library.opcheck(operator.function._opoverload, arguments)


def step_arguments(needs_gradient: bool) -> tuple:
    """One token of two heads of rank 3 in vector form: u, omega, Phi's and Psi's hidden units, the state, the rest."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).requires_grad_(needs_gradient)

    token = normal(B, H, D), torch.rand(B), normal(B, H, W), normal(B, H, W)
    state = normal(B, H, R), normal(B, H, D), torch.rand(B)
    factors = (normal(H, R, D, W), normal(H, R, D)) * 2
    return *token, *state, None, *factors, normal(H, D, D), None, None, None


def test_a_token_has_no_derivative():
    torch.library.opcheck(torch.ops.itnet.low_rank_step, step_arguments(needs_gradient=False))
    out = torch.ops.itnet.low_rank_step(*step_arguments(needs_gradient=True))[0]
    with pytest.raises(NotImplementedError, match="itnet::low_rank_step has no derivative: call the transform"):
        out.sum().backward()
