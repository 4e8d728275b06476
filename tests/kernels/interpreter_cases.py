"""The Triton kernels in Triton's interpreter. Run by test_triton_interpreter.py: Triton reads TRITON_INTERPRET when
it is imported, so that these tests need processes of their own. No bfloat16: the interpreter multiplies its bits.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from itnet_kernels import KERNEL_INPUTS, integral_transform
from itnet_kernels.exact.reference import kernel_input, pair_measure
from itnet_kernels.exact.triton.pairs import TritonPairs
from itnet_kernels.positions import fourier_features
from itnet_kernels.validation import batched
from itnet_kernels.weights import split_input_weights

# One sample, two heads, head_dim 16 and width 32 unless said otherwise
CASES = {
    "n1": {"n": 1},
    "n15-causal": {"n": 15, "is_causal": True},
    "n17-per-sample": {"n": 17, "per_sample": True, "batch": 2, "heads": 1},
    "n33-causal-per-sample": {"n": 33, "is_causal": True, "per_sample": True, "batch": 2, "heads": 1},
    "n40": {"n": 40, "dim": 3, "heads": 1},
    "n40-17-queries-causal": {"n": 40, "num_queries": 17, "is_causal": True, "heads": 1},
    "n15-17-queries": {"n": 15, "num_queries": 17, "per_sample": True, "heads": 1},
    "shared-output": {"n": 7, "shared_output": True, "is_causal": True, "batch": 3},
    "raw-coordinates": {"n": 15, "frequencies": 0, "heads": 1},
    "d32-w64": {"n": 15, "head_dim": 32, "width": 64, "heads": 1, "is_causal": True},
    "d64-w128": {"n": 9, "head_dim": 64, "width": 128, "heads": 1},
    "d128-w32": {"n": 9, "head_dim": 128, "heads": 1},
    "d16-w256": {"n": 5, "width": 256, "heads": 1},
    "d24-w48": {"n": 17, "head_dim": 24, "width": 48, "per_sample": True},
    "d80-w20-causal": {"n": 5, "head_dim": 80, "width": 20, "shared_output": True, "is_causal": True},
    "content": {"n": 17, "inputs": ("u_x", "u_y", "u_x*u_y"), "heads": 1},
    "product": {"n": 15, "inputs": ("u_x*u_y",), "is_causal": True, "heads": 1},
    "positions": {"n": 15, "inputs": ("x", "y", "x-y", "distance"), "heads": 1},
    "displacement": {"n": 15, "inputs": ("x-y",), "heads": 1},
    "distance": {"n": 15, "inputs": ("distance", "u_y"), "heads": 1},
    "nothing": {"n": 3, "inputs": ()},
    "directions": {"n": 9, "head_dim": 8, "heads": 1, "directions": True},
    "many-frequencies": {"n": 5, "heads": 1, "frequencies": 70},
}
# Positions that are data, as they are for models: the weights of Fourier features have a kernel of their own then.
FROZEN = [
    "n15-causal",
    "n40",
    "n40-17-queries-causal",
    "shared-output",
    "d32-w64",
    "d64-w128",
    "d24-w48",
    "displacement",
    "distance",
    "many-frequencies",
    "text",
    "text-causal",
    "keys-per-sample",
]
HALF_CASES = [
    "n1",
    "n17-per-sample",
    "n33-causal-per-sample",
    "n40",
    "d32-w64",
    "d64-w128",
    "d24-w48",
    "raw-coordinates",
]


def make(problem, name: str, zero_tail: int = 0):
    """The case ``name``, with measure 0 on the last keys of the first sample."""
    case = {"batch": 1, "head_dim": 16, "width": 32} | CASES[name]
    problem_ = problem(**case)
    if zero_tail:
        problem_.measure[0, -zero_tail:] = 0
    return problem_


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Deterministic algorithms fill uninitialised memory with NaN: nothing unwritten may be read."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", CASES)
def test_float32(problem, same, name):
    compare(make(problem, name), same, name)


def compare(problem_, same, name: str, position_gradients: bool | None = None) -> None:
    """float32 with the reference in float64: the output and every gradient, of positions unless they are frozen."""
    wanted = name not in FROZEN if position_gradients is None else position_gradients
    actual = problem_.to(torch.float32).run_backward("triton", position_gradients=wanted)
    same(actual, problem_.run_backward("reference", position_gradients=wanted), 1e-5)


@pytest.mark.parametrize("name", ["n17-per-sample", "n15-causal"])
def test_zero_measure_tail(problem, same, name):
    problem_ = make(problem, name, zero_tail=9)
    actual = problem_.to(torch.float32).run_backward("triton")
    same(actual, problem_.run_backward("reference"), 1e-5)
    garbage = replace(problem_, u=problem_.u.clone())
    garbage.u[0, -9:] = 100.0
    alone = problem_.to(torch.float32).run("triton")[0, :-9]
    torch.testing.assert_close(garbage.to(torch.float32).run("triton")[0, :-9], alone)


def test_measure_zero_everywhere(problem):
    problem_ = make(problem, "n15-causal")
    problem_.measure.zero_()
    results = problem_.to(torch.float32).run_backward("triton")
    assert all(bool(value.isfinite().all()) for value in results.values())
    assert not results["out"].any()


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_no_measure(problem, is_causal):
    problem_ = make(problem, "n17-per-sample")
    grads = {}
    for backend, dtype in (("reference", torch.float64), ("triton", torch.float32)):
        u = problem_.u.detach().clone().to(dtype).requires_grad_()
        weights = problem_.to(dtype).weights
        out = integral_transform(u, problem_.positions, weights, is_causal=is_causal, backend=backend)
        (out * torch.linspace(-1, 1, out.numel(), dtype=dtype).view_as(out)).sum().backward()
        grads[backend] = (out.detach().double(), u.grad.double())
    for actual, expected in zip(grads["triton"], grads["reference"], strict=True):
        assert (actual - expected).norm() <= 1e-5 * expected.norm()


def bounded(monkeypatch, size: int) -> None:
    """Workspaces of at most ``size`` bytes in both backwards."""
    monkeypatch.setattr("itnet_kernels.exact.triton.pairs.WORKSPACE_BYTES", size)
    monkeypatch.setattr("itnet_kernels.exact.triton.chunked_backward.CHUNK_BYTES", size)


def test_many_chunks(problem, same, monkeypatch):
    """Workspaces for 16 queries of one sample at a time."""
    problem_ = problem(n=17, batch=2, heads=1, head_dim=16, width=32, is_causal=True)
    bounded(monkeypatch, 1)
    actual = problem_.to(torch.float32).run_backward("triton")
    same(actual, problem_.run_backward("reference"), 1e-5)


RAGGED = {
    "text": {"dim": 1, "regular": True},
    "text-causal": {"dim": 1, "regular": True, "is_causal": True},
    "mesh": {"dim": 3},
    "raw-mesh-causal": {"dim": 3, "frequencies": 0, "is_causal": True, "heads": 1},
    "keys-per-sample": {"num_queries": 5, "shared_queries": True},
    "keys-per-sample-raw": {"num_queries": 5, "shared_queries": True, "frequencies": 0, "heads": 1},
    "displacement": {"inputs": ("x-y",)},
    "keys-and-distance": {"inputs": ("y", "distance", "u_y"), "heads": 1},
}


def ragged(problem, name: str):
    """Three samples of 17, 9 and 4 positions of their own, padded: measure 0, and the position of the last one."""
    case = {"n": 17, "batch": 3, "heads": 2, "head_dim": 16, "width": 32, "per_sample": True} | RAGGED[name]
    shared_queries = case.pop("shared_queries", False)
    problem_ = problem(**case)
    for sample, length in enumerate((17, 9, 4)):
        problem_.measure[sample, length:] = 0
        problem_.positions[sample, length:] = problem_.positions[sample, length - 1]
    return replace(problem_, query_positions=problem_.query_positions[0]) if shared_queries else problem_


@pytest.mark.parametrize("name", RAGGED)
def test_ragged_float32(problem, same, name):
    compare(ragged(problem, name), same, name)


@pytest.mark.parametrize(
    ("name", "workspace"),
    [("text-causal", 2_000_000), ("text-causal", 1), ("keys-per-sample", 1_500_000), ("keys-per-sample", 1)],
    ids=["text-2 samples", "text-16 queries", "keys-2 and 1 samples", "keys-16 queries"],
)
def test_ragged_chunks(problem, same, monkeypatch, name, workspace):
    """Chunks of two samples; those of the bias two and those of the kernels one; of 16 queries of one sample."""
    bounded(monkeypatch, workspace)
    compare(ragged(problem, name), same, name, position_gradients=name == "keys-per-sample")


def test_a_later_chunk_has_more_groups_of_samples(problem, same, monkeypatch):
    """48 queries of both samples by three programs, then 32 queries by two for each sample: four places, not three."""
    monkeypatch.setenv("ITNET_FUSED_BACKWARD", "1")
    monkeypatch.setattr("itnet_kernels.exact.triton.weight_sums.multiprocessors", lambda device: 16)
    problem_ = problem(n=9, num_queries=80, batch=2, heads=1, head_dim=16, width=32)
    bounded(monkeypatch, 48 * 32 * 128 * 4)  # bytes of the bias of 48 queries
    compare(problem_, same, "n9-80-queries", position_gradients=False)


def test_frozen_positions_of_their_own(problem, same):
    compare(make(problem, "n17-per-sample"), same, "n17-per-sample", position_gradients=False)


def test_few_products_for_w2(problem, same, monkeypatch):
    """Four chunks of 16 queries add to dW2 at once."""
    problem_ = problem(n=64, batch=1, heads=1, head_dim=16, width=32)
    monkeypatch.setenv("ITNET_FUSED_BACKWARD", "0")
    bounded(monkeypatch, 2**19)
    shapes = []

    def record(left, right):
        shapes.append(tuple(left.shape))
        return left @ right

    monkeypatch.setattr("itnet_kernels.exact.triton.chunked_backward.float32_product", record)
    actual = problem_.to(torch.float32).run_backward("triton")
    assert [shape for shape in shapes if shape[1] == 32 * 16] == [(1, 32 * 16, 64)]
    same(actual, problem_.run_backward("reference"), 1e-5)


def test_w2_gradient_has_the_range_of_float32(problem):
    """Mixed precision with a scaled loss: dW2 is beyond 65504, its factors are not."""
    problem_ = make(problem, "n40").to(torch.float32)
    problem_.weights.w2.mul_(1e-3)
    weights = problem_.weights._replace(w2=problem_.weights.w2.requires_grad_())
    grads = {}
    for backend in ("reference", "triton"):
        with torch.autocast("cpu", dtype=torch.float16, enabled=backend == "triton"):
            out = integral_transform(
                problem_.u, problem_.positions, weights, measure=problem_.measure, backend=backend
            )
        (grads[backend],) = torch.autograd.grad(out, weights.w2, torch.full_like(out, 2e4))
    assert grads["reference"].abs().max() > 2 * torch.finfo(torch.float16).max
    error = (grads["triton"] - grads["reference"]).norm()
    assert error <= 4 * torch.finfo(torch.float16).eps * grads["reference"].norm()


@pytest.mark.parametrize("name", [*HALF_CASES, "text", "text-causal", "mesh", "raw-mesh-causal"])
def test_float16(problem, name):
    """Error against float64 at most twice that of the same mathematics in plain PyTorch at that dtype."""
    problem_ = ragged(problem, name) if name in RAGGED else make(problem, name)
    problem_ = problem_.to(torch.float16).to(torch.float64)
    expected = problem_.run_backward("reference", position_gradients=name not in FROZEN)
    actual = problem_.to(torch.float16).run_backward("triton", position_gradients=name not in FROZEN)
    plain = plain_pytorch(problem_.to(torch.float16))
    assert actual["out"].dtype == torch.float16
    for key, value in expected.items():
        error, allowed = ((results[key].double() - value).norm() for results in (actual, plain))
        size = value.norm() + (visible_mass_part(problem_, expected["out"]) if key == "measure" else 0)
        assert error <= 2 * allowed + torch.finfo(torch.float16).eps * size, f"{key}: {error} {allowed} {size}"


def visible_mass_part(problem, out: Tensor) -> Tensor | float:
    """The size of what the normalisation of a causal sum takes away from the gradient of the measure: both parts are
    rounded by themselves, before one is subtracted from the other."""
    if not problem.is_causal:
        return 0.0
    generator = torch.Generator().manual_seed(1)
    upstream = torch.randn(out.shape, generator=generator, dtype=torch.float64)  # as in Problem.gradients
    mass = problem.measure.cumsum(1)
    per_query = ((upstream * out).sum((2, 3)) / mass).where(mass > 0, 0)
    return per_query.flip(1).cumsum(1).norm()


def plain_pytorch(problem) -> dict[str, Tensor]:
    """The reassociated operator as one would write it, every operation on features in the problem's dtype."""
    leaves = {name: t.detach().clone().requires_grad_() for name, t in problem.tensors().items()}
    problem = problem.with_tensors(leaves)
    weights, keys, dtype = problem.weights, problem.u, problem.u.dtype
    assert weights.inputs == KERNEL_INPUTS and problem.queries is None
    positions = batched(problem.positions)
    z = kernel_input(keys.unsqueeze(2), keys.unsqueeze(1), positions, positions, weights)
    hidden = torch.nn.functional.gelu(z @ weights.w1.T + weights.b1)  # [B, n, n, H, w]
    omega = pair_measure(problem.measure, keys.shape[1], problem.is_causal)
    values = omega[..., None, None] * keys.unsqueeze(1)  # omega_ij u_j [B, n, n, H, d_h]
    moments = torch.einsum("bijhk,bijhc->bihkc", hidden, values)
    w2, b2 = (t.unflatten(1, (keys.shape[-1],) * 2) for t in (weights.w2, weights.b2))
    out = torch.einsum("hack,bihkc->biha", w2, moments) + torch.einsum("hac,bihc->biha", b2, values.sum(2))
    generator = torch.Generator().manual_seed(1)
    out.backward(torch.randn(out.shape, generator=generator, dtype=torch.float64).to(dtype))
    return {"out": out.detach()} | {name: leaf.grad for name, leaf in leaves.items()}


@torch.no_grad()
@pytest.mark.parametrize("per_sample", [False, True], ids=["shared", "per-sample"])
def test_batch_mates_change_no_bit(problem, pair_sum_arguments, per_sample):
    """The moments of a sample, alone and beside one whose measure is larger; the library's products come after."""
    both = problem(n=17, batch=2, heads=2, head_dim=16, width=32, per_sample=per_sample).to(torch.float16)
    both.measure[1] *= 3.3
    first = both.positions[:1] if per_sample else both.positions
    alone = replace(both, u=both.u[:1], measure=both.measure[:1], positions=first)
    moments = []
    for problem_ in (both, alone):
        pairs = TritonPairs(pair_sum_arguments(problem_, "triton").with_rows()._replace(operand_dtype=torch.float16))
        tile = pairs.bias.tile(slice(0, len(problem_.u)), slice(0, 17))
        pairs.bias_blocks = tile.shape[1]
        moments.append(pairs._moments(slice(0, 1), slice(0, 17), tile[:1]))
    assert moments[0].any()
    assert torch.equal(*moments)


@pytest.mark.parametrize("where", ["offset", "extent"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_raw_coordinates_in_float16(problem, same, where, is_causal):
    """Around 1000, where float16 has steps of 1/2, and over [0, 1e5], which float16 cannot hold."""
    problem_ = problem(n=15, batch=1, heads=1, head_dim=16, width=32, frequencies=0, is_causal=is_causal)
    problem_.measure.div_(problem_.measure.sum())
    problem_ = problem_.to(torch.float16).to(torch.float64)
    if where == "offset":  # with biases that cancel it, so that the digits behind it decide
        problem_ = replace(problem_, positions=problem_.positions + 1000)
        problem_.weights.b1.sub_(1000 * problem_.weights.w1[:, :4].sum(1)).copy_(problem_.weights.b1.half())
    else:  # and weights to go with it: hidden units must not exceed 65504 in half precision
        problem_ = replace(problem_, positions=problem_.positions * 1e5)
        problem_.weights.w1[:, :7].mul_(2.0**-5)
    limits = torch.finfo(torch.float16)
    # A gradient that float16 cannot hold is infinite there; those of the measure and of w1 may be.
    expected = {name: t for name, t in problem_.run_backward("reference").items() if t.abs().max() < limits.max}
    assert expected.keys() >= {"out", "u", "positions", "b1", "w2", "b2"}
    actual = problem_.to(torch.float16).run_backward("triton")
    same({name: actual[name] for name in expected}, expected, 8 * limits.eps)


def from_fragments(tile: Tensor) -> Tensor:
    """[b, blocks, w, n / 64, 1024] -> [b, 16 blocks, w, n], by the order that fragments.py states."""
    bits = tile.unflatten(-1, (2, 2, 8, 4, 4, 2))  # p3, j5, p2-0, j21, j43, j0
    bits = bits.permute(0, 1, 4, 6, 2, 3, 5, 8, 7, 9)  # sample, block, p3, p2-0, unit, keys, j5, j43, j21, j0
    return bits.flatten(5, 9).flatten(1, 3)


@torch.no_grad()
def test_fragments_hold_the_rows(problem, pair_sum_arguments):
    """Both orders of the bias hold the same numbers, whatever their parts."""
    for settings in (
        {},
        {"is_causal": True},
        {"frequencies": 0},
        {"inputs": ("distance", "u_y")},
        {"per_sample": True},
    ):
        problem_ = problem(n=19, heads=1, head_dim=16, width=32, **settings).to(torch.float32)
        bias = TritonPairs(pair_sum_arguments(problem_, "triton").with_rows()).bias
        where = slice(0, 2), slice(0, 19)
        torch.testing.assert_close(from_fragments(bias.tile(*where))[:, :19], bias.rows(*where), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_bias_beyond_the_range_of_its_dtype(problem, pair_sum_arguments):
    """bfloat16 operands reach far beyond 65504, the float16 bias beside them gets there by its range."""
    problem_ = problem(n=15, batch=1, heads=1, head_dim=16, width=32)
    problem_ = replace(problem_, positions=problem_.positions * 1e6)
    arguments = pair_sum_arguments(problem_.to(torch.float32), "triton").with_rows()
    distances = torch.cdist(problem_.positions, problem_.positions)
    columns = split_input_weights(problem_.weights, 16)
    gamma = fourier_features(problem_.positions, problem_.weights.fourier)
    angles = fourier_features(problem_.positions[:, None] - problem_.positions, problem_.weights.fourier)
    expected = (
        columns["distance"] * distances.unsqueeze(1) + columns["y"] @ gamma.T + (angles @ columns["x-y"].T).mT
    )  # [n, w, n]
    pairs = TritonPairs(arguments._replace(operand_dtype=torch.bfloat16))
    tile = from_fragments(pairs.bias.tile(slice(0, 1), slice(0, 15)))[0, :15, :, :15]
    assert tile.dtype == torch.float16
    assert expected.abs().max() > 4 * torch.finfo(torch.float16).max
    error = (2 * pairs.ranges * tile.double() - expected).abs().max()
    assert error <= torch.finfo(torch.float16).eps * expected.abs().max()


def test_heads_with_hidden_layers_of_their_own(problem, same):
    problem_ = problem(n=15, batch=1, heads=2, head_dim=16, width=32)
    layers = {name: getattr(problem_.weights, name) for name in ("w1", "b1")}
    own = {name: torch.stack([layer, layer.flip(0) / 2]) for name, layer in layers.items()}
    problem_ = replace(problem_, weights=problem_.weights._replace(**own))
    actual = problem_.to(torch.float32).run_backward("triton")
    same(actual, problem_.run_backward("reference"), 1e-5)


def test_large_row_terms_stay_causal(problem, same):
    """What hides the future outweighs any row term."""
    problem_ = make(problem, "n15-causal")
    problem_.weights.b1.add_(1e5)
    actual = problem_.to(torch.float32).run_backward("triton")
    same(actual, problem_.run_backward("reference"), 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
def test_repeats_bit_by_bit(problem, dtype):
    problem_ = make(problem, "content").to(dtype)
    first, second = problem_.run_backward("triton"), problem_.run_backward("triton")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_opcheck(problem, pair_sum_arguments):
    problem_ = problem(n=3, batch=1, heads=1, head_dim=16, width=32, is_causal=True).to(torch.float32)
    arguments = pair_sum_arguments(problem_, "triton")
    torch.library.opcheck(torch.ops.itnet.pair_sum, arguments)


def test_autocast_lowers_float32(problem):
    problem_ = make(problem, "n17-per-sample").to(torch.float32)
    exact = problem_.run("triton")
    with torch.autocast("cpu", dtype=torch.float16):
        lowered = problem_.run("triton")
    assert lowered.dtype == torch.float32
    error = float((lowered - exact).norm() / exact.norm())
    assert 1e-5 < error < 5e-3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 130}, r"head sizes end at 128, `u` has 130"),
        ({"width": 260}, r"kernel widths end at 256, `weights.w1` has 260"),
        ({"layers": 3}, "3-layer"),
        ({"dtype": torch.float64}, "float64"),
        ({"dtype": torch.bfloat16}, r"interpreter .*TRITON_INTERPRET=1.* bits of torch.bfloat16"),
    ],
    ids=lambda value: "-".join(map(str, next(iter(value.items())))) if isinstance(value, dict) else "",
)
def test_unsupported_is_an_error(problem, change, message):
    dtype = change.pop("dtype", torch.float32)
    problem_ = problem(**({"n": 3, "head_dim": 16, "width": 32} | change)).to(dtype)
    with pytest.raises(ValueError, match=message):
        problem_.run("triton")
