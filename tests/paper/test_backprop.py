"""App. backprop and Algorithms 1, 2 of the paper, line by line, against autograd (docs/paper_audit.md)."""

import pytest
import torch
from torch.nn.functional import gelu

COUNT, SIZE, WIDTH, FREQUENCIES = 5, 3, 6, 2


@pytest.fixture
def problem():
    """A small operator with the kernel MLP written out, in float64, and its gradients by autograd."""
    torch.manual_seed(0)
    double = {"dtype": torch.float64}
    x, omega = torch.rand(COUNT, 1, **double), torch.rand(COUNT, **double)
    leaves = {
        "u": torch.randn(COUNT, SIZE, **double),
        "w1": torch.randn(WIDTH, 6 * FREQUENCIES + 1 + 3 * SIZE, **double) / 3,
        "b1": torch.randn(WIDTH, **double),
        "w2": torch.randn(SIZE**2, WIDTH, **double),
        "b2": torch.randn(SIZE**2, **double),
        "residual": torch.randn(SIZE, SIZE, **double),
    }
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items()}
    phase = 2 * torch.pi * torch.randn(FREQUENCIES, 1, **double)

    def gamma(p):
        return torch.cat([torch.sin(p @ phase.T), torch.cos(p @ phase.T)], -1)

    def z(u_x, u_y):
        """Eq. bp_input for every pair."""
        i, j = torch.meshgrid(torch.arange(COUNT), torch.arange(COUNT), indexing="ij")
        step = x[i] - x[j]
        ends = [u_x[i], u_y[j], u_x[i] * u_y[j]]
        return torch.cat([gamma(x[i]), gamma(x[j]), gamma(step), step.norm(dim=-1, keepdim=True), *ends], -1)

    def kernel(u_x, u_y):
        hidden = gelu(z(u_x, u_y) @ leaves["w1"].T + leaves["b1"])
        return (hidden @ leaves["w2"].T + leaves["b2"]).view(COUNT, COUNT, SIZE, SIZE)

    def forward(u_x, u_y, v):
        integral = torch.einsum("j,ijac,jc->ia", omega, kernel(u_x, u_y), v)
        return integral + u_x @ leaves["residual"].T

    u = leaves["u"]
    out = forward(u, u, u)
    upstream = torch.randn_like(out)  # g_i
    gradients = dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), upstream), strict=True))
    return {**leaves, "x": x, "omega": omega, "z": z, "kernel": kernel, "forward": forward, "g": upstream,
            "gradients": gradients}  # fmt: skip


def test_eq_grad_kernel(problem):
    """dL/dK_ij = omega_j g_i u_j^T."""
    values = problem["kernel"](problem["u"], problem["u"])
    out = torch.einsum("j,ijac,jc->ia", problem["omega"], values, problem["u"])
    expected = torch.autograd.grad(out, values, problem["g"])[0]
    printed = torch.einsum("j,ia,jc->ijac", problem["omega"], problem["g"], problem["u"])
    torch.testing.assert_close(printed, expected)


def input_terms(problem):
    """The four terms of Eq. bp_grad_input, each by autograd through its own argument only."""
    u, g = problem["u"], problem["g"]
    copies = [u.detach().clone().requires_grad_() for _ in range(3)]  # query side, key side, value
    query, key, value = torch.autograd.grad(problem["forward"](*copies), copies, g)
    residual = g @ problem["residual"]  # W_theta^T g_j
    return {"value": value, "key": key, "query": query - residual, "residual": residual}


def test_eq_grad_input_has_four_terms(problem):
    """Eq. bp_grad_input is right, and Eq. bp_term_a is its value term."""
    terms = input_terms(problem)
    torch.testing.assert_close(sum(terms.values()), problem["gradients"]["u"])
    values = problem["kernel"](problem["u"], problem["u"])
    value = torch.einsum("j,ijac,ia->jc", problem["omega"], values, problem["g"])
    torch.testing.assert_close(terms["value"], value)


def test_eq_grad_u_of_the_backward_section_lacks_the_key_side(problem):
    """Eq. grad_u (App. backward): query side, "as key" K^T g, residual. The key side of the kernel is missing."""
    terms = input_terms(problem)
    printed = terms["query"] + terms["value"] + terms["residual"]
    missing = problem["gradients"]["u"] - printed
    torch.testing.assert_close(missing, terms["key"])
    assert missing.norm() > 0.05 * problem["gradients"]["u"].norm()


def test_algorithm_2_lines_for_the_input_are_wrong(problem):
    """Lines 10-11: dU_i += K_pq^T g_i omega_j, dU_j += K_pq g_i omega_j; no Jacobian of the kernel, no residual."""
    values, g, omega = problem["kernel"](problem["u"], problem["u"]), problem["g"], problem["omega"]
    printed = torch.einsum("ijac,ia,j->ic", values, g, omega)  # into the query's row
    printed = printed + torch.einsum("ijac,ic,j->ja", values, g, omega)  # into the key's row, K not transposed
    truth = problem["gradients"]["u"]
    assert (printed - truth).norm() > 0.5 * truth.norm()
    # What the two lines must be: K^T g into the key's row, both Jacobians, and the residual.
    terms = input_terms(problem)
    right = torch.einsum("ijac,ia,j->jc", values, g, omega) + terms["query"] + terms["key"] + terms["residual"]
    torch.testing.assert_close(right, truth)


def test_eq_grad_residual(problem):
    torch.testing.assert_close(problem["g"].T @ problem["u"], problem["gradients"]["residual"])


def test_eq_mlp_gradients(problem):
    """Eqs. bp_delta_output to bp_total_mlp, with the GELU derivative of Eq. bp_gelu."""
    u, g, omega = problem["u"], problem["g"], problem["omega"]
    z = problem["z"](u, u)
    pre = z @ problem["w1"].T + problem["b1"]
    density = torch.exp(-pre.square() / 2) / (2 * torch.pi) ** 0.5
    slope = 0.5 * (1 + torch.erf(pre / 2**0.5)) + pre * density
    delta_2 = torch.einsum("j,ia,jc->ijac", omega, g, u).flatten(2)  # [n, n, d^2]
    delta_1 = (delta_2 @ problem["w2"]) * slope
    printed = {
        "w2": torch.einsum("ijk,ijw->kw", delta_2, gelu(pre)),
        "b2": delta_2.sum((0, 1)),
        "w1": torch.einsum("ijw,ijz->wz", delta_1, z),
        "b1": delta_1.sum((0, 1)),
    }
    for name, gradient in printed.items():
        torch.testing.assert_close(gradient, problem["gradients"][name])


def test_eq_dz_du(problem):
    """Eqs. bp_dz_duj and bp_dz_duj_query: the identity and diag of the other end, zeros elsewhere."""
    u = problem["u"].detach()
    i, j, first = 1, 3, 6 * FREQUENCIES + 1
    key = torch.autograd.functional.jacobian(lambda t: problem["z"](u, u.index_put((torch.tensor(j),), t))[i, j], u[j])
    query = torch.autograd.functional.jacobian(
        lambda t: problem["z"](u.index_put((torch.tensor(i),), t), u)[i, j], u[i]
    )
    eye, zero = torch.eye(SIZE, dtype=u.dtype), torch.zeros(SIZE, SIZE, dtype=u.dtype)
    assert key[:first].abs().max() == 0
    torch.testing.assert_close(key[first:], torch.cat([zero, eye, torch.diag(u[i])]))
    torch.testing.assert_close(query[first:], torch.cat([eye, zero, torch.diag(u[j])]))


def test_convolution_gradients():
    """Eqs. bp_conv_grad_w to bp_conv_grad_u, on a circle with the counting measure."""
    torch.manual_seed(0)
    count = 8
    taps = torch.randn(count, dtype=torch.float64, requires_grad=True)
    u = torch.randn(count, 3, dtype=torch.float64, requires_grad=True)
    step = (torch.arange(count)[:, None] - torch.arange(count)) % count
    out = taps[step] @ u
    g = torch.randn_like(out)
    for_taps, for_u = torch.autograd.grad(out, (taps, u), g)
    torch.testing.assert_close(torch.stack([(g * u.roll(m, 0)).sum() for m in range(count)]), for_taps)
    torch.testing.assert_close(taps[(-step) % count] @ g, for_u)  # the flipped filter


def test_attention_gradients():
    """Eqs. bp_attn_grad_alpha to bp_attn_query, mu = 1/n. The softmax Jacobian needs omega_l in its sum."""
    torch.manual_seed(0)
    count, size = 6, 4
    w_q, w_k, w_v = torch.randn(3, size, size, dtype=torch.float64)
    u = torch.randn(count, size, dtype=torch.float64, requires_grad=True)
    omega = 1 / count

    def attention(u):
        logits = (u @ w_q.T) @ (u @ w_k.T).T / size**0.5
        alpha = logits.exp() / (omega * logits.exp().sum(-1, keepdim=True))  # Eq. attn_kernel
        return omega * alpha @ (u @ w_v.T), alpha

    out, alpha = attention(u)
    g = torch.randn_like(out)
    truth = torch.autograd.grad(out, u, g)[0]
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

    def flow(i, j, a=a):
        return torch.linalg.matrix_exp(a * (t[i] - t[j]))

    state = [sum(omega[j] * flow(i, j) @ b @ u[j] for j in range(i + 1)) for i in range(count)]
    out = torch.stack([c @ state[i] + d @ u[i] for i in range(count)])
    g = torch.randn_like(out)
    for_u, for_a, for_b, for_c = torch.autograd.grad(out, (u, a, b, c), g)

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
    f, i, o, candidate, previous = (torch.rand(4, dtype=torch.float64, requires_grad=True) for _ in range(5))
    cell = f * previous + i * candidate
    hidden = o * cell.tanh()
    g_h, g_c = torch.randn(2, 4, dtype=torch.float64)  # from h_t, and from c_(t+1)
    truth = torch.autograd.grad((g_h * hidden + g_c * cell).sum(), previous, retain_graph=True)[0]
    direct = g_c  # dL/dc_t without the path through h_t
    whole = g_c + g_h * o * (1 - cell.tanh().square())
    sech = 1 - cell.tanh().square()
    torch.testing.assert_close(direct * f + g_h * o * sech * f, truth)  # as printed, with the direct part
    torch.testing.assert_close(whole * f, truth)  # with the total, the second term is already in it
    # Eq. bp_lstm_ft has sigma' in dL/df_t: it is the gradient of the pre-activation.
    pre = torch.logit(f.detach()).requires_grad_()
    gate = torch.sigmoid(pre)
    loss = (whole.detach() * gate * previous.detach()).sum()
    for_pre, for_gate = torch.autograd.grad(loss, (pre, gate))
    printed = whole * previous * gate * (1 - gate)
    torch.testing.assert_close(printed, for_pre)
    assert (printed - for_gate).abs().max() > 0.1 * for_gate.abs().max()
