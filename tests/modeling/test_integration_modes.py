"""The four integration modes of a model: what they compute, what they train, and how one turns into another."""

import copy
import logging

import pytest
import torch

from itnet_kernels import integral_transform, integrand_norms, kernel_matrices
from modeling_itnet import (
    Domain,
    ITNetConfig,
    ITNetForImageClassification,
    ITNetForMaskedLM,
    ITNetModel,
    ITNetOperator,
    kernel_spectrum,
)
from modeling_itnet.integration import anchors as anchors_module
from modeling_itnet.integration import choice
from modeling_itnet.integration.anchors import ITNetAnchors
from modeling_itnet.integration.capture import operator_inputs
from modeling_itnet.integration.proposal import draw_from_measure

HEADS = ["image-classification", "masked-lm", "sequence-classification"]
MODES = {
    "monte_carlo": {"integration_mode": "monte_carlo", "num_samples": 4},
    "low_rank": {"integration_mode": "low_rank", "rank": 3},
    "auto to monte_carlo": {
        "integration_mode": "auto",
        "approximate_mode": "monte_carlo",
        "exact_max_positions": 3,
        "num_samples": 4,
    },
    "auto to low_rank": {
        "integration_mode": "auto",
        "approximate_mode": "low_rank",
        "exact_max_positions": 3,
        "rank": 3,
    },
}


@pytest.fixture
def problem(tiny_config, shake):
    """problem(**overrides): a shaken operator of a signal model with its arguments; sample 1 ends in padding."""

    def make(n=7, batch=2, padded=True, **overrides):
        operator = shake(ITNetModel(tiny_config("signal", **overrides)).layers[0].operator)
        measure = torch.rand(batch, n) + 0.2
        if padded:
            measure[1::2, -2:] = 0
        measure = measure / measure.sum(1, keepdim=True)
        domain = Domain(torch.rand(batch, n, 2), measure, torch.randn(3, 2))
        return operator, (torch.randn(batch, n, 16), domain)

    return make


def parts(module):
    return {name.partition(".")[0] for name, _ in module.named_parameters()} - {"output", "residual"}


class TestParameters:
    @pytest.mark.parametrize(
        ("settings", "expected"),
        [
            ({}, {"kernel"}),
            ({"integration_mode": "exact"}, {"kernel"}),
            ({"integration_mode": "exact", "approximate_mode": "low_rank"}, {"kernel"}),
            ({"integration_mode": "low_rank"}, {"factors"}),
            ({"integration_mode": "monte_carlo"}, {"kernel", "proposal"}),
            ({"integration_mode": "monte_carlo", "proposal_epsilon": 1.0}, {"kernel"}),
            ({"approximate_mode": "low_rank"}, {"kernel", "factors"}),
            ({"approximate_mode": "monte_carlo"}, {"kernel", "proposal"}),
        ],
        ids=["default", "exact", "exact only", "low rank", "mc", "mc from measure", "auto lr", "auto mc"],
    )
    def test_only_those_of_the_mode(self, tiny_config, settings, expected):
        assert parts(ITNetOperator(tiny_config("image", **settings))) == expected

    def test_low_rank_starts_where_exact_starts(self, tiny_config):
        """The mean of the signal, up to kernel_init_scale, in both modes."""
        features, positions = torch.randn(2, 9, 16), torch.rand(9, 2)
        domain = Domain(positions, torch.full((2, 9), 1 / 9), ITNetModel(tiny_config("signal")).fourier.frequencies)
        mean = features.mean(1, keepdim=True).expand_as(features)
        for mode in ("exact", "low_rank"):
            model = ITNetModel(tiny_config("signal", integration_mode=mode, kernel_init_scale=1e-3))
            integral = model.layers[0].operator.integral(features, domain)
            assert (integral - mean).norm() < 2e-2 * mean.norm(), mode

    def test_cost_stays_below_the_projections_of_attention(self):
        """Multiply-adds per position of ITNet-S's factors, also where a causal operator multiplies them out."""
        config = ITNetConfig.from_preset("itnet-small", integration_mode="low_rank")
        d, width = config.hidden_size, config.factor_hidden_size
        hidden = 2 * width * (config.position_size + d)
        complete = hidden + 2 * width * d
        causal = hidden + 2 * width * config.rank * d + 2 * config.rank * d
        projections = 2 * d * d  # W^O and W_theta; attention has four of this size
        assert complete + projections < causal + projections < 4 * d * d


class TestProposal:
    def test_is_a_pmf_on_the_visible_keys(self, problem):
        for is_causal in (False, True):
            operator, arguments = problem(integration_mode="monte_carlo", is_causal=is_causal)
            measure = arguments[1].measure
            pmf = operator.proposal(*arguments)
            torch.testing.assert_close(pmf.sum(-1), torch.ones(2, 7))
            assert (pmf[1, :, -2:] == 0).all()
            if is_causal:
                assert (pmf.triu(1) == 0).all()
                visible = measure.unsqueeze(1) * torch.ones(7, 7).tril()
                measure = visible / visible.sum(-1, keepdim=True)
            else:
                measure = measure.unsqueeze(1)
            assert (pmf >= 0.99 * 0.01 * measure).all()  # the share of the measure

    def test_starts_at_the_measure(self, tiny_config):
        operator = ITNetModel(tiny_config("signal", integration_mode="monte_carlo")).layers[0].operator
        measure = torch.tensor([[0.1, 0.2, 0.3, 0.4]])
        pmf = operator.proposal(torch.randn(1, 4, 16), Domain(torch.rand(4, 2), measure, torch.randn(3, 2)))
        torch.testing.assert_close(pmf[0], measure.expand(4, 4), rtol=0.1, atol=0)

    def test_draws_follow_it(self, problem, monkeypatch):
        monkeypatch.setattr("modeling_itnet.integration.proposal._TILE_ELEMENTS", 30)  # two queries at a time
        operator, arguments = problem(integration_mode="monte_carlo", num_samples=20_000, is_causal=True)
        pmf = operator.proposal(*arguments)
        indices, probabilities, *_ = operator.proposal.draw(*arguments)
        torch.testing.assert_close(probabilities, pmf.gather(2, indices))
        share = torch.nn.functional.one_hot(indices, 7).float().mean(2)
        assert ((share - pmf).abs() <= 5 * (pmf * (1 - pmf) / 20_000).sqrt() + 1e-6).all()

    @pytest.mark.parametrize("is_causal", [False, True], ids=["complete", "causal"])
    def test_draws_from_the_measure(self, is_causal):
        measure = torch.tensor([[0.0, 0.1, 0.2, 0.0, 0.7, 0.0]])
        indices, probabilities, *_ = draw_from_measure(measure, 20_000, is_causal)
        pmf = measure.expand(6, 6)
        if is_causal:
            pmf = pmf.tril() / pmf.tril().sum(-1, keepdim=True)
            pmf[0] = torch.tensor([1.0, 0, 0, 0, 0, 0])  # sees nothing: a key that counts for nothing
        share = torch.nn.functional.one_hot(indices[0], 6).float().mean(1)
        assert ((share - pmf).abs() <= 5 * (pmf * (1 - pmf) / 20_000).sqrt() + 1e-6).all()
        torch.testing.assert_close(probabilities[0], pmf.gather(1, indices[0]))

    def test_training_it_lowers_the_variance(self, tiny_config, shake):
        """On a fixed batch with a few strong keys: towards the least variance that is possible."""
        model = ITNetModel(tiny_config("signal", integration_mode="monte_carlo", num_samples=16))
        operator = model.layers[0].operator.train()
        shake(operator.kernel)
        features = torch.nn.functional.layer_norm(torch.randn(2, 24, 16), (16,))
        features[:, ::6] *= 3
        domain = Domain(torch.rand(2, 24, 2), torch.full((2, 24), 1 / 24), model.fourier.frequencies)

        def variance():
            torch.manual_seed(1)
            with torch.no_grad():
                return float(torch.stack([operator.integral(features, domain) for _ in range(150)]).var(0).sum())

        heads, everything = features.unflatten(-1, (2, 8)), torch.arange(24).expand(2, 24, 24)
        kernel = operator.kernel(domain.frequencies)
        norms = integrand_norms(heads, domain.positions, kernel, indices=everything) / 24
        exact = integral_transform(heads, domain.positions, kernel).detach()
        least = float((norms.sum(-1) ** 2 - exact.flatten(2).square().sum(-1)).sum()) / 16  # Eq. app_min_var
        before = variance()
        optimizer = torch.optim.Adam(operator.proposal.parameters(), lr=1e-3)
        for _ in range(350):
            optimizer.zero_grad()
            operator(features, domain, return_proposal_loss=True)[1].backward()
            optimizer.step()
        after = variance()
        assert after - least < 0.7 * (before - least), (before, after, least)


class TestMonteCarloTraining:
    @pytest.mark.parametrize("is_causal", [False, True], ids=["complete", "causal"])
    @pytest.mark.parametrize("epsilon", [0.01, 1.0], ids=["proposal", "measure"])
    def test_unbiased(self, problem, is_causal, epsilon):
        settings = {"is_causal": is_causal, "proposal_epsilon": epsilon, "num_samples": 5}
        operator, arguments = problem(integration_mode="monte_carlo", **settings)
        operator.config.integration_mode = "exact"
        exact = operator.integral(*arguments).detach()
        operator.config.integration_mode = "monte_carlo"
        features, domain = arguments
        draws = 3000
        positions, measure = domain.positions.repeat(draws, 1, 1), domain.measure.repeat(draws, 1)
        repeated = features.repeat(draws, 1, 1), Domain(positions, measure, domain.frequencies)
        with torch.no_grad():
            estimates = operator.train().integral(*repeated).unflatten(0, (draws, 2)).double()
        error = (estimates.mean(0) - exact).abs() / (estimates.std(0) / draws**0.5 + 1e-5)
        assert error.max() < 4.5  # the largest of 224 numbers

    def test_seeds_repeat(self, tiny_model, tiny_inputs):
        model, inputs = tiny_model("signal", **MODES["monte_carlo"]).train(), tiny_inputs("signal")
        runs = []
        for seed in (0, 0, 1):
            torch.manual_seed(seed)
            runs.append(model(**inputs))
        assert torch.equal(runs[0].last_hidden_state, runs[1].last_hidden_state)
        assert torch.equal(runs[0].proposal_loss, runs[1].proposal_loss)
        assert not torch.equal(runs[0].last_hidden_state, runs[2].last_hidden_state)

    def test_more_samples_than_positions(self, tiny_model, tiny_inputs):
        model = tiny_model("signal", integration_mode="monte_carlo", num_samples=50).train()
        assert model(**tiny_inputs("signal")).last_hidden_state.isfinite().all()

    def test_the_task_does_not_train_the_proposal(self, problem):
        operator, arguments = problem(integration_mode="monte_carlo", num_samples=4)
        arguments[0].requires_grad_()
        operator.train()(*arguments).square().sum().backward()
        assert all(parameter.grad is None for parameter in operator.proposal.parameters())
        assert all(parameter.grad is not None for parameter in operator.kernel.parameters())
        assert arguments[0].grad is not None

    def test_the_proposal_loss_trains_nothing_else(self, tiny_model, tiny_inputs, tiny_labels):
        model = tiny_model("image-classification", **MODES["monte_carlo"]).train()
        inputs = tiny_inputs("image-classification")
        model(**inputs, labels=tiny_labels("image-classification")).proposal_loss.backward()
        for name, parameter in model.named_parameters():
            assert (parameter.grad is not None) == (".proposal." in name), name

    def test_future_tokens_do_not_matter(self, tiny_model, tiny_inputs):
        model = tiny_model("text", is_causal=True, **MODES["monte_carlo"]).train()
        ids = tiny_inputs("text")["input_ids"]
        changed = ids.clone()
        changed[:, 4:] = 1 + changed[:, 4:] % 30
        outputs = []
        for tokens in (ids, changed):
            torch.manual_seed(3)
            outputs.append(model(input_ids=tokens).last_hidden_state[:, :4])
        torch.testing.assert_close(*outputs)

    def test_gradient_checkpointing_changes_nothing(self, tiny_model, tiny_inputs, tiny_labels):
        name = "image-classification"
        gradients = []
        for checkpointing in (False, True):
            model = tiny_model(name, **MODES["monte_carlo"]).train()
            if checkpointing:
                model.gradient_checkpointing_enable()
            torch.manual_seed(4)
            model(**tiny_inputs(name), labels=tiny_labels(name)).loss.backward()
            gradients.append({key: parameter.grad for key, parameter in model.named_parameters()})
        for key, gradient in gradients[0].items():
            assert gradient is not None, key
            torch.testing.assert_close(gradients[1][key], gradient, msg=lambda m, key=key: f"{key}: {m}")


class TestProposalLoss:
    @pytest.mark.parametrize("name", HEADS)
    def test_every_head_adds_and_reports_it(self, tiny_model, tiny_inputs, tiny_labels, name):
        model, inputs = tiny_model(name, **MODES["monte_carlo"]).train(), tiny_inputs(name)
        losses = {}
        for weight in (0.0, 0.1, 2.0):
            model.config.proposal_loss_weight = weight
            torch.manual_seed(5)
            output = model(**inputs, labels=tiny_labels(name))
            losses[weight] = output.loss
            assert output.proposal_loss.shape == ()
        torch.testing.assert_close(losses[2.0] - losses[0.0], 2 * output.proposal_loss)
        torch.testing.assert_close(losses[0.1] - losses[0.0], 0.1 * output.proposal_loss, rtol=1e-3, atol=1e-5)

    @pytest.mark.parametrize("name", HEADS)
    def test_as_a_tuple_and_without_labels(self, tiny_model, tiny_inputs, tiny_labels, name):
        model, inputs = tiny_model(name, **MODES["monte_carlo"]).train(), tiny_inputs(name)
        torch.manual_seed(6)
        output = model(**inputs, labels=tiny_labels(name))
        torch.manual_seed(6)
        values = model(**inputs, labels=tiny_labels(name), return_dict=False)
        assert torch.equal(values[0], output.loss)
        assert torch.equal(values[-1], output.proposal_loss)
        unlabelled = model(**inputs)
        assert unlabelled.loss is None
        assert unlabelled.proposal_loss is not None

    @pytest.mark.parametrize("name", HEADS)
    def test_not_at_evaluation_and_not_in_other_modes(self, tiny_model, tiny_inputs, tiny_labels, name):
        inputs, labels = tiny_inputs(name), tiny_labels(name)
        evaluated = tiny_model(name, **MODES["monte_carlo"])(**inputs, labels=labels)
        assert "proposal_loss" not in evaluated
        for settings in ({}, MODES["low_rank"], {"integration_mode": "monte_carlo", "proposal_epsilon": 1.0}):
            assert "proposal_loss" not in tiny_model(name, **settings).train()(**inputs, labels=labels)

    def test_is_the_cross_entropy_against_the_optimal_proposal(self, problem):
        """With very many samples it is - sum_j p*_ij log p_ij of the query that was drawn."""
        operator, arguments = problem(batch=1, padded=False, integration_mode="monte_carlo", num_samples=50_000)
        features, domain = arguments
        with torch.no_grad():
            for parameter in operator.proposal.parameters():
                parameter.mul_(0.3)  # not too far from the target, or even so many samples are few
        heads = features.unflatten(-1, (2, 8))
        positions = domain.positions
        matrices = kernel_matrices(heads, heads, positions, positions, operator.kernel(domain.frequencies))
        norms = torch.einsum("bijhac,bjhc->bijha", matrices, heads).flatten(3).norm(dim=-1)
        optimal = domain.measure.unsqueeze(1) * norms
        optimal = optimal / optimal.sum(-1, keepdim=True)
        pmf = operator.proposal(*arguments)
        entropies = -(optimal * pmf.log()).sum(-1)[0]  # per query
        operator.train()
        losses = torch.stack([operator(*arguments, return_proposal_loss=True)[1] for _ in range(10)])  # one query each
        distance = (losses[:, None] - entropies[None]).abs().amin(1)
        assert distance.max() < 0.02

    def test_trainer_steps_add_up(self, tiny_model, tiny_inputs, tiny_labels):
        """A loss divided by num_items_in_batch takes the same share of the proposal loss."""
        model, inputs = tiny_model("masked-lm", **MODES["monte_carlo"]).train(), tiny_inputs("masked-lm")
        labels = tiny_labels("masked-lm")
        items = int((labels != -100).sum())
        losses = {}
        for weight in (0.0, 1.0):
            model.config.proposal_loss_weight = weight
            torch.manual_seed(7)
            output = model(**inputs, labels=labels, num_items_in_batch=4 * items)
            losses[weight] = output.loss
        torch.testing.assert_close(losses[1.0] - losses[0.0], output.proposal_loss / 4)

    def test_leaves_nothing_behind(self, tiny_model, tiny_inputs, tiny_labels):
        model = tiny_model("image-classification", **MODES["monte_carlo"]).train()
        model(**tiny_inputs("image-classification"), labels=tiny_labels("image-classification")).loss.backward()
        copy.deepcopy(model)  # tensors with a graph cannot be copied


class TestAnchors:
    @pytest.mark.parametrize("is_causal", [False, True], ids=["complete", "causal"])
    def test_as_many_as_positions_are_exact(self, problem, is_causal):
        operator, arguments = problem(integration_mode="monte_carlo", num_samples=7, is_causal=is_causal)
        operator.eval()
        features, domain = arguments
        domain.anchors = ITNetAnchors()(domain.coordinates, domain.measure, 7, is_causal)
        heads = features.unflatten(-1, (2, 8))
        anchored = operator._anchored_integral(heads, heads, domain).flatten(-2)
        operator.config.integration_mode = "exact"
        exact = operator.integral(*arguments)
        torch.testing.assert_close(anchored, exact, rtol=1e-5, atol=1e-5)
        operator.config.integration_mode = "monte_carlo"
        assert torch.equal(operator.integral(*arguments), exact)  # and the short way

    @pytest.mark.parametrize("is_causal", [False, True], ids=["complete", "causal"])
    def test_error_falls_with_their_number(self, tiny_model, is_causal):
        generator = torch.Generator().manual_seed(0)
        positions = torch.rand(64, 2, generator=generator)
        inputs = {"inputs_embeds": torch.randn(2, 64, 16, generator=generator) * 0.1, "positions": positions}
        settings = {"integration_mode": "monte_carlo", "is_causal": is_causal, "fourier_scale": 0.3}
        model = tiny_model("signal", **settings)
        outputs = {}
        for count in (2, 8, 32, 64):
            model.config.num_samples = count
            outputs[count] = model(**inputs).last_hidden_state
        errors = [(outputs[count] - outputs[64]).norm() for count in (2, 8, 32)]
        assert errors[2] < errors[1] < errors[0]

    def test_evaluation_is_deterministic(self, tiny_model, tiny_inputs):
        model, inputs = tiny_model("signal", **MODES["monte_carlo"]), tiny_inputs("signal")
        first = model(**inputs).last_hidden_state
        torch.manual_seed(11)
        assert torch.equal(model(**inputs).last_hidden_state, first)

    @pytest.mark.parametrize("is_causal", [False, True], ids=["complete", "causal"])
    @pytest.mark.parametrize("mode", MODES)
    def test_padding_does_not_matter(self, tiny_model, tiny_inputs, mode, is_causal):
        model = tiny_model("text", is_causal=is_causal, **MODES[mode])
        ids = tiny_inputs("text")["input_ids"]
        expected = model(input_ids=ids).last_hidden_state
        mask = torch.ones_like(ids)
        pads = torch.zeros(3, 4, dtype=torch.long)
        right = {"input_ids": torch.cat([ids, pads], 1), "attention_mask": torch.cat([mask, pads], 1)}
        torch.testing.assert_close(model(**right).last_hidden_state[:, :7], expected)
        left = {"input_ids": torch.cat([pads, ids], 1), "attention_mask": torch.cat([pads, mask], 1)}
        torch.testing.assert_close(model(**left).last_hidden_state[:, 4:], expected)

    @pytest.mark.parametrize("mode", MODES)
    def test_future_tokens_do_not_matter(self, tiny_model, tiny_inputs, mode):
        model = tiny_model("text", is_causal=True, **MODES[mode])
        ids = tiny_inputs("text")["input_ids"]
        changed = ids.clone()
        changed[:, 4:] = 1 + changed[:, 4:] % 30
        outputs = [model(input_ids=tokens).last_hidden_state[:, :4] for tokens in (ids, changed)]
        torch.testing.assert_close(*outputs)

    def test_a_shared_domain_is_clustered_once(self, tiny_model, tiny_inputs, monkeypatch):
        calls = []
        find = anchors_module.kmeans_anchors
        monkeypatch.setattr(anchors_module, "kmeans_anchors", lambda *a, **k: calls.append(1) or find(*a, **k))
        model = tiny_model("image", **(MODES["monte_carlo"] | {"image_size": 32}))
        image = torch.randn(2, 3, 32, 32)
        outputs = [model(pixel_values=image).last_hidden_state for _ in range(2)]
        assert len(calls) == 1  # not per layer, not per call
        assert torch.equal(*outputs)
        model(pixel_values=torch.randn(2, 3, 24, 24))
        assert len(calls) == 2
        signal = tiny_model("signal", **MODES["monte_carlo"])  # positions per sample: once per call
        for _ in range(2):
            signal(**tiny_inputs("signal"))
        assert len(calls) == 4


class TestLowRank:
    def test_a_layer_integrates_its_own_kernel(self, problem):
        operator, (features, domain) = problem(integration_mode="low_rank", rank=3)
        heads = features.unflatten(-1, (2, 8))
        phi, psi = operator.factors.factors(heads, domain)
        dense = [torch.einsum("bnhk,hrak->bnhra", f.hidden, f.weight) + f.bias for f in (phi, psi)]
        matrices = torch.einsum("bihra,bjhrc->bijhac", *dense) + operator.factors.bias
        expected = torch.einsum("bj,bijhac,bjhc->biha", domain.measure, matrices, heads).flatten(-2)
        actual = operator.integral(features, domain)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)

    def test_every_parameter_is_trained(self, tiny_model, tiny_inputs, tiny_labels):
        model = tiny_model("image-classification", **MODES["low_rank"]).train()
        name = "image-classification"
        model(**tiny_inputs(name), labels=tiny_labels(name)).loss.backward()
        for key, parameter in model.named_parameters():
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, key

    def test_token_by_token_with_a_state(self, problem):
        operator, arguments = problem(integration_mode="low_rank", rank=3, is_causal=True)
        features, domain = arguments
        heads = features.unflatten(-1, (2, 8))
        expected, _ = operator.factors(heads, domain)
        state, outs = None, []
        for i in range(7):
            one = slice(i, i + 1)
            token = Domain(domain.positions[:, one], domain.measure[:, one], domain.frequencies)
            out, state = operator.factors(heads[:, one], token, state=state)
            outs.append(out)
        torch.testing.assert_close(torch.cat(outs, 1), expected, rtol=1e-5, atol=1e-5)

    def test_edges(self, problem):
        """1[edge] + lambda times the low-rank kernel."""
        operator, (features, domain) = problem(integration_mode="low_rank", rank=3)
        neighbors = torch.tensor([1, 3, -1]).expand(2, 7, 3)
        edges = torch.zeros(7, 7)
        edges[:, [1, 3]] = 1
        heads = features.unflatten(-1, (2, 8))
        phi, psi = operator.factors.factors(heads, domain)
        dense = [torch.einsum("bnhk,hrak->bnhra", f.hidden, f.weight) + f.bias for f in (phi, psi)]
        matrices = torch.einsum("bihra,bjhrc->bijhac", *dense) + operator.factors.bias
        gate = torch.tensor(0.4)
        integral = torch.einsum("bj,ij,bijhac,bjhc->biha", domain.measure, edges + gate, matrices, heads)
        expected = operator.output(integral.flatten(-2)) + operator.residual(features)
        actual = operator(features, domain.replaced(neighbors=neighbors, edge_gate=gate))
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


class TestAuto:
    @pytest.mark.parametrize(
        ("approximate", "mode"), [(None, "monte_carlo"), ("monte_carlo", "monte_carlo"), ("low_rank", "low_rank")]
    )
    def test_switches_above_the_limit(self, tiny_model, approximate, mode):
        generator = torch.Generator().manual_seed(0)
        limits = {"exact_max_positions": 6, "num_samples": 3, "rank": 2}
        model = tiny_model("signal", approximate_mode=approximate, **limits)
        for n in (6, 7):
            inputs = {
                "inputs_embeds": torch.randn(2, n, 16, generator=generator),
                "positions": torch.rand(n, 2, generator=generator),
            }
            model.config.integration_mode = "auto"
            actual = model(**inputs).last_hidden_state
            outputs = {}
            for fixed in ("exact", mode):
                model.config.integration_mode = fixed
                outputs[fixed] = model(**inputs).last_hidden_state
            assert torch.equal(actual, outputs["exact" if n == 6 else mode])
            assert not torch.equal(outputs["exact"], outputs[mode])

    def test_says_so_once(self, tiny_model, tiny_inputs, caplog):
        choice.logger.warning_once.__func__.cache_clear()
        model = tiny_model("signal", exact_max_positions=5, num_samples=3)
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                model(**tiny_inputs("signal"))
        messages = [record.message for record in caplog.records if "exact_max_positions" in record.message]
        assert len(messages) == 1
        assert '"monte_carlo"' in messages[0]


class TestSaving:
    @pytest.mark.parametrize("mode", MODES)
    def test_reloaded_models_agree(self, tiny_model, tiny_inputs, tmp_path, mode):
        model, inputs = tiny_model("signal", **MODES[mode]), tiny_inputs("signal")
        model.save_pretrained(tmp_path)
        reloaded = ITNetModel.from_pretrained(tmp_path)
        for key, value in model.state_dict().items():
            assert torch.equal(reloaded.state_dict()[key], value), key
        outputs = []
        for one in (model, reloaded):
            torch.manual_seed(8)
            outputs.append((one.eval()(**inputs).last_hidden_state, one.train()(**inputs).last_hidden_state))
        for first, second in zip(*outputs, strict=True):
            torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize(
        ("saved", "asked", "part"),
        [
            ({"integration_mode": "exact"}, {"integration_mode": "low_rank"}, "factors"),
            ({"integration_mode": "exact"}, {"integration_mode": "monte_carlo"}, "proposal"),
            ({}, {"approximate_mode": "low_rank"}, "factors"),
            ({"integration_mode": "low_rank"}, {"integration_mode": "exact"}, "kernel"),
        ],
        ids=["low rank", "monte carlo", "auto", "back"],
    )
    def test_a_mode_that_the_checkpoint_lacks(self, tiny_model, tmp_path, saved, asked, part):
        tiny_model("image-classification", **saved).save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=f"`integration_mode` .*needs `{part}`, which the checkpoint lacks"):
            ITNetForImageClassification.from_pretrained(tmp_path, **asked)

    def test_loading_information_is_still_there(self, tiny_model, tmp_path):
        tiny_model("text").save_pretrained(tmp_path)
        model, info = ITNetForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
        assert isinstance(model, ITNetForMaskedLM)
        assert any("lm_head" in key for key in info["missing_keys"])

    @pytest.mark.parametrize(("made", "asked"), [("exact", "low_rank"), ("low_rank", "exact")])
    def test_a_mode_that_the_model_lacks(self, tiny_model, tiny_inputs, made, asked):
        model = tiny_model("signal", integration_mode=made)
        model.config.integration_mode = asked
        with pytest.raises(ValueError, match=rf"`integration_mode` \('{asked}'\) needs `\w+`, which this model"):
            model(**tiny_inputs("signal"))


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("mode", ["monte_carlo", "low_rank"])
def test_can_be_compiled(tiny_model, tiny_inputs, mode, training):
    model, inputs = tiny_model("signal", **MODES[mode]).train(training), tiny_inputs("signal")
    torch.manual_seed(9)
    expected = model(**inputs).last_hidden_state
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.manual_seed(9)
    torch.testing.assert_close(compiled(**inputs).last_hidden_state, expected)


@pytest.mark.parametrize("mode", ["exact", "monte_carlo", "low_rank"])
@pytest.mark.parametrize("name", ["text", "signal"])
def test_compiled_for_several_lengths(tiny_model, tiny_inputs, name, mode):
    """From the second length on, the graph knows batch and length by symbols."""
    torch._dynamo.reset()
    model = tiny_model(name, **MODES.get(mode, {"integration_mode": mode})).eval()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for batch, length in ((3, 7), (4, 9), (2, 11)):
        inputs = tiny_inputs(name, batch, length)
        torch.testing.assert_close(compiled(**inputs).last_hidden_state, model(**inputs).last_hidden_state)


@pytest.mark.parametrize("name", HEADS)
def test_heads_can_be_compiled_one_after_the_other(tiny_model, tiny_inputs, tiny_labels, name):
    """In training, where the output of a Monte Carlo model has a field more."""
    inputs = tiny_inputs(name) | {"labels": tiny_labels(name)}
    torch._dynamo.reset()  # other tests count towards the limit of recompilations
    for settings in ({}, MODES["monte_carlo"], MODES["low_rank"]):
        model = tiny_model(name, **settings).train()
        torch.manual_seed(9)
        expected = model(**inputs)
        torch.manual_seed(9)
        actual = torch.compile(model, backend="eager", fullgraph=True)(**inputs)
        assert type(actual) is type(expected)
        torch.testing.assert_close(actual.loss, expected.loss)
        assert ("proposal_loss" in actual) == (settings is MODES["monte_carlo"])


@pytest.fixture(scope="module")
def exact(tiny_model):
    return tiny_model("image-classification", image_size=32)


@pytest.fixture(scope="module")
def data():
    generator = torch.Generator().manual_seed(0)
    return [{"pixel_values": torch.randn(8, 3, 32, 32, generator=generator)} for _ in range(2)]


class TestConversion:
    def test_error_falls_with_the_rank(self, exact, data):
        with torch.no_grad():
            expected = exact(**data[0]).logits
        reports = {}
        for rank in (1, 4, 12):  # the last of more than one piece of d_h = 8
            model = copy.deepcopy(exact)
            reports[rank] = model.to_low_rank(rank, data, steps=60, distillation_steps=20)
            assert (model.config.integration_mode, model.config.rank) == ("low_rank", rank)
            assert parts(model.itnet.layers[0].operator) == {"factors"}
            with torch.no_grad():
                error = (model(**data[0]).logits - expected).norm() / expected.norm()
            assert error < 0.3
        for layer in range(2):
            errors = [reports[rank].layer_errors[layer] for rank in (1, 4, 12)]
            assert errors[2] < errors[1] < errors[0] < 1
        assert reports[12].output_error < reports[1].output_error
        assert "layer 1" in str(reports[12])

    def test_a_low_rank_kernel_is_found(self, tiny_config, shake):
        """A kernel of the query's features alone is the constant part of each query: K_i ubar."""
        torch.manual_seed(0)
        model = shake(ITNetModel(tiny_config("signal", kernel_inputs=()))).eval()
        data = {"inputs_embeds": torch.randn(4, 9, 16), "positions": torch.rand(4, 9, 2)}
        report = model.to_low_rank(1, data, steps=0, distillation_steps=0)
        assert max(report.layer_errors) < 1e-3  # a constant kernel is the factors' bias

    def test_the_rest_of_the_model_stays(self, exact, data):
        model = copy.deepcopy(exact).train()
        model.to_low_rank(2, data, steps=2, distillation_steps=2)
        assert all(module.training for module in model.modules())
        old = exact.state_dict()
        for key, value in model.state_dict().items():
            assert ".factors." in key or torch.equal(value, old[key]), key

    def test_auto_keeps_the_exact_kernels(self, exact, data):
        model = copy.deepcopy(exact)
        model.to_low_rank(2, data[0], steps=2, distillation_steps=0, integration_mode="auto")
        assert (model.config.integration_mode, model.config.approximate_mode) == ("auto", "low_rank")
        with torch.no_grad():
            assert torch.equal(model(**data[0]).logits, exact(**data[0]).logits)  # 17 positions
            model.config.exact_max_positions = 16
            assert not torch.equal(model(**data[0]).logits, exact(**data[0]).logits)

    def test_saved_and_reloaded(self, exact, data, tmp_path):
        model = copy.deepcopy(exact)
        model.to_low_rank(3, data, steps=2, distillation_steps=2)
        model.save_pretrained(tmp_path)
        reloaded = ITNetForImageClassification.from_pretrained(tmp_path)
        with torch.no_grad():
            torch.testing.assert_close(reloaded(**data[0]).logits, model(**data[0]).logits, rtol=1e-4, atol=1e-5)

    def test_padding_and_causal_text(self, tiny_model, tiny_inputs):
        model = tiny_model("masked-lm", is_causal=True)
        inputs = tiny_inputs("masked-lm") | {"attention_mask": torch.tensor([[1] * 7, [1] * 5 + [0] * 2, [1] * 7])}
        report = model.to_low_rank(8, inputs, steps=60, distillation_steps=0)
        assert max(report.layer_errors) < 0.3

    def test_the_configuration_does_not_steer_the_fit(self, exact, data):
        """It changes once, at the end; whoever reads it meanwhile, or stops the fit, finds the model as it was."""
        model = copy.deepcopy(exact)
        modes = []
        model.itnet.register_forward_pre_hook(lambda *_: modes.append(model.config.integration_mode))
        model.to_low_rank(2, data, steps=1, distillation_steps=1)
        assert set(modes) == {"auto"}
        assert model.config.integration_mode == "low_rank"

        model = copy.deepcopy(exact)
        calls = []

        def stop(*_):
            calls.append(model.itnet.layers[0].operator.factors is not None)
            if calls[-1]:  # the factors are being trained together
                raise KeyboardInterrupt

        hook = model.itnet.register_forward_pre_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            model.to_low_rank(2, data, steps=1, distillation_steps=1)
        hook.remove()
        assert parts(model.itnet.layers[0].operator) == {"kernel"}
        with torch.no_grad():
            assert torch.equal(model(**data[0]).logits, exact(**data[0]).logits)

    def test_reports_an_error_on_samples_that_it_did_not_see(self, exact, data):
        model = copy.deepcopy(exact)
        report = model.to_low_rank(4, data, steps=20, distillation_steps=40)
        assert report.num_held_out == 2  # the last of each batch
        with torch.no_grad():
            unseen = {"pixel_values": torch.stack([batch["pixel_values"][-1] for batch in data])}
            wanted = exact.itnet(**unseen).last_hidden_state
            error = (model.itnet(**unseen).last_hidden_state - wanted).norm() / wanted.norm()
        assert report.held_out_error == pytest.approx(float(error), rel=1e-4)
        assert report.held_out_error > report.output_error
        assert "2 held-out samples" in str(report)
        report = copy.deepcopy(exact).to_low_rank(4, data, steps=2, distillation_steps=0, hold_out=0)
        assert report.held_out_error is None and "nothing was held out" in str(report)

    @pytest.mark.parametrize(
        ("rank", "given", "message"),
        [
            (
                2,
                torch.randn(8, 3, 32, 32),
                r"`calibration_data` \(Tensor\) must hold keyword arguments.*'pixel_values'",
            ),
            (2, [torch.randn(8, 3, 32, 32)], r"`calibration_data` \(Tensor\) must hold keyword arguments"),
            (0, "data", r"`rank` \(0\) must be positive"),
            (2, [], "`calibration_data` is empty"),
            (2, None, "`calibration_data` is empty"),
        ],
        ids=["tensor", "tensors", "rank 0", "no batches", "none"],
    )
    def test_errors(self, exact, data, rank, given, message):
        with pytest.raises(ValueError, match=message):
            copy.deepcopy(exact).to_low_rank(rank, data if isinstance(given, str) else given)

    def test_twice_is_an_error(self, exact, data):
        model = copy.deepcopy(exact)
        model.to_low_rank(2, data, steps=0, distillation_steps=0)
        with pytest.raises(ValueError, match="no exact kernels to start from"):
            model.to_low_rank(1, data)
        with pytest.raises(ValueError, match="no exact kernels"):
            kernel_spectrum(model, data[0])

    def test_to_monte_carlo(self, exact, data, tmp_path):
        model = copy.deepcopy(exact)
        model.to_monte_carlo(num_samples=5)
        assert parts(model.itnet.layers[0].operator) == {"kernel", "proposal"}
        output = model.train()(**data[0], labels=torch.zeros(8, dtype=torch.long))
        output.loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        model.save_pretrained(tmp_path)
        reloaded = ITNetForImageClassification.from_pretrained(tmp_path)
        with torch.no_grad():
            expected = model.eval()(**data[0]).logits
            torch.testing.assert_close(reloaded(**data[0]).logits, expected, rtol=1e-4, atol=1e-5)
        reloaded.to_monte_carlo(num_samples=3)  # follows the configuration
        proposal = reloaded.itnet.layers[0].operator.proposal
        domain = Domain(torch.rand(17, 2), torch.full((2, 17), 1 / 17), reloaded.itnet.fourier.frequencies)
        assert proposal.draw(torch.randn(2, 17, 16), domain)[0].shape == (2, 17, 3)
        with pytest.raises(ValueError, match=r"`num_samples` \(0\) must be positive"):
            copy.deepcopy(exact).to_monte_carlo(num_samples=0)


class TestSpectrum:
    def test_singular_values_of_the_block_matrix(self, tiny_model, tiny_inputs):
        model, inputs = tiny_model("signal"), tiny_inputs("signal", batch=2)
        spectrum = kernel_spectrum(model, inputs)
        assert spectrum.singular_values.shape == (2, 2, 2, 7 * 8)
        features = {}
        model.layers[1].operator.register_forward_pre_hook(lambda _, args: features.update(value=args[0]))
        model(**inputs)
        heads, positions = features["value"].unflatten(-1, (2, 8)), inputs["positions"]
        matrices = kernel_matrices(
            heads, heads, positions, positions, model.layers[1].operator.kernel(model.fourier.frequencies)
        )
        block = torch.zeros(56, 56, dtype=torch.float64)
        for i in range(7):
            for j in range(7):
                block[8 * i : 8 * i + 8, 8 * j : 8 * j + 8] = matrices[1, i, j, 0] / 7  # sqrt(omega_i omega_j)
        torch.testing.assert_close(spectrum.singular_values[1, 1, 0], torch.linalg.svdvals(block))
        best = torch.linalg.svd(block)
        low = best.U[:, :5] @ best.S[:5].diag() @ best.Vh[:5]
        torch.testing.assert_close(spectrum.error(5)[1, 1, 0], (block - low).norm())
        torch.testing.assert_close(spectrum.energy(5)[1, 1, 0], low.square().sum() / block.square().sum())

    def test_bound_and_energy(self, tiny_model, tiny_inputs):
        spectrum = kernel_spectrum(tiny_model("signal"), tiny_inputs("signal"))
        for rank in (1, 4, 20):
            assert (spectrum.error(rank) <= spectrum.bound(rank)).all()
        assert (spectrum.energy(4) < spectrum.energy(20)).all()
        torch.testing.assert_close(spectrum.energy(56), torch.ones(2, 3, 2, dtype=torch.float64))

    def test_centred(self, tiny_config, shake, tiny_inputs):
        model = shake(ITNetModel(tiny_config("signal", kernel_inputs=()))).eval()  # a constant kernel
        inputs = tiny_inputs("signal")
        plain = kernel_spectrum(model, inputs).singular_values
        assert (plain[..., 8:] < 1e-5 * plain[..., :1]).all()  # rank d_h: the same block everywhere
        assert (kernel_spectrum(model, inputs, centred=True).singular_values < 1e-5 * plain[..., :1]).all()

    @pytest.mark.parametrize("centred", [False, True])
    def test_padding_and_split_points_do_not_matter(self, tiny_model, tiny_inputs, centred):
        """It is the spectrum of an operator between functions, whatever positions they are kept at."""
        model, inputs = tiny_model("signal"), tiny_inputs("signal", batch=1)
        inputs["measure"] = torch.rand(1, 7) + 0.1
        expected = kernel_spectrum(model, inputs, centred=centred).singular_values[..., :56]
        padded = {name: torch.cat([value, torch.ones_like(value[:, :3])], 1) for name, value in inputs.items()}
        padded["attention_mask"] = torch.tensor([[1] * 7 + [0] * 3])
        split = {name: torch.cat([value, value[:, 6:]], 1) for name, value in inputs.items()}
        split["measure"][:, 6:] /= 2
        for same in (padded, split):
            actual = kernel_spectrum(model, same, centred=centred).singular_values
            # float32 kernels, and singular values at the square root of that for blocks that cancel
            torch.testing.assert_close(actual[..., :56], expected, rtol=1e-3, atol=1e-4 * float(expected.max()))
            assert (actual[..., 56:] < 1e-4 * expected.max()).all()

    def test_the_future_is_no_part_of_a_causal_operator(self, tiny_model, tiny_inputs):
        model, inputs = tiny_model("signal", is_causal=True), tiny_inputs("signal", batch=1)
        spectrum = kernel_spectrum(model, inputs)
        (features, domain), *_ = operator_inputs(model, inputs)
        heads, positions = features.unflatten(-1, (2, 8)), domain.positions
        kernel = model.layers[0].operator.kernel(domain.frequencies)
        matrices = kernel_matrices(heads, heads, positions, positions, kernel)
        block = torch.zeros(56, 56, dtype=torch.float64)
        for i in range(7):
            for j in range(i + 1):
                block[8 * i : 8 * i + 8, 8 * j : 8 * j + 8] = matrices[0, i, j, 1] / (i + 1)
        torch.testing.assert_close(spectrum.singular_values[0, 0, 1], torch.linalg.svdvals(block))

    def test_a_tensor_is_no_batch(self, tiny_model):
        with pytest.raises(ValueError, match=r"`batch` \(Tensor\) must hold keyword arguments"):
            kernel_spectrum(tiny_model("image"), torch.randn(1, 3, 16, 16))


class TestLimitOfExactIntegration:
    @pytest.mark.parametrize(("given", "limit"), [(None, 512), (6, 6), (0, 0)])
    def test_is_the_papers_unless_given(self, tiny_config, given, limit):
        config = tiny_config("signal", integration_mode="auto", exact_max_positions=given)
        assert choice.exact_limit(config) == limit
        assert choice.integration_mode(config, limit) == "exact"
        assert choice.integration_mode(config, limit + 1) == "monte_carlo"

    def test_a_causal_model_goes_by_its_longest_text(self, tiny_config):
        config = tiny_config("text", is_causal=True, integration_mode="auto", max_position_embeddings=1024)
        assert choice.integration_mode(config, 3) == "monte_carlo"
