"""``tiled`` equals ``reference`` in the output and in every gradient."""

from dataclasses import replace
from itertools import combinations

import pytest
import torch

from itnet_kernels import KERNEL_INPUTS, integral_transform

EPS = torch.finfo(torch.float32).eps
SUBSETS = [subset for size in range(8) for subset in combinations(KERNEL_INPUTS, size)]


@pytest.mark.usefixtures("tiling")
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("per_sample", [False, True], ids=["shared", "per-sample"])
@pytest.mark.parametrize("regular", [False, True], ids=["irregular", "lattice"])
@pytest.mark.parametrize(
    "case",
    [
        {"n": 1, "dim": 1},
        {"n": 13, "dim": 1},
        {"n": 12, "dim": 2, "layers": 3},
        {"n": 11, "dim": 3, "num_queries": 5},
        {"n": 9, "dim": 8, "frequencies": 2, "shared_output": True},
        {"n": 10, "dim": 2, "frequencies": 0},
        {"n": 17, "dim": 2, "batch": 3, "heads": 1, "head_dim": 3, "width": 5},
    ],
    ids=lambda case: "-".join(f"{name}{value}" for name, value in case.items()),
)
def test_float64(problem, same, case, regular, per_sample, is_causal):
    problem = problem(regular=regular, per_sample=per_sample, is_causal=is_causal, **case)
    same(problem.run_backward("tiled"), problem.run_backward("reference"), 1e-10)


@pytest.mark.usefixtures("tiling")
@pytest.mark.parametrize("inputs", SUBSETS, ids=lambda subset: "+".join(subset) or "none")
def test_every_subset_of_kernel_inputs(problem, same, inputs):
    for frequencies in (0, 2):
        problem_ = problem(n=6, batch=1, inputs=inputs, frequencies=frequencies, regular=True)
        same(problem_.run_backward("tiled"), problem_.run_backward("reference"), 1e-10)


@pytest.mark.usefixtures("tiling")
@pytest.mark.parametrize("regular", [False, True], ids=["irregular", "lattice"])
def test_frozen_positions(problem, same, regular):
    """Without a gradient for positions the weights' gradients stay the same, also when equal positions are shared."""
    problem_ = problem(n=9, regular=regular)
    problem_.positions = problem_.positions.expand(2, -1, -1)
    same(
        problem_.run_backward("tiled", position_gradients=False),
        problem_.run_backward("reference", position_gradients=False),
        1e-10,
    )


@pytest.mark.usefixtures("tiling")
@pytest.mark.parametrize("regular", [False, True], ids=["irregular", "lattice"])
@pytest.mark.parametrize("shared", ["query_positions", "positions"])
def test_one_domain_is_shared_and_the_other_is_not(problem, same, shared, regular):
    problem_ = problem(n=12, batch=3, dim=1, num_queries=7, per_sample=True, regular=regular)
    problem_ = replace(problem_, **{shared: getattr(problem_, shared)[0]})
    same(problem_.run_backward("tiled"), problem_.run_backward("reference"), 1e-10)


@pytest.mark.parametrize("layers", [2, 3])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_gradcheck(problem, is_causal, layers):
    problem_ = problem(n=4, batch=1, width=3, head_dim=2, frequencies=2, is_causal=is_causal, layers=layers)
    tensors = {name: tensor.requires_grad_() for name, tensor in problem_.tensors().items()}

    def run(*values):
        return problem_.with_tensors(dict(zip(tensors, values, strict=True))).run("tiled")

    assert torch.autograd.gradcheck(run, tuple(tensors.values()))


@pytest.mark.parametrize("regular", [False, True], ids=["irregular", "lattice"])
@pytest.mark.parametrize("n", [1, 15, 63, 64, 65, 200])
def test_float32(problem, same, n, regular):
    problem_ = problem(n=n, batch=1, head_dim=8, width=16, frequencies=8, regular=regular)
    expected = problem_.run_backward("reference", position_gradients=False)
    same(problem_.to(torch.float32).run_backward("tiled", position_gradients=False), expected, 100 * EPS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_half_precision_is_as_good_as_plain_pytorch(problem, dtype):
    """Error against float64 at most twice that of the same mathematics in plain PyTorch at that dtype."""
    problem_ = problem(n=33, batch=1, head_dim=16, width=32, is_causal=True)
    problem_ = problem_.to(dtype).to(torch.float64)  # the rounding of the inputs themselves is nobody's error
    expected = problem_.run_backward("reference", position_gradients=False)
    actual = problem_.to(dtype).run_backward("tiled", position_gradients=False)
    assert actual["out"].dtype == dtype
    plain = plain_pytorch(problem_.to(dtype))
    for name, value in expected.items():
        error, allowed = ((t[name].double() - value).norm() for t in (actual, plain))
        assert error <= 2 * allowed + torch.finfo(dtype).eps * value.norm(), name


def plain_pytorch(problem) -> dict[str, torch.Tensor]:
    """The operator as one would write it, every operation in the problem's dtype; output and gradients."""
    tensors = problem.tensors().items()
    leaves = {name: t.detach().clone().requires_grad_("positions" not in name) for name, t in tensors}
    problem = problem.with_tensors(leaves)
    weights, u, dtype = problem.weights, problem.u, problem.u.dtype
    x = problem.positions[:, None]
    difference = x - x.mT.reshape(1, -1, x.shape[-1])
    angles = [2 * torch.pi * t @ weights.fourier.T for t in (x, x.transpose(0, 1), difference)]
    n, heads = u.shape[1:3]
    shape = (1, n, n, heads, -1)
    groups = [torch.cat([a.sin(), a.cos()], -1).to(dtype)[None, :, :, None].expand(shape) for a in angles]
    groups += [difference.norm(dim=-1)[None, :, :, None, None].to(dtype).expand(shape)]
    u_x, u_y = u.unsqueeze(2).expand(shape), u.unsqueeze(1).expand(shape)
    z = torch.cat([*groups, u_x, u_y, u_x * u_y], dim=-1)
    hidden = torch.nn.functional.gelu(z @ weights.w1.T + weights.b1)
    matrices = torch.einsum("hkw,bijhw->bijhk", weights.w2, hidden) + weights.b2
    values = torch.einsum("bijhac,bjhc->bijha", matrices.unflatten(-1, (u.shape[-1],) * 2), u)
    omega = problem.measure[:, None].expand(1, n, n).tril()
    omega = omega / omega.sum(-1, keepdim=True)
    out = torch.einsum("bij,bijha->biha", omega, values)
    generator = torch.Generator().manual_seed(1)
    out.backward(torch.randn(out.shape, generator=generator, dtype=torch.float64).to(dtype))
    return {"out": out.detach()} | {name: leaf.grad for name, leaf in leaves.items() if leaf.requires_grad}


@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_padding_and_batch_mates_change_nothing(problem, backend):
    problem_ = problem(n=9, per_sample=True)
    alone = integral_transform(
        problem_.u[:1, :6],
        problem_.positions[:1, :6],
        problem_.weights,
        measure=problem_.measure[:1, :6],
        backend=backend,
    )
    problem_.measure[0, 6:] = 0
    torch.testing.assert_close(problem_.run(backend)[:1, :6], alone, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_permuting_the_domain_permutes_the_output(problem, backend):
    problem_ = problem(n=11)
    order = torch.randperm(11, generator=torch.Generator().manual_seed(3))
    expected = problem_.run(backend)[:, order]
    problem_.u, problem_.measure = problem_.u[:, order], problem_.measure[:, order]
    problem_.positions = problem_.positions[order]
    torch.testing.assert_close(problem_.run(backend), expected, rtol=1e-12, atol=1e-13)


def test_no_measure_is_uniform(problem):
    problem_ = problem(n=7)
    default = integral_transform(problem_.u, problem_.positions, problem_.weights)
    problem_.measure = torch.full((2, 7), 1 / 7, dtype=torch.float64)
    torch.testing.assert_close(default, problem_.run("tiled"), rtol=1e-12, atol=1e-13)


def test_non_contiguous_inputs(problem, same):
    problem_ = problem(n=8)
    expected = problem_.run("tiled")
    problem_.u = problem_.u.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0)
    problem_.positions = problem_.positions.T.contiguous().T
    torch.testing.assert_close(problem_.run("tiled"), expected)


def test_nothing_with_a_pair_index_is_saved(problem):
    """Bytes kept for the backward grow with n, not with n^2, and hold no [n, w, d_h] tensor either."""

    def saved_bytes(n: int) -> int:
        problem_ = problem(n=n, batch=1, heads=4, head_dim=16, width=32)
        tensors = {name: tensor.requires_grad_() for name, tensor in problem_.tensors().items()}
        own = {tensor.data_ptr() for tensor in tensors.values()}
        storages = {}

        def pack(tensor):
            if tensor.data_ptr() not in own:
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = problem_.run("tiled")
            total = sum(storages.values())
        out.sum().backward()
        return total

    small, large = saved_bytes(64), saved_bytes(256)
    assert large <= 4.2 * small
    features = 256 * 4 * 16 * 8  # one copy of u
    assert large <= 12 * features + 4 * 32 * 16 * 16 * 8 * 4
