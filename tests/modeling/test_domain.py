"""A domain: what follows from it is computed once per forward, and gradients pass through it."""

import pytest
import torch

from itnet_kernels import positions as positions_module
from itnet_kernels.measure import uniform_measure
from modeling_itnet import (
    Domain,
    ITNetForGraphClassification,
    ITNetForSignalRegression,
    ITNetModel,
    ITNetOperator,
    Signal,
)
from modeling_itnet.integration.proposal import ITNetProposal

MODES = {
    "exact": {"integration_mode": "exact"},
    "low_rank": {"integration_mode": "low_rank", "rank": 3},
    "monte_carlo": {"integration_mode": "monte_carlo", "num_samples": 4},
    "mixed": {"exact_max_positions": 6, "approximate_mode": "low_rank", "rank": 2},
}


@pytest.fixture
def count_calls(monkeypatch):
    """count_calls(owner, name): a list that grows with every call of the function."""

    def count(owner, name):
        calls, function = [], getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, **k: calls.append(a) or function(*a, **k))
        return calls

    return count


def padded_signal(batch=4, count=9):
    """Samples of 9, 4, 9 and 6 real positions, which two modes share out under "mixed"."""
    mask = torch.arange(count) < torch.tensor([9, 4, 9, 6])[:batch, None]
    return {
        "inputs_embeds": torch.randn(batch, count, 16),
        "positions": torch.rand(batch, count, 2),
        "measure": torch.rand(batch, count) + 0.1,
        "attention_mask": mask.long(),
    }


class TestOncePerForward:
    @pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
    @pytest.mark.parametrize("mode", ["exact", "low_rank", "monte_carlo"])
    def test_fourier_features(self, tiny_model, count_calls, mode, training):
        """Of the positions; those of the anchors are others."""
        model = tiny_model("image", num_hidden_layers=3, image_size=32, **MODES[mode]).train(training)
        calls = count_calls(positions_module, "fourier_features")
        tables = count_calls(positions_module, "find_displacements")
        model(torch.randn(2, 3, 32, 32)).last_hidden_state.sum().backward()
        of_all = [args for args in calls if list(args[0].shape) == [1, 17, 2]]
        assert len(of_all) == 1
        has_anchors = mode == "monte_carlo" and not training
        assert len(tables) == (mode == "exact" or has_anchors)

    def test_queries_at_the_positions(self, tiny_config, tiny_inputs, count_calls):
        """Once for the layers, and once for the query layer, whose queries are its keys."""
        model = ITNetForSignalRegression(tiny_config("signal", num_hidden_layers=3))
        calls = count_calls(positions_module, "fourier_features")
        tables = count_calls(positions_module, "find_tables")
        model(**tiny_inputs("signal"))
        assert len(calls) == 2 and len(tables) == 2

    def test_proposal(self, tiny_model, tiny_inputs, count_calls):
        model = tiny_model("signal", num_hidden_layers=3, **MODES["monte_carlo"]).train()
        ends = count_calls(ITNetProposal, "_ends")
        output = model(**tiny_inputs("signal"))
        assert len(ends) == 3 and output.proposal_loss > 0

    def test_edges(self, tiny_config, count_calls):
        model = ITNetModel(tiny_config("graph", node_feature_size=2, num_hidden_layers=3))
        gathered = count_calls(torch.Tensor, "gather")
        neighbors = torch.tensor([1, -1]).expand(2, 5, 2)
        model(node_features=torch.randn(2, 5, 2), positions=torch.rand(2, 5, 8), neighbors=neighbors)
        assert len(gathered) == 1

    def test_frequencies_of_an_operator_that_stands_alone(self, tiny_config, count_calls):
        operator = ITNetOperator(tiny_config("signal"))
        drawn = count_calls(torch, "randn")
        features, positions = torch.ones(2, 7, 16), torch.rand(7, 2)
        first, second = operator(features, positions), operator(features, positions)
        assert len(drawn) == 1 and torch.equal(first, second)
        assert "frequencies" not in operator.state_dict()


class TestGradients:
    """Checkpoints pass on a domain as it is, and reentrant ones follow no gradient into it by themselves."""

    @pytest.mark.parametrize("use_reentrant", [None, False, True], ids=["none", "plain", "reentrant"])
    @pytest.mark.parametrize("mode", MODES)
    def test_of_positions_and_measure(self, tiny_config, shake, mode, use_reentrant):
        model = shake(ITNetModel(tiny_config("signal", **MODES[mode]))).double().train()
        inputs = {name: v.double() if v.is_floating_point() else v for name, v in padded_signal().items()}

        def gradients():
            given = dict(inputs)
            leaves = [given[name] for name in ("inputs_embeds", "positions", "measure")]
            leaves = [leaf.clone().requires_grad_() for leaf in leaves]
            given |= dict(zip(("inputs_embeds", "positions", "measure"), leaves, strict=True))
            torch.manual_seed(5)
            output = model(**given)
            extra = 0 if output.proposal_loss is None else output.proposal_loss
            (output.last_hidden_state.square().sum() + extra).backward()
            return [leaf.grad for leaf in leaves]

        expected = gradients()
        assert all(gradient.abs().sum() > 0 for gradient in expected)
        if use_reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        single = torch.finfo(torch.float32).eps  # positions and measure pass through float32, some layers' sum
        for actual, wanted in zip(gradients(), expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=0, atol=8 * single * float(wanted.abs().max()))

    @pytest.mark.parametrize("use_reentrant", [False, True], ids=["plain", "reentrant"])
    def test_of_the_edge_gate(self, tiny_config, shake, use_reentrant):
        model = shake(ITNetForGraphClassification(tiny_config("graph", node_feature_size=2))).train()
        inputs = {
            "node_features": torch.randn(2, 5, 2),
            "positions": torch.rand(2, 5, 8),
            "neighbors": torch.tensor([1, 3, -1]).expand(2, 5, 3),
            "labels": torch.tensor([0, 1]),
        }
        model(**inputs).loss.backward()
        root = model.itnet.encoder.gate_root
        expected, root.grad = root.grad, None
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model(**inputs).loss.backward()
        assert expected != 0
        torch.testing.assert_close(root.grad, expected)


class TestDomain:
    def test_a_signal_is_features_on_a_domain(self, tiny_model, tiny_inputs):
        model, inputs = tiny_model("signal"), tiny_inputs("signal")
        signal = model.encoder(model.fourier, **inputs)
        features, domain = signal
        assert isinstance(signal, Signal) and features is signal.features
        assert torch.equal(domain.positions, inputs["positions"]) and domain.measure is signal.measure
        assert domain.frequencies is model.fourier.frequencies

    def test_parts_of_a_mixed_batch(self, tiny_config):
        config, inputs = tiny_config("signal", **MODES["mixed"]), padded_signal()
        measure = uniform_measure(inputs["inputs_embeds"], inputs["attention_mask"])
        domain = Domain(inputs["positions"], measure, torch.randn(3, 2))
        domain.gamma(torch.float32)
        parts = domain.resolve(config, training=False)
        assert [(part.mode, part.samples.tolist()) for part in parts] == [("exact", [1, 3]), ("low_rank", [0, 2])]
        assert domain.resolve(config, training=False) is parts
        for part in parts:
            assert torch.equal(part.positions, inputs["positions"][part.samples])
            assert torch.equal(part.measure, measure[part.samples])
            assert torch.equal(part.gamma(torch.float32), domain.gamma(torch.float32)[part.samples])
            assert torch.equal(part.of(inputs["inputs_embeds"]), inputs["inputs_embeds"][part.samples])
        config.integration_mode = "exact"  # settings are read when they are used
        assert [part.mode for part in domain.resolve(config, training=False)] == ["exact"]

    def test_moves_to_where_a_layer_is(self):
        domain = Domain(torch.rand(5, 2), torch.full((1, 5), 0.2), torch.randn(3, 2), edge_gate=torch.tensor(0.5))
        assert domain.to("cpu") is domain
        moved = domain.to("meta")
        tensors = (moved.positions, moved.measure, moved.frequencies, moved.edge_gate)
        assert all(tensor.is_meta for tensor in tensors) and moved.neighbors is None
        assert domain.to("meta") is moved

    def test_measure_beside_a_domain(self, tiny_config):
        domain = Domain(torch.rand(7, 2), torch.full((2, 7), 1 / 7), torch.randn(3, 2))
        with pytest.raises(ValueError, match="`measure` was given beside a `domain`"):
            ITNetOperator(tiny_config("signal"))(torch.randn(2, 7, 16), domain, domain.measure)

    @pytest.mark.parametrize("mode", ["exact", "low_rank", "monte_carlo"])
    def test_layers_can_be_compiled_by_themselves(self, tiny_model, tiny_inputs, mode):
        model = tiny_model("signal", **MODES[mode])
        torch._dynamo.reset()
        expected = [model(**tiny_inputs("signal", length=n)).last_hidden_state for n in (7, 9, 8)]
        for layer in model.layers:
            layer.compile(backend="eager", fullgraph=True)
        for n, wanted in zip((7, 9, 8), expected, strict=True):
            torch.testing.assert_close(model(**tiny_inputs("signal", length=n)).last_hidden_state, wanted)
