"""App. proof_rnn where its formulas can be checked: Alekseev's formula, discretisations, printed kernels."""

import pytest
import torch
from torch import nn

from modeling_itnet.special_cases import ExponentialKernel, FunctionKernel, IntegralOperator, LinearStateSpace


@pytest.fixture(autouse=True)
def float64():
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(default)


@pytest.fixture
def printed_error(load_script):
    """printed_error(module, u): relative error of the kernel that the paper prints for a recurrent module."""
    script = load_script("printed_kernels")
    return lambda module, u: script.relative_error(script.PRINTED[type(module)](module, u), module(u)[0])


def cubic_trajectory(count: int = 4001):
    """h' = -h^3 + u(t), h(0) = 0 on [0, 2] by the classical Runge-Kutta method: affine in u, nonlinear in h."""
    t = torch.linspace(0, 2, count)
    step = t[1] - t[0]

    def u(time):
        return 2 + torch.sin(3 * time)

    def f(time, h):
        return -(h**3) + u(time)

    h = [torch.zeros(())]
    for time in t[:-1]:
        k1 = f(time, h[-1])
        k2 = f(time + step / 2, h[-1] + step / 2 * k1)
        k3 = f(time + step / 2, h[-1] + step / 2 * k2)
        k4 = f(time + step, h[-1] + step * k3)
        h.append(h[-1] + step / 6 * (k1 + 2 * k2 + 2 * k3 + k4))
    return t, torch.stack(h), u(t)


def integrate_to_the_end(kernel, t, u, features):
    """The integral of kappa(T, s) u(s) over s by the trapezoidal rule, kappa of (T, s, -, features(s))."""
    weights = torch.full_like(t, float(t[1] - t[0]))
    weights[[0, -1]] /= 2
    operator = IntegralOperator(FunctionKernel(kernel), is_causal=True)
    options = {"measure": weights, "query_positions": t[-1:, None], "values": u.view(1, -1, 1)}
    return operator(features.view(1, -1, 1), t[:, None], **options).squeeze()


def test_alekseev_needs_the_flow_without_input():
    """Eq. nonlinear_kernel_exact, Case 1 (affine in u): printed with the sensitivity of the driven flow.

    Alekseev's formula has that of the flow without input, started at h(s): (1 + 2 h(s)^2 tau)^-3/2 for h' = -h^3.
    With it the integral is h(t); with Phi_F as printed, exp of the integral of F_h along the trajectory, it is not.
    """
    t, h, u = cubic_trajectory()
    along = torch.cat([torch.zeros(1), torch.cumulative_trapezoid(-3 * h**2, t)])
    printed = integrate_to_the_end(
        lambda x, y, u_x, u_y: torch.exp(along[-1] - u_y).squeeze(-1), t, u, along
    )  # Phi_F(T, s; u)
    right = integrate_to_the_end(lambda x, y, u_x, u_y: ((1 + 2 * u_y**2 * (x - y)) ** -1.5).squeeze(-1), t, u, h)
    assert abs(right - h[-1]) < 1e-6 * h[-1]
    assert abs(printed - h[-1]) > 0.1 * h[-1]


def test_driven_sensitivity_is_exact_for_linear_systems():
    """Property (v): for F = Ah + Bu both flows have the sensitivity exp(A (t - s)), the kernel of Theorem 3 (a)."""
    t = torch.linspace(0, 2, 4001)
    u = 2 + torch.sin(3 * t)
    weights = torch.full_like(t, float(t[1] - t[0]))
    weights[[0, -1]] /= 2
    kernel = ExponentialKernel(torch.tensor([[-0.7]]), torch.ones(1, 1), torch.ones(1, 1))
    operator = IntegralOperator(kernel, is_causal=True)
    h = operator(u.view(1, -1, 1), t[:, None], measure=weights, query_positions=t[-1:, None]).squeeze()
    # h' = -0.7 h + 2 + sin 3t, solved by hand
    denominator = 0.49 + 9
    particular = 2 / 0.7 + (0.7 * torch.sin(3 * t) - 3 * torch.cos(3 * t)) / denominator
    exact = particular[-1] - particular[0] * torch.exp(-0.7 * t[-1])
    torch.testing.assert_close(h, exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("module_class", [nn.RNN, nn.LSTM, nn.GRU])
def test_printed_kernels_are_not_equalities(printed_error, module_class):
    module, u = module_class(3, 4, batch_first=True), torch.randn(2, 10, 3)
    assert printed_error(module, u) > 0.1


@pytest.mark.parametrize("module_class", [nn.RNN, nn.LSTM, nn.GRU])
def test_printed_kernels_of_small_signals(printed_error, module_class):
    """Without biases: the RNN's is right to first order; the others drop the recurrent part of the candidate."""
    module, u = module_class(3, 4, bias=False, batch_first=True), 1e-4 * torch.randn(2, 10, 3)
    error = printed_error(module, u)
    assert error < 1e-6 if module_class is nn.RNN else error > 0.05


def test_euler_as_printed_delays_the_input():
    """Eq. euler, h_(t+1) = Abar h_t + Bbar u_t, has the kernel C Abar^(t-1-s) Bbar, s < t, not C Abar^(t-s) Bbar."""
    u = torch.randn(1, 12, 2)
    module = LinearStateSpace(3, 2, 2, discretization="euler", delayed=True)
    a, b = module.discrete()
    out = module(u) - u @ module.d.T
    for delay, agrees in ((1, True), (0, False)):
        kernel = sum(module.c @ torch.linalg.matrix_power(a, 8 - delay - s) @ b @ u[0, s] for s in range(9 - delay))
        assert torch.allclose(kernel, out[0, 8]) == agrees


def test_zero_order_hold_kernel_vanishes_without_its_step():
    """Remark after Eq. zoh_B: C Abar^(t-s) Bbar is not C exp(A(t-s)dt) B; it converges to it divided by dt."""
    module = LinearStateSpace(3, 2, 2)
    for step in (1e-2, 1e-4):
        module.step = step
        _, b = module.discrete()
        assert (b - module.b).norm() > 0.9 * module.b.norm()
        assert (b / step - module.b).norm() < 3 * step * module.a.norm() * module.b.norm()
