"""The operator by itself: every structure of kernel, tiles, measures, query domains, normalisation, memory."""

import pytest
import torch

from itnet_kernels import KernelWeights, integral_transform
from modeling_itnet.special_cases import FunctionKernel, IntegralOperator, Kernel, MLPKernel

TILES = [None, (1, 1), (3, 2), (4, 100)]


def data(count=7, features=3, batch=2):
    return torch.randn(batch, count, features), torch.rand(count, 2), torch.rand(batch, count)


def scalar(x, y, u_x, u_y):
    return torch.cos((x - 2 * y).sum(-1)) + (u_x * u_y).sum(-1)


def diagonal(x, y, u_x, u_y):
    return torch.sin(u_x + 2 * u_y) + (x * y).sum(-1, keepdim=True)


def matrix(x, y, u_x, u_y):
    return u_x.unsqueeze(-1) * u_y[..., None, :2].expand(*u_y.shape[:-1], 1, 2) @ torch.ones(2, 3) + x[..., :1, None]


def pair_by_pair(function, structure, u, x, omega, queries, query_positions):
    """The definition: one pair at a time, in Python."""
    out = []
    for b in range(len(u)):
        rows = []
        for i in range(queries.shape[1]):
            total = 0
            for j in range(u.shape[1]):
                point = [t.view(1, 1, 1, -1) for t in (query_positions[i], x[j], queries[b, i], u[b, j])]
                kappa = function(*point)[0, 0, 0]
                total = total + omega[b, j] * (kappa @ u[b, j] if structure == "matrix" else kappa * u[b, j])
            rows.append(total)
        out.append(torch.stack(rows))
    return torch.stack(out)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("structure", ["scalar", "diagonal", "matrix"])
def test_any_kernel_against_pairs(structure, tile):
    function = {"scalar": scalar, "diagonal": diagonal, "matrix": matrix}[structure]
    u, x, omega = data()
    queries, query_positions = torch.randn(2, 5, 3), torch.rand(5, 2)
    operator = IntegralOperator(FunctionKernel(function, structure), tile=tile)
    actual = operator(u, x, measure=omega, queries=queries, query_positions=query_positions)
    expected = pair_by_pair(function, structure, u, x, omega, queries, query_positions)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("normalization", ["sum", "softmax"])
def test_normalisation(normalization, is_causal, tile):
    u, _, omega = data()
    x = torch.rand(7, 1)
    operator = IntegralOperator(
        FunctionKernel(lambda *a: scalar(*a).exp() if normalization == "sum" else scalar(*a)),
        normalization=normalization,
        is_causal=is_causal,
        tile=tile,
    )
    weights = scalar(x.view(1, 7, 1, 1), x.view(1, 1, 7, 1), u.unsqueeze(2), u.unsqueeze(1)).exp() * omega[:, None]
    if is_causal:
        weights = weights * (x.view(1, 1, 7) <= x.view(1, 7, 1))
    expected = weights / weights.sum(-1, keepdim=True) @ u
    torch.testing.assert_close(operator(u, x, measure=omega), expected)


def test_large_logits_do_not_overflow():
    u, x, _ = data()
    operator = IntegralOperator(FunctionKernel(lambda *a: 1e4 * scalar(*a)), normalization="softmax", tile=(2, 2))
    logits = 1e4 * scalar(x.view(1, 7, 1, 2), x.view(1, 1, 7, 2), u.unsqueeze(2), u.unsqueeze(1))
    torch.testing.assert_close(operator(u, x), logits.softmax(-1) @ u)


def test_no_mass_gives_zero():
    u, x, omega = data()
    omega[1] = 0
    out = IntegralOperator(FunctionKernel(scalar), normalization="softmax")(u, x, measure=omega)
    assert out[0].abs().min() > 0
    assert (out[1] == 0).all()


@pytest.mark.parametrize("tile", TILES)
def test_gradients_do_not_depend_on_tiles(tile):
    u, x, omega = (t.requires_grad_() for t in data())
    whole = IntegralOperator(FunctionKernel(scalar), normalization="softmax", tile=(7, 7))
    tiled = IntegralOperator(FunctionKernel(scalar), normalization="softmax", tile=tile)
    upstream = torch.randn(2, 7, 3)
    expected = torch.autograd.grad(whole(u, x, measure=omega), (u, x, omega), upstream)
    actual = torch.autograd.grad(tiled(u, x, measure=omega), (u, x, omega), upstream)
    torch.testing.assert_close(actual, expected)


def test_measures():
    u, x, _ = data()
    uniform, counting = (IntegralOperator(FunctionKernel(scalar), measure=m)(u, x) for m in ("uniform", "counting"))
    torch.testing.assert_close(uniform * 7, counting)


def test_residual_is_applied_to_the_queries():
    u, x, _ = data()
    residual, queries = torch.nn.Linear(3, 3), torch.randn(2, 4, 3)
    points = torch.rand(4, 2)
    plain, full = (IntegralOperator(FunctionKernel(scalar), residual=r) for r in (None, residual))
    actual = full(u, x, queries=queries, query_positions=points)
    torch.testing.assert_close(actual, plain(u, x, queries=queries, query_positions=points) + residual(queries))


def test_the_learned_kernel_is_one_of_them():
    heads, size, width, frequencies = 2, 3, 5, 4
    weights = KernelWeights(
        w1=torch.randn(width, 6 * frequencies + 1 + 3 * size),
        b1=torch.randn(width),
        w2=torch.randn(heads, size**2, width),
        b2=torch.randn(heads, size**2),
        fourier=torch.randn(frequencies, 2),
    )
    u, x, omega = torch.randn(2, 9, heads, size), torch.rand(9, 2), torch.rand(2, 9)
    actual = IntegralOperator(MLPKernel(weights), tile=(4, 5))(u, x, measure=omega)
    expected = integral_transform(u, x, weights, measure=omega, backend="reference")
    torch.testing.assert_close(actual, expected)


class Recorder(Kernel):
    """Notes the largest tile it was asked for, and claims to vanish far from the diagonal."""

    depends_on_sample = False

    def __init__(self, entries):
        super().__init__()
        self.entries_per_pair, self.largest, self.calls = entries, 0, 0

    def vanishes(self, x, y):
        return bool((y.amin() - x.amax() > 0.1) or (x.amin() - y.amax() > 0.1))

    def forward(self, pairs):
        self.calls += 1
        kappa = ((pairs.x[:, :, None, 0] - pairs.y[:, None, :, 0]).abs() < 0.1).to(pairs.u_y.dtype)
        self.largest = max(self.largest, kappa.numel())
        return kappa.unsqueeze(-1)


def test_only_a_tile_is_in_memory_and_empty_tiles_are_skipped():
    count, entries = 2000, 1000
    kernel = Recorder(entries)
    x = torch.linspace(0, 1, count).unsqueeze(1)
    u = torch.randn(1, count, 2)
    out = IntegralOperator(kernel)(u, x)
    assert kernel.largest * entries <= 2**22
    side = int((2**22 / entries) ** 0.5)
    assert kernel.calls < 0.3 * (count / side) ** 2
    near = (x[:, None, 0] - x[None, :, 0]).abs() < 0.1
    torch.testing.assert_close(out[0], near.double() @ u[0] / count)


def test_tiles_of_matrices_are_as_small_as_they_must_be():
    """A formula whose values are 32 x 32 matrices: 64 x 64 of them fit."""
    sizes = []

    def identity(x, y, u_x, u_y):
        sizes.append(x.shape[1] * y.shape[2])
        return torch.eye(32).expand(len(u_x), x.shape[1], y.shape[2], 32, 32)

    u = torch.randn(1, 150, 32)
    torch.testing.assert_close(
        IntegralOperator(FunctionKernel(identity, "matrix"))(u), u.mean(1, keepdim=True).expand_as(u)
    )
    assert max(sizes) * 32**2 <= 2**22


def test_training_stores_no_kernel_values():
    """What autograd keeps grows like n, not like n^2: rows of tiles are recomputed in the backward pass."""
    stored = {}
    for count in (64, 128, 256):
        u, x = torch.randn(1, count, 2, requires_grad=True), torch.rand(count, 1)
        kept = {}  # storages by address: several saved tensors may share one

        def pack(tensor, kept=kept):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = IntegralOperator(FunctionKernel(scalar), tile=(32, 32))(u, x)
        stored[count] = sum(kept.values())
        out.sum().backward()
    assert stored[256] <= 4.5 * stored[64]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"normalization": "max"}, r"`normalization` \('max'\)"),
        ({"measure": "lebesgue"}, r"`measure` \('lebesgue'\)"),
    ],
)
def test_errors_on_construction(arguments, message):
    with pytest.raises(ValueError, match=message):
        IntegralOperator(FunctionKernel(scalar), **arguments)


def test_errors_on_call():
    u, x, _ = data()
    operator = IntegralOperator(FunctionKernel(scalar))
    with pytest.raises(ValueError, match="`positions` holds 6 points for 7"):
        operator(u, x[:6])
    with pytest.raises(ValueError, match="`measure`"):
        operator(u, x, measure=torch.ones(5))
    with pytest.raises(ValueError, match=r"`structure` \('full'\)"):
        FunctionKernel(scalar, "full")
    with pytest.raises(ValueError, match="expected 4 axes"):
        IntegralOperator(FunctionKernel(scalar, "diagonal"))(u, x)
