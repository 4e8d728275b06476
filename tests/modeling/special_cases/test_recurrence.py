"""Theorem 3 against nn.RNN, nn.LSTM and nn.GRU, and the paper's tanh' kernels as the linearisations that they are."""

import copy

import pytest
import torch
from torch import nn

from modeling_itnet.special_cases import from_module, secant_slope, tangent_slope


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", ["rnn-tanh", "rnn-relu", "lstm", "lstm-projected", "gru"])
def test_recurrent_modules(kind, seed, draw, compare):
    size, features = draw.randint(2, 5), draw.randint(1, 4)
    layers, both = draw.randint(1, 3), draw.random() < 0.5
    options = {
        "rnn-tanh": {"nonlinearity": "tanh"},
        "rnn-relu": {"nonlinearity": "relu"},
        "lstm-projected": {"proj_size": size - 1},
    }.get(kind, {})
    module_class = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}[kind.partition("-")[0]]
    first, bias = draw.random() < 0.5, draw.random() < 0.7
    module = module_class(
        features, size, num_layers=layers, bias=bias, batch_first=first, bidirectional=both, **options
    )
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.6)
    length, batch = draw.randint(1, 12), draw.randint(1, 3)
    single = draw.random() < 0.2
    axes = [length] if single else ([batch, length] if first else [length, batch])
    states = []
    if draw.random() < 0.6:
        count = [layers * (1 + both)] + ([] if single else [batch])
        states.append(torch.randn(*count, options.get("proj_size", size)))
        if "lstm" in kind:
            states.append(torch.randn(*count, size))

    def call(m, u, *hx):
        return m(u, (hx if "lstm" in kind else hx[0]) if hx else None)

    compare(module, call, [torch.randn(*axes, features), *states])


def saturated(module_class, size, length, gain):
    """A module whose recurrent weights saturate its activations, a signal, and the direction of its gradients."""
    torch.manual_seed(0)
    module = module_class(4, size, batch_first=True)
    for name, parameter in module.named_parameters():
        if "weight_hh" in name:
            nn.init.normal_(parameter, std=gain / size**0.5)
    return module, torch.randn(1, length, 4), torch.randn(1, length, size)


def outputs_and_gradients(call, module, u, upstream):
    u = u.clone().requires_grad_()
    out = call(u)
    out = out[0] if isinstance(out, tuple) else out
    return [out, *torch.autograd.grad(out, [u, *module.parameters()], upstream)]


@pytest.mark.parametrize(
    ("module_class", "size", "length", "gain"),
    [(nn.RNN, 32, 220, 1.5), (nn.RNN, 8, 300, 1.5), (nn.GRU, 12, 200, 3.0), (nn.LSTM, 12, 200, 3.0)],
)
def test_saturation_over_long_times(module_class, size, length, gain):
    """In float32 and float64 the operator loses no more digits than the module itself does in float32.

    How much a recurrence amplifies rounding errors is measured on the module: float32 against float64. The operator
    may lose 100 times as much, since it adds up more terms; products of secant slopes lose all digits.
    """
    module, u, upstream = saturated(module_class, size, length, gain)
    single = copy.deepcopy(module).float()
    exact = outputs_and_gradients(module, module, u, upstream)
    own = outputs_and_gradients(single, single, u.float(), upstream.float())
    for twin in (module, single):
        dtype = twin.weight_hh_l0.dtype
        arguments = twin, u.to(dtype), upstream.to(dtype)
        unit = torch.finfo(dtype).eps / torch.finfo(torch.float32).eps
        for actual, want, rounded in zip(
            outputs_and_gradients(from_module(twin), *arguments), exact, own, strict=True
        ):
            amplified = (rounded.double() - want).norm() / want.norm() + length**0.5 * torch.finfo(torch.float32).eps
            assert (actual.double() - want).norm() / want.norm() < 100 * amplified * unit


def test_secant_slopes_leave_no_rest_and_lose_digits():
    """The integral of [u; 1] with the bias alone in the constant channel: exact for short signals only."""
    module, u, _ = saturated(nn.RNN, 32, 220, 1.5)
    with torch.no_grad():
        errors = (from_module(module, slope=secant_slope)(u) - module(u)[0]).abs().amax((0, 2))
    assert errors[:10].max() < 1e-12
    assert errors.max() > 1e-6


def test_a_chaotic_recurrence_is_refused():
    """Its float32 and float64 outputs have nothing in common, and neither has its integral."""
    module, u, _ = saturated(nn.RNN, 32, 200, 6.0)
    with torch.no_grad():
        assert (module(u)[0] - copy.deepcopy(module).float()(u.float())[0]).abs().max() > 0.5
        with pytest.raises(
            ArithmeticError, match=r"RNN amplifies rounding errors too much for torch.float64 over 200"
        ):
            from_module(module)(u)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    """Rounding errors of a recurrence that forgets do not pile up: a few units in the last place."""
    torch.manual_seed(0)
    module, u = nn.RNN(4, 8, batch_first=True), torch.randn(2, 50, 4)
    with torch.no_grad():
        actual = from_module(copy.deepcopy(module).to(dtype))(u.to(dtype))
    assert actual.dtype == dtype
    assert (actual - module(u)[0]).abs().max() < 20 * torch.finfo(dtype).eps


@pytest.mark.parametrize("module_class", [nn.RNN, nn.LSTM, nn.GRU])
def test_second_derivatives(module_class):
    """Slopes are constants for autograd, and the derivatives of all orders are still those of the module."""
    torch.manual_seed(0)
    module, u = module_class(2, 3, batch_first=True), torch.randn(1, 6, 2, requires_grad=True)

    def second(call):
        out = call(u)
        out = out[0] if isinstance(out, tuple) else out
        (first,) = torch.autograd.grad(out.square().sum(), u, create_graph=True)
        return torch.autograd.grad(first.square().sum(), [u, *module.parameters()])

    for actual, want in zip(second(from_module(module)), second(module), strict=True):
        torch.testing.assert_close(actual, want, rtol=1e-10, atol=1e-12)


def test_linear_recurrence(compare):
    rnn = nn.RNN(3, 4, batch_first=True)
    u, hidden = torch.randn(2, 20, 3), torch.zeros(2, 4)
    states = []
    for u_t in u.unbind(1):
        hidden = u_t @ rnn.weight_ih_l0.T + rnn.bias_ih_l0 + hidden @ rnn.weight_hh_l0.T + rnn.bias_hh_l0
        states.append(hidden)
    actual = from_module(rnn, nonlinearity="linear")(u)
    torch.testing.assert_close(actual, torch.stack(states, 1), rtol=0, atol=1e-10)


def test_zero_input_is_no_special_case(compare):
    """tanh(a) / a at a = 0."""
    module = nn.LSTM(2, 3, bias=False, batch_first=True)
    compare(module, lambda m, u: m(u), [torch.zeros(1, 4, 2)])


@pytest.mark.parametrize("module_class", [nn.RNN, nn.LSTM, nn.GRU])
def test_the_printed_kernel_is_a_linearisation(module_class):
    """With tanh' the error of small signals falls, and that of ordinary ones does not: it is first order."""
    torch.manual_seed(0)
    module = module_class(3, 4, bias=False, batch_first=True)
    u = torch.randn(2, 10, 3)
    operator = from_module(module, slope=tangent_slope)
    with torch.no_grad():
        small, ordinary = ((operator(v) - module(v)[0]).norm() / module(v)[0].norm() for v in (1e-3 * u, u))
    assert small < 1e-5
    assert ordinary > 0.05


def test_the_printed_kernel_of_a_linear_recurrence_is_exact():
    module = nn.RNN(3, 4, batch_first=True)
    u = torch.randn(2, 10, 3)
    secant, tangent = (
        from_module(module, nonlinearity="linear", **options)(u) for options in ({}, {"slope": tangent_slope})
    )
    torch.testing.assert_close(secant, tangent)


def test_future_inputs_do_not_matter():
    operator, u = from_module(nn.LSTM(3, 4, batch_first=True)), torch.randn(1, 8, 3)
    changed = u.clone()
    changed[:, 5:] += 1
    torch.testing.assert_close(operator(changed)[:, :5], operator(u)[:, :5], rtol=0, atol=0)
    assert (operator(changed) - operator(u))[:, 5:].abs().min() > 0


def test_errors():
    with pytest.raises(ValueError, match=r"LSTM is in training mode with a dropout of 0.2"):
        from_module(nn.LSTM(2, 3, num_layers=2, dropout=0.2))
    with pytest.raises(ValueError, match=r"`nonlinearity` \('linear'\) is for nn.RNN.*LSTM"):
        from_module(nn.LSTM(2, 3), nonlinearity="linear")
    packed = nn.utils.rnn.pack_sequence([torch.randn(3, 2), torch.randn(2, 2)])
    with pytest.raises(TypeError, match="PackedSequence"):
        from_module(nn.GRU(2, 3))(packed)
