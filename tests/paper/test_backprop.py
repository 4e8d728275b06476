"""App. backprop and Algorithms 1, 2 of the paper, line by line, against the gradients of the package's operators."""

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu

from itnet_kernels import KernelWeights, integral_transform
from itnet_kernels.exact.reference import kernel_input
from modeling_itnet.special_cases import ExponentialKernel, FunctionKernel, IntegralOperator, from_module

COUNT, SIZE, WIDTH, FREQUENCIES = 5, 3, 6, 2


@pytest.fixture(params=["tiled", "reference"])
def problem(request):
    """A small operator with one head in float64, its gradients by the package, and its kernel written out."""
    torch.manual_seed(0)
    double = {"dtype": torch.float64}
    x, omega = torch.rand(COUNT, 1, **double), torch.rand(COUNT, **double)
    leaves = {
        "w1": torch.randn(WIDTH, 6 * FREQUENCIES + 1 + 3 * SIZE, **double) / 3,
        "b1": torch.randn(WIDTH, **double),
        "w2": torch.randn(SIZE**2, WIDTH, **double),
        "b2": torch.randn(SIZE**2, **double),
        "residual": torch.randn(SIZE, SIZE, **double),
    }
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items()}
    fourier = torch.randn(FREQUENCIES, 1, **double)
    features = torch.randn(COUNT, SIZE, **double)
    queries, keys = (features.clone().requires_grad_() for _ in range(2))  # u(x) and u(y), by themselves
    weights = KernelWeights(leaves["w1"], leaves["b1"], leaves["w2"][None], leaves["b2"][None], fourier)
    out = integral_transform(
        keys[None, :, None],
        x,
        weights,
        measure=omega[None],
        queries=queries[None, :, None],
        query_positions=x,
        backend=request.param,
    )[0, :, 0]
    out = out + queries @ leaves["residual"].T
    g = torch.randn(COUNT, SIZE, **double)
    taken = {"queries": queries, "keys": keys, **leaves}
    gradients = dict(zip(taken, torch.autograd.grad(out, list(taken.values()), g), strict=True))
    gradients["u"] = gradients["queries"] + gradients["keys"]

    def gamma(p):
        phase = 2 * torch.pi * p @ fourier.T
        return torch.cat([torch.sin(phase), torch.cos(phase)], -1)

    i, j = torch.meshgrid(torch.arange(COUNT), torch.arange(COUNT), indexing="ij")
    step = x[i] - x[j]
    ends = [features[i], features[j], features[i] * features[j]]
    z = torch.cat([gamma(x[i]), gamma(x[j]), gamma(step), step.norm(dim=-1, keepdim=True), *ends], -1)  # Eq. bp_input
    fixed = {name: leaf.detach() for name, leaf in leaves.items()}
    pre = z @ fixed["w1"].T + fixed["b1"]
    kernel = (gelu(pre) @ fixed["w2"].T + fixed["b2"]).view(COUNT, COUNT, SIZE, SIZE)
    return {**fixed, "u": features, "x": x, "omega": omega, "weights": weights, "z": z, "pre": pre, "kernel": kernel,
            "g": g, "gradients": gradients}  # fmt: skip


def slope(pre):
    """Eq. bp_gelu."""
    return 0.5 * (1 + torch.erf(pre / 2**0.5)) + pre * torch.exp(-pre.square() / 2) / (2 * torch.pi) ** 0.5


def printed_terms(problem):
    """The four terms of Eq. bp_grad_input, from Eqs. bp_term_a to bp_dz_duj_query."""
    u, g, omega = problem["u"], problem["g"], problem["omega"]
    delta_2 = torch.einsum("j,ia,jc->ijac", omega, g, u).flatten(2)
    for_z = (delta_2 @ problem["w2"] * slope(problem["pre"])) @ problem["w1"]  # dL/dz_ij
    for_x, for_y, product = for_z[..., 6 * FREQUENCIES + 1 :].split(SIZE, -1)
    return {
        "value": torch.einsum("j,ijac,ia->jc", omega, problem["kernel"], g),
        "key": (for_y + product * u[:, None]).sum(0),
        "query": (for_x + product * u[None]).sum(1),
        "residual": g @ problem["residual"],
    }


def test_eq_grad_kernel():
    """dL/dK_ij = omega_j g_i u_j^T, against the integral of kernel values that are themselves leaves."""
    torch.manual_seed(0)
    values = torch.randn(1, COUNT, COUNT, SIZE, SIZE, dtype=torch.float64, requires_grad=True)
    u, omega, g = (torch.randn(*shape, dtype=torch.float64) for shape in ((COUNT, SIZE), (COUNT,), (COUNT, SIZE)))
    operator = IntegralOperator(FunctionKernel(lambda x, y, u_x, u_y: values, "matrix"), tile=(COUNT, COUNT))
    out = operator(u[None], torch.rand(COUNT, 1), measure=omega)
    gradient = torch.autograd.grad(out, values, g[None])[0]
    torch.testing.assert_close(torch.einsum("j,ia,jc->ijac", omega, g, u)[None], gradient)


def test_eq_grad_input_has_four_terms(problem):
    """Eq. bp_grad_input is right: query side and residual, and key side and value."""
    terms, gradients = printed_terms(problem), problem["gradients"]
    torch.testing.assert_close(terms["query"] + terms["residual"], gradients["queries"])
    torch.testing.assert_close(terms["key"] + terms["value"], gradients["keys"])


def test_eq_grad_u_of_the_backward_section_lacks_the_key_side(problem):
    """Eq. grad_u (App. backward): query side, "as key" K^T g, residual. The key side of the kernel is missing."""
    terms, truth = printed_terms(problem), problem["gradients"]["u"]
    missing = truth - terms["query"] - terms["value"] - terms["residual"]
    torch.testing.assert_close(missing, terms["key"])
    assert missing.norm() > 0.05 * truth.norm()


def test_algorithm_2_lines_for_the_input_are_wrong(problem):
    """Lines 10-11: dU_i += K_pq^T g_i omega_j, dU_j += K_pq g_i omega_j; no Jacobian of the kernel, no residual."""
    values, g, omega = problem["kernel"], problem["g"], problem["omega"]
    printed = torch.einsum("ijac,ia,j->ic", values, g, omega)  # into the query's row
    printed = printed + torch.einsum("ijac,ic,j->ja", values, g, omega)  # into the key's row, K not transposed
    truth = problem["gradients"]["u"]
    assert (printed - truth).norm() > 0.5 * truth.norm()
    # What the two lines must be: K^T g into the key's row, both Jacobians, and the residual.
    terms = printed_terms(problem)
    right = torch.einsum("ijac,ia,j->jc", values, g, omega) + terms["query"] + terms["key"] + terms["residual"]
    torch.testing.assert_close(right, truth)


def test_eq_mlp_gradients(problem):
    """Eqs. grad_W and bp_delta_output to bp_total_mlp, with the GELU derivative of Eq. bp_gelu."""
    u, g, omega = problem["u"], problem["g"], problem["omega"]
    delta_2 = torch.einsum("j,ia,jc->ijac", omega, g, u).flatten(2)  # [n, n, d^2]
    delta_1 = (delta_2 @ problem["w2"]) * slope(problem["pre"])
    printed = {
        "w2": torch.einsum("ijk,ijw->kw", delta_2, gelu(problem["pre"])),
        "b2": delta_2.sum((0, 1)),
        "w1": torch.einsum("ijw,ijz->wz", delta_1, problem["z"]),
        "b1": delta_1.sum((0, 1)),
        "residual": g.T @ u,
    }
    for name, gradient in printed.items():
        torch.testing.assert_close(gradient, problem["gradients"][name])


def test_eq_dz_du(problem):
    """Eqs. bp_dz_duj and bp_dz_duj_query: the identity and diag of the other end, zeros elsewhere."""
    u, x = problem["u"], problem["x"]
    i, j, first = 1, 3, 6 * FREQUENCIES + 1

    def z(u_i, u_j):  # of the pair (i, j), by the package
        ends = (end.view(1, 1, 1, 1, SIZE) for end in (u_i, u_j))
        return kernel_input(*ends, x[None, i : i + 1], x[None, j : j + 1], problem["weights"]).flatten()

    def jacobian(function, at):
        steps = torch.eye(SIZE, dtype=at.dtype)
        return torch.stack([function(at + e) - function(at) for e in steps], 1)  # z is linear in each of its ends

    key, query = jacobian(lambda t: z(u[i], t), u[j]), jacobian(lambda t: z(t, u[j]), u[i])
    eye, zero = torch.eye(SIZE, dtype=u.dtype), torch.zeros(SIZE, SIZE, dtype=u.dtype)
    assert key[:first].abs().max() == 0 == query[:first].abs().max()
    torch.testing.assert_close(key[first:], torch.cat([zero, eye, torch.diag(u[i])]))
    torch.testing.assert_close(query[first:], torch.cat([eye, zero, torch.diag(u[j])]))


def test_convolution_gradients():
    """Eqs. bp_conv_grad_w to bp_conv_grad_u, on a circle with the counting measure."""
    torch.manual_seed(0)
    count = 8
    taps = torch.randn(count, dtype=torch.float64, requires_grad=True)
    u = torch.randn(count, 3, dtype=torch.float64, requires_grad=True)
    kernel = FunctionKernel(lambda x, y, u_x, u_y: taps[((x - y) % count).squeeze(-1)])
    out = IntegralOperator(kernel, measure="counting")(u[None], torch.arange(count)[:, None])[0]
    g = torch.randn_like(out)
    for_taps, for_u = torch.autograd.grad(out, (taps, u), g)
    torch.testing.assert_close(torch.stack([(g * u.roll(m, 0)).sum() for m in range(count)]), for_taps)
    step = (torch.arange(count)[:, None] - torch.arange(count)) % count
    torch.testing.assert_close(taps[(-step) % count] @ g, for_u)  # the flipped filter


def test_attention_gradients():
    """Eqs. bp_attn_grad_alpha to bp_attn_query, mu = 1/n. The softmax Jacobian needs omega_l in its sum."""
    torch.manual_seed(0)
    count, size = 6, 4
    w_q, w_k, w_v = torch.randn(3, size, size, dtype=torch.float64)
    u = torch.randn(count, size, dtype=torch.float64, requires_grad=True)
    kernel = FunctionKernel(lambda x, y, u_x, u_y: ((u_x @ w_q.T) * (u_y @ w_k.T)).sum(-1) / size**0.5)
    operator = IntegralOperator(kernel, normalization="softmax")
    out = operator(u[None], torch.rand(count, 1), values=(u @ w_v.T)[None])[0]
    g = torch.randn_like(out)
    truth = torch.autograd.grad(out, u, g)[0]

    u, omega = u.detach(), 1 / count
    logits = (u @ w_q.T) @ (u @ w_k.T).T / size**0.5
    alpha = logits.exp() / (omega * logits.exp().sum(-1, keepdim=True))  # Eq. attn_kernel
    for_alpha = omega * g @ (u @ w_v.T).T  # Eq. bp_attn_grad_alpha

    def total(for_logits):
        value = omega * alpha.T @ g @ w_v
        key = for_logits.T @ (u @ w_q.T) / size**0.5 @ w_k
        query = for_logits @ (u @ w_k.T) / size**0.5 @ w_q
        return value + key + query

    printed = alpha * (for_alpha - (alpha * for_alpha).sum(-1, keepdim=True))  # Eq. bp_softmax_jacobian
    right = alpha * (for_alpha - omega * (alpha * for_alpha).sum(-1, keepdim=True))
    torch.testing.assert_close(total(right), truth)
    assert (total(printed) - truth).norm() > 0.05 * truth.norm()


def test_state_space_gradients():
    """Eqs. bp_ssm_bptt, bp_ssm_C and bp_ssm_B are right; Eq. bp_ssm_A only where A commutes with what stands by it."""
    torch.manual_seed(0)
    count, size, features = 5, 3, 2
    t, omega = torch.rand(count, dtype=torch.float64).sort().values, torch.rand(count, dtype=torch.float64)
    a, b, c, d = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((size, size), (size, features), (features, size), (features, features))
    )
    u = torch.randn(count, features, dtype=torch.float64, requires_grad=True)
    pairs = [(i, j) for i in range(count) for j in range(i + 1)]
    operator = IntegralOperator(ExponentialKernel(a, b, c), is_causal=True)
    out = operator(u[None], t[:, None], measure=omega)[0] + u @ d.T
    g = torch.randn_like(out)
    for_u, for_a, for_b, for_c = (gradient.detach() for gradient in torch.autograd.grad(out, (u, a, b, c), g))
    a, b, c, d, u = (tensor.detach() for tensor in (a, b, c, d, u))

    def flow(i, j):
        return torch.linalg.matrix_exp(a * (t[i] - t[j]))

    state = [sum(omega[j] * flow(i, j) @ b @ u[j] for j in range(i + 1)) for i in range(count)]
    later = [sum(omega[j] * flow(i, j).T @ c.T @ g[i] for i in range(j, count)) for j in range(count)]
    torch.testing.assert_close(torch.stack([b.T @ later[j] + d.T @ g[j] for j in range(count)]), for_u)
    torch.testing.assert_close(sum(torch.outer(g[i], state[i]) for i in range(count)), for_c)
    printed_b = sum(omega[j] * torch.outer(flow(i, j).T @ c.T @ g[i], u[j]) for i, j in pairs)
    torch.testing.assert_close(printed_b, for_b)
    printed_a = sum(omega[j] * (t[i] - t[j]) * torch.outer(flow(i, j).T @ c.T @ g[i], u[j]) @ b.T for i, j in pairs)
    assert (printed_a - for_a).norm() > 0.01 * for_a.norm()
    # The derivative of exp(A tau) in direction E is the integral of exp(A s) E exp(A (tau - s)) over s.
    nodes = (torch.arange(400, dtype=torch.float64) + 0.5) / 400
    right = 0
    for i, j in pairs:
        tau = t[i] - t[j]
        left, ahead = (torch.linalg.matrix_exp(a.T * (tau * s)[:, None, None]) for s in (nodes, 1 - nodes))
        outer = torch.outer(c.T @ g[i], b @ u[j])
        right = right + omega[j] * tau * (left @ outer @ ahead).mean(0)
    torch.testing.assert_close(right, for_a, rtol=1e-4, atol=1e-5)


def test_lstm_gradients():
    """Eq. bp_lstm_cell counts the path through h_t twice if dL/dc_t is the total; sigma' belongs to the pre-gates."""
    torch.manual_seed(0)
    lstm = nn.LSTM(2, 4, batch_first=True).double()
    u = torch.randn(1, 1, 2, dtype=torch.float64)
    hidden, previous = torch.randn(2, 1, 1, 4, dtype=torch.float64).unbind(0)
    previous.requires_grad_()
    out = from_module(lstm)(u, (hidden, previous))
    g_h = torch.randn_like(out)
    for_previous, for_bias = torch.autograd.grad(out, (previous, lstm.bias_ih_l0), g_h)
    with torch.no_grad():
        pre = u @ lstm.weight_ih_l0.T + lstm.bias_ih_l0 + hidden @ lstm.weight_hh_l0.T + lstm.bias_hh_l0
        i, f, candidate, o = pre.chunk(4, -1)
        i, f, candidate, o = i.sigmoid(), f.sigmoid(), candidate.tanh(), o.sigmoid()
        cell = f * previous + i * candidate
        through_h = g_h * o * (1 - cell.tanh().square())
        direct, total = 0, through_h  # dL/dc_t without and with the path through h_t; nothing comes from c_(t+1)
        torch.testing.assert_close(direct * f + through_h * f, for_previous)  # as printed, with the direct part
        assert (total * f + through_h * f - for_previous).norm() > 0.5 * for_previous.norm()
        # Eqs. bp_lstm_ft to bp_lstm_ot have sigma' in them: they are the gradients of the pre-activations, as biases.
        printed = {
            "i": total * candidate * i * (1 - i),
            "f": total * previous * f * (1 - f),
            "o": g_h * cell.tanh() * o * (1 - o),
        }
        gates = dict(zip("ifco", for_bias.chunk(4), strict=True))
        for name, gradient in printed.items():
            torch.testing.assert_close(gradient.flatten(), gates[name])
