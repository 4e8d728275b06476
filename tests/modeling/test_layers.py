"""One layer against Eq. app_layer, and the two kinds of noise of App. regularization."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from modeling_itnet import Domain, ITNetForImageClassification, ITNetModel
from modeling_itnet.layers import ITNetDropPath


def make_layer(tiny_config, shake, **overrides):
    """A shaken float64 layer of a signal model with its arguments, in training mode."""
    model = ITNetModel(tiny_config("signal", **overrides))
    layer = shake(model.layers[-1]).double()
    hidden_states = torch.randn(6, 5, 16, dtype=torch.float64)
    measure = torch.full((6, 5), 0.2, dtype=torch.float64)
    return layer, (hidden_states, Domain(torch.rand(5, 2), measure, model.fourier.frequencies))


def norm(module, value):
    centred = value - value.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    return centred / (variance + 1e-6).sqrt() * module.weight + module.bias


def feed_forward(module, value):
    hidden = value @ module.expand.weight.T + module.expand.bias
    hidden = 0.5 * hidden * (1 + torch.erf(hidden / math.sqrt(2)))
    return hidden @ module.contract.weight.T + module.contract.bias


def blocks(layer, hidden_states, domain):
    """K[LN(u)] for u, and F(LN(z)) as a function of z."""
    mixed = layer.operator(norm(layer.operator_norm, hidden_states), domain)
    return mixed, lambda z: feed_forward(layer.feed_forward, norm(layer.feed_forward_norm, z))


class TestEquation:
    def test_layer(self, tiny_config, shake):
        layer, arguments = make_layer(tiny_config, shake)
        mixed, feed = blocks(layer, *arguments)
        z = mixed + arguments[0]
        torch.testing.assert_close(layer(*arguments)[0], feed(z) + z, rtol=1e-10, atol=1e-10)

    def test_activation_is_a_setting(self, tiny_config, shake):
        layer, (value, *_) = make_layer(tiny_config, shake, hidden_act="relu")
        module = layer.feed_forward
        expected = F.linear(F.linear(value, module.expand.weight, module.expand.bias).relu(), module.contract.weight)
        torch.testing.assert_close(module(value), expected + module.contract.bias, rtol=1e-10, atol=1e-10)

    def test_norm_epsilon_is_a_setting(self, tiny_config):
        model = ITNetModel(tiny_config("image", layer_norm_eps=0.5))
        norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
        assert [module.eps for module in norms] == [0.5] * 5


def test_feed_forward_in_pieces(tiny_config, shake, monkeypatch):
    """Without gradients, a few positions are computed at a time; where values cannot be looked at, all of them."""
    layer, (hidden_states, _) = make_layer(tiny_config, shake, hidden_dropout_prob=0.0)
    module = layer.feed_forward.eval()
    monkeypatch.setattr("modeling_itnet.layers._HIDDEN_ELEMENTS", 7 * module.width)
    lengths = []
    module.expand.register_forward_hook(lambda _, inputs, out: lengths.append(out[..., 0].numel()))
    whole = module(hidden_states)
    with torch.no_grad():
        pieces = module(hidden_states)
        traced = torch.vmap(module)(hidden_states)
    assert lengths == [30, 7, 7, 7, 7, 2, 5]
    torch.testing.assert_close(pieces, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(traced, whole, rtol=1e-12, atol=1e-12)


@pytest.fixture
def dropout_calls(monkeypatch):
    """Calls of torch's dropout that do something: (shape, rate), in order."""
    calls = []
    original = F.dropout

    def record(value, p=0.5, training=True, inplace=False):
        if training and p > 0:
            calls.append((tuple(value.shape), p))
        return original(value, p, training, inplace)

    monkeypatch.setattr(F, "dropout", record)
    return calls


class TestDropout:
    RATES = {"hidden_dropout_prob": 0.3, "embedding_dropout_prob": 0.2}

    @pytest.mark.parametrize(("name", "count"), [("image", 5), ("text", 7), ("signal", 7)])
    def test_three_places(self, tiny_model, tiny_inputs, dropout_calls, name, count):
        """After the embedding; in each layer after the operator and on the hidden units of the feed-forward net."""
        model = tiny_model(name, **self.RATES).train()
        model(**tiny_inputs(name))
        embedding, operator, hidden = ((3, count, 16), 0.2), ((3, count, 16), 0.3), ((3, count, 24), 0.3)
        assert dropout_calls == [embedding, operator, hidden, operator, hidden]

    @pytest.mark.parametrize(("rate", "expected"), [(None, 0.3), (0.45, 0.45), (0.0, None)], ids=str)
    def test_classifier_has_its_own_rate(self, tiny_config, tiny_inputs, dropout_calls, rate, expected):
        config = tiny_config("image", classifier_dropout=rate, **self.RATES)
        ITNetForImageClassification(config).train()(**tiny_inputs("image"))
        assert dropout_calls[5:] == ([] if expected is None else [((3, 16), expected)])

    @pytest.mark.parametrize("name", ["image", "text", "signal"])
    def test_no_dropout_in_evaluation(self, tiny_model, tiny_inputs, dropout_calls, name):
        tiny_model(name, **self.RATES)(**tiny_inputs(name))
        assert dropout_calls == []

    def test_operator_output_is_dropped_before_the_residual(self, tiny_config, shake, monkeypatch):
        layer, arguments = make_layer(tiny_config, shake, hidden_dropout_prob=0.5)
        monkeypatch.setattr(F, "dropout", lambda value, *args, **kwargs: torch.zeros_like(value))
        expected = arguments[0] + layer.feed_forward.contract.bias  # u + F(z), all hidden units dropped
        torch.testing.assert_close(layer(*arguments)[0], expected, rtol=1e-12, atol=1e-12)

    def test_share_and_scale_of_dropped_units(self, tiny_config, shake):
        layer, (hidden_states, domain) = make_layer(tiny_config, shake, hidden_dropout_prob=0.3)
        hidden_states = hidden_states.repeat(200, 1, 1)  # 1200 samples
        domain = domain.replaced(measure=domain.measure.repeat(200, 1))
        seen = {}
        layer.dropout.register_forward_hook(lambda _, given, out: seen.update(given=given[0], out=out))
        layer(hidden_states, domain)
        dropped = seen["out"] == 0
        assert abs(dropped.double().mean() - 0.3) < 5 * math.sqrt(0.3 * 0.7 / dropped.numel())
        torch.testing.assert_close(seen["out"][~dropped], seen["given"][~dropped] / 0.7)

    def test_none_inside_the_kernel(self, tiny_config, shake):
        layer, arguments = make_layer(tiny_config, shake, hidden_dropout_prob=0.5, drop_path_rate=0.5)
        training = layer.train().operator.integral(*arguments)
        assert torch.equal(training, layer.eval().operator.integral(*arguments))


class TestStochasticDepth:
    @pytest.mark.parametrize(
        ("depth", "rate", "expected"),
        [(1, 0.2, [0.2]), (4, 0.2, [0.05, 0.1, 0.15, 0.2]), (2, 0.0, [0.0, 0.0])],
        ids=["one-layer", "four-layers", "off"],
    )
    def test_rates_rise_linearly(self, tiny_config, depth, rate, expected):
        model = ITNetModel(tiny_config("image", num_hidden_layers=depth, drop_path_rate=rate))
        assert [layer.drop_path.probability for layer in model.layers] == pytest.approx(expected)

    @pytest.mark.parametrize("probability", [0.1, 0.5])
    def test_whole_samples_are_dropped_and_the_rest_scaled(self, probability):
        branch = torch.randn(20_000, 3, 2) + 5  # no zeros
        out = ITNetDropPath(probability)(branch)
        dropped = (out == 0).all(dim=(1, 2))
        assert torch.equal(dropped, (out == 0).any(dim=2).any(dim=1))
        torch.testing.assert_close(out[~dropped], branch[~dropped] / (1 - probability))
        error = 5 * math.sqrt(probability * (1 - probability) / len(branch))
        assert abs(dropped.float().mean() - probability) < error
        assert abs(out.mean() / branch.mean() - 1) < 2 * error / (1 - probability)  # expectation

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_small_rates_survive_half_precision(self, dtype):
        out = ITNetDropPath(0.001)(torch.ones(200_000, 1, dtype=dtype))
        assert out.dtype == dtype
        assert abs((out == 0).sum() - 200) < 5 * math.sqrt(200)

    def test_both_blocks_are_dropped_independently(self, tiny_config, shake):
        layer, (hidden_states, domain) = make_layer(tiny_config, shake, drop_path_rate=0.5)
        domain = domain.replaced(measure=domain.measure.repeat(20, 1))
        hidden_states = hidden_states.repeat(20, 1, 1)  # 120 samples
        mixed, feed = blocks(layer, hidden_states, domain)
        outcomes = {}
        for keep_operator in (0, 2):  # 1 / (1 - 0.5)
            for keep_feed in (0, 2):
                z = hidden_states + keep_operator * mixed
                outcomes[keep_operator, keep_feed] = z + keep_feed * feed(z)
        actual, _ = layer.train()(hidden_states, domain)
        matches = {which: (actual - expected).abs().amax(dim=(1, 2)) < 1e-9 for which, expected in outcomes.items()}
        assert torch.equal(sum(match.int() for match in matches.values()), torch.ones(120, dtype=torch.int))
        for which, match in matches.items():
            assert abs(match.sum() - 30) < 5 * math.sqrt(120 * 3 / 16), which

    @pytest.mark.parametrize("name", ["image", "text", "signal"])
    def test_evaluation_is_deterministic_and_training_is_not(self, tiny_model, tiny_inputs, name):
        rates = {"hidden_dropout_prob": 0.5, "embedding_dropout_prob": 0.5, "drop_path_rate": 0.5}
        noisy, plain, inputs = tiny_model(name, **rates), tiny_model(name), tiny_inputs(name)
        expected = plain(**inputs).last_hidden_state
        assert torch.equal(noisy(**inputs).last_hidden_state, expected)
        assert torch.equal(noisy(**inputs).last_hidden_state, expected)
        assert torch.equal(plain.train()(**inputs).last_hidden_state, expected)
        noisy.train()
        assert not torch.equal(noisy(**inputs).last_hidden_state, noisy(**inputs).last_hidden_state)
