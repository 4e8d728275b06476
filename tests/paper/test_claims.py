"""Inequalities and counts of the paper that need no training: bounds, variances, FLOPs, reads, norms."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from itnet_kernels import (
    KernelWeights,
    integral_transform,
    kernel_matrices,
    low_rank_transform,
    monte_carlo_transform,
)
from itnet_kernels.exact.reference import kernel_input
from modeling_itnet import ITNetConfig, ITNetModel
from modeling_itnet.operator import find_operators
from modeling_itnet.special_cases import FunctionKernel, IntegralOperator, MLPKernel, from_module
from modeling_itnet.special_cases.verify import gauss_legendre


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


# --- App. rank_bound -------------------------------------------------------------------------------------------------


def small_kernel(count=12, size=3, width=8, frequencies=2):
    """Features [1, n, 1, d], positions [n, 1] and weights of one head in float64."""
    double = {"dtype": torch.float64}
    weights = KernelWeights(
        w1=torch.randn(width, 6 * frequencies + 1 + 3 * size, **double) / 3,
        b1=torch.randn(width, **double),
        w2=torch.randn(1, size**2, width, **double),
        b2=torch.randn(1, size**2, **double),
        fourier=torch.randn(frequencies, 1, **double),
    )
    return torch.randn(1, count, 1, size, **double), torch.rand(count, 1, **double), weights


@pytest.mark.parametrize("rank", [1, 4, 12, 30])
def test_nuclear_norm_bound(rank):
    """|K - K_r|_F <= |K|_* / sqrt(r) for the low-rank operator, with a factor of 2 to spare.

    K is the operator as a matrix, [n d, n d], by applying it to a basis of signals with the queries' features fixed.
    One step of the paper's proof, "by Cauchy-Schwarz", goes the other way; it is not needed.
    """
    u, x, weights = small_kernel()
    count, size = u.shape[1], u.shape[3]
    matrices = kernel_matrices(u, u, x[None], x[None], weights)[0, :, :, 0]  # [n, n, d, d]
    matrix = matrices.transpose(1, 2).flatten(2).flatten(0, 1)  # [n d, n d]
    left, values, right = torch.linalg.svd(matrix)
    phi = (left[:, :rank] * values[:rank]).view(1, count, size, 1, rank).transpose(2, 4).transpose(2, 3)
    psi = right[:rank].T.reshape(1, count, size, 1, rank).transpose(2, 4).transpose(2, 3)  # [1, n, 1, r, d]
    basis = torch.eye(count * size, dtype=torch.float64).view(-1, count, 1, size)
    batch = len(basis)
    ones = torch.ones(batch, count, dtype=torch.float64)
    approximate = low_rank_transform(
        basis, phi.expand(batch, -1, -1, -1, -1), psi.expand(batch, -1, -1, -1, -1), measure=ones
    )
    error = torch.linalg.matrix_norm(approximate.reshape(batch, -1).T - matrix)
    assert error > 0.5 * values[rank]  # an operator of rank r is no better than its next singular value
    assert error <= values.sum() / (2 * rank**0.5)
    tail = values[rank:]
    torch.testing.assert_close(error, tail.square().sum().sqrt())
    assert tail.square().sum() >= tail.sum().square() / len(tail)


# --- App. mc_variance ------------------------------------------------------------------------------------------------


def test_monte_carlo_mean_and_variance():
    """Eqs. app_var_exact to app_min_var for the package's estimator, with one sample, by summing over all keys.

    They hold for densities with respect to mu. For probabilities, which the mixture with epsilon / n assumes, the
    printed weight 1/p is n times too large.
    """
    u, x, weights = small_kernel(7)
    count, query = 7, 2
    g = kernel_matrices(u, u, x[None], x[None], weights)[0, query, :, 0] @ u[0, :, 0, :, None]
    g = g.squeeze(-1)  # kappa u at every key [n, d]
    integral = integral_transform(u, x, weights)[0, query, 0]
    torch.testing.assert_close(g.mean(0), integral)

    def moments(probability):
        """Mean and variance of the estimate from one key, drawn with these probabilities."""
        estimates = []
        for key in range(count):
            indices = torch.full((1, count, 1), key)
            drawn = probability[key].expand(1, count, 1)
            estimates.append(monte_carlo_transform(u, x, weights, indices=indices, probabilities=drawn)[0, query, 0])
        estimates = torch.stack(estimates)
        mean = (probability[:, None] * estimates).sum(0)
        return mean, (probability * (estimates - mean).square().sum(1)).sum()

    probability = torch.rand(count, dtype=torch.float64).softmax(0)
    density = probability * count  # with respect to mu = 1/n
    mean, variance = moments(probability)
    torch.testing.assert_close(mean, integral)
    torch.testing.assert_close(variance, (g.square().sum(1) / density).mean() - integral.square().sum())
    printed = (probability[:, None] * g / probability[:, None]).sum(0)  # weights 1/p for a probability p
    torch.testing.assert_close(printed, count * integral)

    norms = g.norm(dim=1)
    mean, least = moments(norms / norms.sum())
    torch.testing.assert_close(mean, integral)
    torch.testing.assert_close(least, norms.mean() ** 2 - integral.square().sum())
    assert variance > least


# --- Prop. io_full -------------------------------------------------------


def test_flops_of_algorithm_1_by_counting():
    """2 n^2 H (w (6L + 1 + 3 d_h) + w d_h^2 + d_h^2) FLOPs: no SRAM in it, and the MLP outweighs the product by w."""
    count, heads, size, width, frequencies = 6, 2, 4, 5, 3
    inputs = 6 * frequencies + 1 + 3 * size
    weights = KernelWeights(
        w1=torch.randn(width, inputs),
        b1=torch.zeros(width),
        w2=torch.randn(heads, size**2, width),
        b2=torch.zeros(heads, size**2),
        fourier=torch.randn(frequencies, 1),
    )
    u, x = torch.randn(1, count, heads, size), torch.rand(count, 1)
    with FlopCounterMode(display=False) as counter:
        integral_transform(u, x, weights, backend="reference")
    positions = 2 * frequencies * (count + count + count**2)  # the phases of gamma
    pairs = 2 * count**2 * heads * (width * inputs + width * size**2 + size**2)
    assert counter.get_total_flops() == pairs + positions


def test_backward_by_counting():
    """Through stored kernel values the backward pass is twice the forward; with recomputation, three times."""
    heads, size, width, frequencies = 2, 8, 16, 3
    weights = KernelWeights(
        w1=torch.randn(width, 6 * frequencies + 1 + 3 * size, requires_grad=True),
        b1=torch.zeros(width, requires_grad=True),
        w2=torch.randn(heads, size**2, width, requires_grad=True),
        b2=torch.zeros(heads, size**2, requires_grad=True),
        fourier=torch.randn(frequencies, 1),
    )
    u, x = torch.randn(1, 12, heads, size, requires_grad=True), torch.rand(12, 1)
    with FlopCounterMode(display=False) as counter:
        out = integral_transform(u, x, weights, backend="reference")
        forward = counter.get_total_flops()
        out.sum().backward()
    assert (counter.get_total_flops() - forward) / forward == pytest.approx(2, abs=0.1)


def test_reads_of_the_tiled_pass():
    """Keys are loaded once per tile of queries: n^2 d / B_q, as the proof of Prop. io_full says, not n^2 d / B_k."""
    count, size = 48, 3

    def loaded(query_tile, key_tile):
        reads = 0

        def kernel(x, y, u_x, u_y):
            nonlocal reads
            reads += u_y.shape[2] * size
            return torch.ones(1, x.shape[1], y.shape[2])

        operator = IntegralOperator(FunctionKernel(kernel), tile=(query_tile, key_tile))
        operator(torch.randn(1, count, size), torch.rand(count, 1))
        return reads

    assert [loaded(q, 8) for q in (4, 8, 16)] == [count**2 * size // q for q in (4, 8, 16)]
    assert len({loaded(8, k) for k in (4, 8, 16)}) == 1


# --- App. init -------------------------------------------------------------------------------------------------------


def test_norm_of_the_initial_kernel():
    """ "|K|_F is about 0.064" is epsilon d_h times hidden units of size 1; at W1 ~ N(0, 0.02^2) they are smaller."""
    model = ITNetModel(ITNetConfig.from_preset("itnet-base", modality="signal", position_dim=2, num_hidden_layers=1))
    operator = find_operators(model)[0]
    u, x = torch.randn(1, 32, 12, 64), torch.rand(1, 32, 2)
    with torch.no_grad():
        weights = operator.kernel(model.fourier.frequencies)
        matrices = kernel_matrices(u, u, x, x, weights._replace(b2=torch.zeros_like(weights.b2)))
        z = kernel_input(u.unsqueeze(2), u.unsqueeze(1), x, x, weights)
        hidden = torch.nn.functional.gelu(z @ weights.w1.T + weights.b1)
    norm = torch.linalg.matrix_norm(matrices).square().mean().sqrt()
    expected = 1e-3 * 64 * hidden.square().mean().sqrt()
    assert norm == pytest.approx(float(expected), rel=0.05)  # 12 * 128 * 64^2 random weights, 1e6 hidden units
    assert norm < 0.5 * 0.064


# --- Strictness, boundaries, one layer -------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("length", [1.0, 3.0])
def test_gaussian_mass_at_the_centre(axes, length):
    """Eq. C_lower: C_l(centre) >= exp(-s / (4 l^2)); it does not exceed 1, so the bound itself is not violated."""
    y, weights = gauss_legendre(40)
    one = (weights * torch.exp(-((y - 0.5) ** 2) / length**2)).sum()
    mass = float(one**axes)
    assert torch.exp(torch.tensor(-axes / (4 * length**2))) <= mass <= 1


def test_attention_output_bound():
    """Lemma attn_bound: an average is no longer than the longest value, whatever the kernel, once it is normalised."""
    u, values = torch.randn(1, 9, 4), torch.randn(1, 9, 4)
    kernel = FunctionKernel(lambda x, y, u_x, u_y: 3 * (u_x * u_y).sum(-1))
    longest = values.norm(dim=-1).max()
    x = torch.rand(9, 1)
    normalised = IntegralOperator(kernel, normalization="softmax")(u, x, values=values)
    assert normalised.norm(dim=-1).max() <= longest * (1 + 1e-6)
    assert IntegralOperator(kernel)(u, x, values=values).norm(dim=-1).max() > longest


def test_one_operator_adds_up_over_disjoint_supports():
    """Prop. rate needs an ideal kernel, which F(u) = (integral of u)^2 has not: one layer is additive, F is not."""
    weights = KernelWeights(
        w1=torch.randn(8, 6 * 2 + 4),
        b1=torch.randn(8),
        w2=torch.randn(1, 1, 8),
        b2=torch.randn(1, 1),
        fourier=torch.randn(2, 1),
    )
    x = torch.rand(10, 1)
    left, right = torch.zeros(1, 10, 1, 1), torch.zeros(1, 10, 1, 1)
    left[:, 1:5], right[:, 5:] = torch.randn(1, 4, 1, 1), torch.randn(1, 5, 1, 1)
    operator = IntegralOperator(MLPKernel(weights))
    at_zero = [operator(u, x)[0, 0] for u in (left, right, left + right)]  # u(x_0) = 0 in all three
    torch.testing.assert_close(at_zero[0] + at_zero[1], at_zero[2])
    squares = [u.mean() ** 2 for u in (left, right, left + right)]
    assert abs(squares[0] + squares[1] - squares[2]) > 1e-3


def test_convolution_is_linear_and_equivariant():
    """Props. conv_linear and conv_equivariant, on a circle."""
    operator = from_module(torch.nn.Conv1d(2, 2, 3, padding="same", padding_mode="circular", bias=False).double())
    u, v = torch.randn(2, 1, 2, 9, dtype=torch.float64)
    torch.testing.assert_close(operator(2 * u - 3 * v), 2 * operator(u) - 3 * operator(v))
    torch.testing.assert_close(operator(u.roll(4, -1)), operator(u).roll(4, -1))


def test_the_witness_t_is_neither():
    """Props. T_nonlinear (with its own numbers, sigma(4) and sigma(1)) and T_not_equivariant."""

    def witness(u):
        return torch.sigmoid(u @ u[0]).unsqueeze(-1) * u

    ones = torch.ones(4, 1, dtype=torch.float64)
    assert witness(2 * ones)[0] / 2 == pytest.approx(0.982, abs=5e-4)
    assert witness(ones)[0] == pytest.approx(0.731, abs=5e-4)
    u = torch.randn(6, 2, dtype=torch.float64)
    assert (witness(u.roll(2, 0)) - witness(u).roll(2, 0)).norm() > 0.1 * witness(u).norm()


def test_a_filter_that_varies_in_space_is_no_convolution():
    """Cor. ordering calls one an element of Conv that is not in Attn; a shift is, and a varying filter is not."""
    x, u = torch.arange(8).unsqueeze(1), torch.randn(1, 8, 1, dtype=torch.float64)

    def operator(kernel):
        return IntegralOperator(FunctionKernel(kernel), measure="counting")

    varying = operator(lambda x, y, u_x, u_y: (1.0 + x[..., 0]) * (x == y)[..., 0])
    shift = operator(lambda x, y, u_x, u_y: 1.0 * ((x - y) % 8 == 1)[..., 0])
    assert not torch.allclose(varying(u.roll(1, 1), x), varying(u, x).roll(1, 1))
    torch.testing.assert_close(shift(u.roll(1, 1), x), shift(u, x).roll(1, 1))
    order = torch.tensor([1, 0, 2, 3, 4, 5, 6, 7])
    assert not torch.allclose(shift(u[:, order], x), shift(u, x)[:, order])


def test_measure_of_a_cell_cancels():
    """Theorem 1 (b): a mass of h^s per point and a kernel f / h^s are the plain sum, for any h."""
    x, u, taps = torch.arange(8).unsqueeze(1), torch.randn(1, 8, 2, dtype=torch.float64), torch.randn(8).double()
    outs = []
    for h in (1.0, 0.1):
        kernel = FunctionKernel(lambda x, y, u_x, u_y, h=h: taps[((x - y) / h).round().long()[..., 0] % 8] / h)
        outs.append(IntegralOperator(kernel)(u, h * x, measure=torch.full((8,), h, dtype=torch.float64)))
    torch.testing.assert_close(*outs)


@pytest.mark.parametrize("p", [1, 2, float("inf")])
def test_youngs_inequality(p):
    """Lemma young: |w * u|_p <= |w|_1 |u|_p."""
    conv = torch.nn.Conv1d(1, 1, 5, padding="same", padding_mode="circular", bias=False)
    u = torch.randn(1, 1, 40)
    out = from_module(conv)(u)
    assert out.norm(p) <= conv.weight.norm(1) * u.norm(p) * (1 + 1e-6)
