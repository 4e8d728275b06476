"""ITNetModel and its heads as Transformers models: values, losses, saving, symmetries, errors, training."""

import math
import re

import pytest
import torch
from torch.nn import functional as F
from transformers import (
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
)
from transformers.utils import logging

from modeling_itnet import (
    Domain,
    ITNetForImageClassification,
    ITNetForMaskedLM,
    ITNetForSequenceClassification,
    ITNetFourierFeatures,
    ITNetOperator,
)
from modeling_itnet.integration.proposal import ITNetProposal

# Of a model that was loaded again: its weights lie elsewhere in memory, which changes how products are summed.
ROUNDING = {"rtol": 1e-4, "atol": 1e-5}
BASES = ("image", "text", "signal")
HEADS = ("image-classification", "masked-lm", "sequence-classification")
CLASSIFIERS = ("image-classification", "sequence-classification")
AUTO_CLASSES = {
    "image": AutoModel,
    "text": AutoModel,
    "signal": AutoModel,
    "image-classification": AutoModelForImageClassification,
    "masked-lm": AutoModelForMaskedLM,
    "sequence-classification": AutoModelForSequenceClassification,
}


def main_output(output):
    return output.logits if "logits" in output else output.last_hidden_state


def assert_same(actual, expected):
    """Equal to 1e-6 of the largest value (or of 1)."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6 * max(1.0, expected.abs().max().item()))


class TestOutputs:
    @pytest.mark.parametrize(
        ("name", "count"),
        [("image", 5), ("text", 7), ("signal", 7)],
    )
    def test_base_shapes(self, tiny_model, tiny_inputs, name, count):
        output = tiny_model(name)(**tiny_inputs(name))
        assert output.last_hidden_state.shape == (3, count, 16)
        assert output.pooler_output.shape == (3, 16)
        assert output.hidden_states is None

    @pytest.mark.parametrize(
        ("name", "shape"),
        [("image-classification", (3, 3)), ("sequence-classification", (3, 3)), ("masked-lm", (3, 7, 40))],
    )
    def test_head_shapes(self, tiny_model, tiny_inputs, name, shape):
        output = tiny_model(name)(**tiny_inputs(name))
        assert output.logits.shape == shape
        assert output.loss is None

    @pytest.mark.parametrize("name", BASES)
    def test_hidden_states_are_those_of_a_manual_run(self, tiny_model, tiny_inputs, name):
        model, inputs = tiny_model(name, num_hidden_layers=3), tiny_inputs(name)
        signal = model.encoder(model.fourier, **inputs)
        states = [signal.features]
        for layer in model.layers:
            states.append(layer(states[-1], signal.domain)[0])
        states[-1] = F.layer_norm(states[-1], (16,), model.layernorm.weight, model.layernorm.bias, 1e-6)
        output = model(**inputs, output_hidden_states=True)
        assert len(output.hidden_states) == 4  # the embedding and three layers
        for index, (actual, expected) in enumerate(zip(output.hidden_states, states, strict=True)):
            torch.testing.assert_close(actual, expected, msg=lambda m, index=index: f"state {index}: {m}")
        torch.testing.assert_close(output.last_hidden_state, states[-1])

    @pytest.mark.parametrize("name", HEADS)
    def test_heads_pass_hidden_states_on(self, tiny_model, tiny_inputs, name):
        model, inputs = tiny_model(name), tiny_inputs(name)
        states = model(**inputs, output_hidden_states=True).hidden_states
        expected = model.itnet(**inputs, output_hidden_states=True).hidden_states
        assert len(states) == len(expected) == 3
        assert all(torch.equal(a, b) for a, b in zip(states, expected, strict=True))

    def test_config_can_ask_for_hidden_states(self, tiny_model, tiny_inputs):
        model = tiny_model("image-classification")
        model.config.output_hidden_states = True
        assert len(model(**tiny_inputs("image-classification")).hidden_states) == 3

    @pytest.mark.parametrize("name", CLASSIFIERS)
    def test_classifier_is_linear_on_the_pooled_features(self, tiny_model, tiny_inputs, name):
        model, inputs = tiny_model(name), tiny_inputs(name)
        pooled, linear = model.itnet(**inputs).pooler_output, model.classifier
        torch.testing.assert_close(model(**inputs).logits, pooled @ linear.weight.T + linear.bias)

    def test_masked_lm_head_is_that_of_bert(self, tiny_model, tiny_inputs):
        model, inputs = tiny_model("masked-lm"), tiny_inputs("masked-lm")
        head = model.lm_head
        hidden = F.gelu(F.linear(model.itnet(**inputs).last_hidden_state, head.dense.weight, head.dense.bias))
        hidden = F.layer_norm(hidden, (16,), head.layernorm.weight, head.layernorm.bias, 1e-6)
        expected = F.linear(hidden, model.itnet.encoder.word_embeddings.weight, head.decoder.bias)
        torch.testing.assert_close(model(**inputs).logits, expected)

    @pytest.mark.parametrize("name", BASES)
    def test_base_as_tuple(self, tiny_model, tiny_inputs, name):
        model, inputs = tiny_model(name), tiny_inputs(name)
        output = model(**inputs, output_hidden_states=True)
        last, pooled, states = model(**inputs, output_hidden_states=True, return_dict=False)
        assert torch.equal(last, output.last_hidden_state)
        assert torch.equal(pooled, output.pooler_output)
        assert all(torch.equal(a, b) for a, b in zip(states, output.hidden_states, strict=True))
        assert len(model(**inputs, return_dict=False)) == 2

    @pytest.mark.parametrize("name", HEADS)
    def test_heads_as_tuple(self, tiny_model, tiny_inputs, tiny_labels, name):
        model, inputs, labels = tiny_model(name), tiny_inputs(name), tiny_labels(name)
        output = model(**inputs, labels=labels)
        (logits,) = model(**inputs, return_dict=False)
        assert torch.equal(logits, output.logits)
        loss, logits = model(**inputs, labels=labels, return_dict=False)
        assert torch.equal(loss, output.loss)
        assert torch.equal(logits, output.logits)

    @pytest.mark.parametrize("name", AUTO_CLASSES)
    def test_main_input(self, tiny_model, tiny_inputs, name):
        model, inputs = tiny_model(name), tiny_inputs(name)
        assert model.main_input_name == next(iter(inputs))

    @pytest.mark.parametrize("name", ["image-classification", "masked-lm", "sequence-classification", "image"])
    def test_main_input_may_be_positional(self, tiny_model, tiny_inputs, name):
        model, inputs = tiny_model(name), tiny_inputs(name)
        assert torch.equal(main_output(model(*inputs.values())), main_output(model(**inputs)))

    @pytest.mark.parametrize("name", BASES)
    def test_backends_agree(self, tiny_model, tiny_inputs, name):
        inputs = tiny_inputs(name)
        outputs = [tiny_model(name, backend=backend)(**inputs)[0] for backend in ("reference", "tiled", "auto")]
        torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-5)
        assert torch.equal(outputs[2], outputs[1])


class TestLoss:
    @pytest.mark.parametrize("name", CLASSIFIERS)
    def test_classes(self, tiny_model, tiny_inputs, name):
        model, labels = tiny_model(name), torch.tensor([2, 0, 1])
        output = model(**tiny_inputs(name), labels=labels)
        torch.testing.assert_close(output.loss, F.cross_entropy(output.logits, labels))
        assert model.config.problem_type == "single_label_classification"

    @pytest.mark.parametrize("name", CLASSIFIERS)
    @pytest.mark.parametrize("shape", [(3,), (3, 1)], ids=str)
    def test_regression(self, tiny_model, tiny_inputs, name, shape):
        model, labels = tiny_model(name, num_labels=1), torch.randn(shape)
        output = model(**tiny_inputs(name), labels=labels)
        torch.testing.assert_close(output.loss, F.mse_loss(output.logits.view(-1), labels.view(-1)))
        assert model.config.problem_type == "regression"

    @pytest.mark.parametrize("name", CLASSIFIERS)
    def test_regression_on_several_targets(self, tiny_model, tiny_inputs, name):
        model, labels = tiny_model(name, problem_type="regression"), torch.randn(3, 3)
        output = model(**tiny_inputs(name), labels=labels)
        torch.testing.assert_close(output.loss, F.mse_loss(output.logits, labels))

    @pytest.mark.parametrize("name", CLASSIFIERS)
    def test_multi_label(self, tiny_model, tiny_inputs, name):
        model, labels = tiny_model(name), torch.tensor([[1.0, 0, 1], [0, 0, 0], [1, 1, 1]])
        output = model(**tiny_inputs(name), labels=labels)
        torch.testing.assert_close(output.loss, F.binary_cross_entropy_with_logits(output.logits, labels))
        assert model.config.problem_type == "multi_label_classification"

    @pytest.mark.parametrize("name", CLASSIFIERS)
    @pytest.mark.parametrize(
        ("num_labels", "labels"),
        [
            (1, torch.tensor([0.5, 1.5, 2.0])),
            (3, torch.tensor([0, 2, 1])),
            (3, torch.tensor([0, 2, 1], dtype=torch.int32)),
            (2, torch.tensor([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])),
        ],
        ids=["one-float", "long", "int32", "floats"],
    )
    def test_problem_type_is_inferred_as_by_bert(self, tiny_model, tiny_inputs, name, num_labels, labels):
        bert = BertForSequenceClassification(
            BertConfig(
                vocab_size=40,
                hidden_size=8,
                num_hidden_layers=1,
                num_attention_heads=1,
                intermediate_size=8,
                num_labels=num_labels,
            )
        )
        kinds = []
        models = ((bert, tiny_inputs("text")), (tiny_model(name, num_labels=num_labels), tiny_inputs(name)))
        for model, inputs in models:
            try:
                model(**inputs, labels=labels)
            except RuntimeError as error:  # torch's cross entropy knows no int32
                kinds.append((model.config.problem_type, str(error)))
            else:
                kinds.append((model.config.problem_type, None))
        assert kinds[0] == kinds[1]

    def test_masked_lm_ignores_minus_100(self, tiny_model, tiny_inputs, tiny_labels):
        model, labels = tiny_model("masked-lm"), tiny_labels("masked-lm")
        output = model(**tiny_inputs("masked-lm"), labels=labels)
        asked = labels != -100
        assert 0 < asked.sum() < asked.numel()
        expected = -output.logits.log_softmax(-1)[asked].gather(1, labels[asked].unsqueeze(1)).mean()
        torch.testing.assert_close(output.loss, expected)

    def test_masked_lm_divides_by_the_items_of_the_whole_batch(self, tiny_model, tiny_inputs, tiny_labels):
        model, labels = tiny_model("masked-lm"), tiny_labels("masked-lm")
        mean = model(**tiny_inputs("masked-lm"), labels=labels).loss
        shared = model(**tiny_inputs("masked-lm"), labels=labels, num_items_in_batch=torch.tensor(56)).loss
        torch.testing.assert_close(shared, mean * (labels != -100).sum() / 56)


class TestGradients:
    @pytest.mark.parametrize("name", AUTO_CLASSES)
    def test_every_parameter(self, tiny_model, tiny_inputs, tiny_labels, name):
        model, inputs = tiny_model(name).train(), tiny_inputs(name)
        if name in HEADS:
            model(**inputs, labels=tiny_labels(name)).loss.backward()
        else:
            model(**inputs).pooler_output.square().sum().backward()
        for parameter_name, parameter in model.named_parameters():
            assert parameter.grad is not None, parameter_name
            assert parameter.grad.isfinite().all(), parameter_name
            assert parameter.grad.abs().max() > 0, parameter_name

    @pytest.mark.parametrize("patch_size", [(8,), (4, 8)], ids=["one-grid", "two-grids"])
    @pytest.mark.parametrize("pooling", ["cls", "mean", "max"])
    def test_every_parameter_at_initialisation(self, tiny_config, tiny_inputs, tiny_labels, patch_size, pooling):
        config = tiny_config("image", patch_size=patch_size, pooling=pooling, kernel_num_layers=3)
        model = ITNetForImageClassification(config)
        model(**tiny_inputs("image"), labels=tiny_labels("image")).loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad.abs().max() > 0, name

    @pytest.mark.parametrize("use_reentrant", [False, True], ids=["plain", "reentrant"])
    @pytest.mark.parametrize("name", HEADS)
    def test_checkpointing_changes_nothing(self, tiny_model, tiny_inputs, tiny_labels, name, use_reentrant):
        """Same loss and gradients, dropout and stochastic depth included; each layer runs once more."""
        rates = {"hidden_dropout_prob": 0.2, "embedding_dropout_prob": 0.2, "drop_path_rate": 0.3}
        inputs, labels, losses, gradients, runs = tiny_inputs(name), tiny_labels(name), [], [], []
        for checkpointing in (False, True):
            model, count = tiny_model(name, **rates).train(), []
            if checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            for layer in model.itnet.layers:
                layer.operator.register_forward_hook(lambda *_, count=count: count.append(1))
            torch.manual_seed(4)
            loss = model(**inputs, labels=labels).loss
            loss.backward()
            losses.append(loss)
            gradients.append({key: value.grad for key, value in model.named_parameters()})
            runs.append(len(count))
        assert runs == [2, 4]
        assert torch.equal(*losses)
        for key, expected in gradients[0].items():
            torch.testing.assert_close(gradients[1][key], expected, msg=lambda m, key=key: f"{key}: {m}")


class TestPrecision:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("name", ["image-classification", "masked-lm", "sequence-classification"])
    def test_half_precision_is_close(self, tiny_model, tiny_inputs, name, dtype):
        expected = tiny_model(name)(**tiny_inputs(name)).logits
        actual = tiny_model(name).to(dtype)(**tiny_inputs(name)).logits
        assert actual.dtype == dtype
        error = (actual.float() - expected).norm() / expected.norm()
        assert error < 16 * torch.finfo(dtype).eps

    @pytest.mark.parametrize("name", HEADS)
    def test_autocast(self, tiny_model, tiny_inputs, tiny_labels, name):
        model = tiny_model(name).train()
        expected = model(**tiny_inputs(name), labels=tiny_labels(name)).loss
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**tiny_inputs(name), labels=tiny_labels(name)).loss
        loss.backward()
        assert abs(loss - expected) < 0.01 * expected
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())

    @pytest.mark.parametrize("mode", ["exact", "near_far", "low_rank", "monte_carlo"])
    def test_autocast_leaves_positions_alone(self, tiny_config, mode):
        """Angles of 2 pi 10 x in bfloat16 would be off by tenths of a radian, and neighbours would coincide."""
        settings = {"num_fourier_features": 64, "fourier_scale": 10.0, "max_position_embeddings": 512}
        model = ITNetForMaskedLM(tiny_config("text", integration_mode=mode, **settings)).eval()
        fourier, inputs = model.itnet.fourier, {"input_ids": torch.randint(1, 40, (1, 512))}
        positions = torch.arange(1, 513).unsqueeze(-1) / 512
        angles = 2 * math.pi * positions.double() @ fourier.frequencies.double().T
        with torch.no_grad():
            expected = model(**inputs).logits
            with torch.autocast("cpu", dtype=torch.bfloat16):
                gamma = fourier(positions)
                actual = model(**inputs).logits.float()
        assert gamma.dtype == torch.float32
        assert (gamma - torch.cat([angles.sin(), angles.cos()], -1)).abs().max() < 2e-7  # rounding of the result
        assert len(gamma.bfloat16().unique(dim=0)) == 512
        assert (actual - expected).norm() < 0.01 * expected.norm()

    @pytest.mark.parametrize("name", HEADS)
    def test_autocast_of_near_and_far(self, tiny_model, tiny_inputs, tiny_labels, name):
        """The masses of neighbourhoods stay in float32; a training step is that of float32 up to rounding."""
        model = tiny_model(name, integration_mode="near_far", near_size=9).train()
        gradients = []
        for is_lowered in (False, True):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_lowered):
                loss = model(**tiny_inputs(name), labels=tiny_labels(name)).loss
            model.zero_grad()
            loss.backward()
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        assert (gradients[1] - gradients[0]).norm() < 0.05 * gradients[0].norm()

    def test_autocast_leaves_the_positions_of_factors_and_proposals_alone(self, tiny_config):
        settings = {"num_fourier_features": 64, "fourier_scale": 10.0, "approximate_mode": "low_rank"}
        operator = ITNetOperator(tiny_config("text", **settings))
        positions, frequencies = torch.arange(1, 513).unsqueeze(-1) / 512, ITNetFourierFeatures(operator.config)
        features = torch.zeros(1, 512, 16)
        given = {}
        operator.factors.phi.register_forward_pre_hook(lambda _, args: given.update(factors=args[1]))
        proposal = ITNetProposal(operator.config)
        proposal.query.register_forward_pre_hook(lambda _, args: given.update(proposal=args[0][0, :, :128]))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            domain = Domain(positions, torch.full((1, 512), 1 / 512), frequencies.frequencies)
            operator.factors.factors(features.unflatten(-1, (2, 8)), domain)
            proposal._ends(features, domain)
        for gamma in given.values():
            assert torch.equal(gamma.reshape(512, 128), frequencies(positions))


class TestSaving:
    @pytest.mark.parametrize("name", AUTO_CLASSES)
    def test_round_trip_through_auto_classes(self, tiny_model, tiny_inputs, tmp_path, name):
        model, inputs = tiny_model(name), tiny_inputs(name)
        model.save_pretrained(tmp_path)
        loaded, report = AUTO_CLASSES[name].from_pretrained(tmp_path, output_loading_info=True)
        assert type(loaded) is type(model)
        assert not any(report[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        torch.testing.assert_close(main_output(loaded(**inputs)), main_output(model(**inputs)), **ROUNDING)
        assert {key: value.requires_grad for key, value in loaded.named_parameters()} == {
            key: value.requires_grad for key, value in model.named_parameters()
        }

    @pytest.mark.parametrize(
        "overrides",
        [
            {"patch_size": (4, 8), "pooling": "mean"},
            {"kernel_num_layers": 3, "kernel_output_sharing": "shared"},
            {"kernel_inputs": ("distance", "u_y"), "num_fourier_features": 0},
        ],
        ids=["two-grids", "three-layer-shared-kernel", "few-inputs-raw-coordinates"],
    )
    def test_round_trip_of_variants(self, tiny_model, tiny_inputs, tmp_path, overrides):
        model, inputs = tiny_model("image-classification", **overrides), tiny_inputs("image-classification")
        model.save_pretrained(tmp_path)
        loaded = AutoModelForImageClassification.from_pretrained(tmp_path)
        torch.testing.assert_close(loaded(**inputs).logits, model(**inputs).logits, **ROUNDING)

    @pytest.mark.parametrize(("name", "base"), [("image-classification", "image"), ("masked-lm", "text")])
    def test_base_of_a_saved_head(self, tiny_model, tiny_inputs, tmp_path, name, base):
        model, inputs = tiny_model(name), tiny_inputs(base)
        model.save_pretrained(tmp_path)
        loaded = AutoModel.from_pretrained(tmp_path)
        expected = model.itnet(**inputs).last_hidden_state
        torch.testing.assert_close(loaded(**inputs).last_hidden_state, expected, **ROUNDING)

    def test_head_on_a_saved_base(self, tiny_model, tiny_inputs, tmp_path):
        base, inputs = tiny_model("text"), tiny_inputs("text")
        base.save_pretrained(tmp_path)
        loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=4)
        expected = base(**inputs).last_hidden_state
        torch.testing.assert_close(loaded.itnet(**inputs).last_hidden_state, expected, **ROUNDING)
        assert loaded(**inputs).logits.shape == (3, 4)

    @pytest.mark.parametrize("name", CLASSIFIERS)
    def test_new_label_set(self, tiny_model, tiny_inputs, tmp_path, name):
        model, inputs = tiny_model(name), tiny_inputs(name)
        model.save_pretrained(tmp_path)
        names = dict(enumerate("abcde"))
        loaded = AUTO_CLASSES[name].from_pretrained(
            tmp_path,
            id2label=names,
            label2id={label: index for index, label in names.items()},
            ignore_mismatched_sizes=True,
        )
        assert loaded.config.num_labels == 5
        assert loaded(**inputs).logits.shape == (3, 5)
        expected = model.itnet(**inputs).pooler_output
        torch.testing.assert_close(loaded.itnet(**inputs).pooler_output, expected, **ROUNDING)
        weight = loaded.classifier.weight
        assert 0 < weight.abs().max() < 0.2  # N(0, 0.02^2) anew
        assert not loaded.classifier.bias.any()

    def test_bfloat16(self, tiny_model, tiny_inputs, tmp_path):
        model, inputs = tiny_model("image-classification"), tiny_inputs("image-classification")
        model.save_pretrained(tmp_path)
        loaded = AutoModelForImageClassification.from_pretrained(tmp_path, dtype=torch.bfloat16)
        assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
        expected = model.to(torch.bfloat16)(**inputs).logits
        torch.testing.assert_close(loaded(**inputs).logits, expected, rtol=0, atol=0.02 * expected.abs().max().item())


class TestTokenEmbeddings:
    def test_output_weights_are_tied(self, tiny_model):
        model = tiny_model("masked-lm")
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight

    def test_ties_survive_saving(self, tiny_model, tmp_path):
        model = tiny_model("masked-lm")
        model.save_pretrained(tmp_path)
        loaded = AutoModelForMaskedLM.from_pretrained(tmp_path)
        assert loaded.lm_head.decoder.weight is loaded.itnet.encoder.word_embeddings.weight
        assert torch.equal(loaded.lm_head.decoder.bias, model.lm_head.decoder.bias)

    def test_untied(self, tiny_config):
        model = ITNetForMaskedLM(tiny_config("text", tie_word_embeddings=False))
        assert model.get_output_embeddings().weight is not model.get_input_embeddings().weight
        assert "lm_head.decoder.weight" in dict(model.named_parameters())

    @pytest.mark.parametrize("size", [52, 30], ids=["grow", "shrink"])
    def test_resize(self, tiny_model, tmp_path, size):
        model = tiny_model("masked-lm")
        ids, mask = torch.tensor([[3, 5, 29, 1]]), torch.ones(1, 4)
        before = model(ids, attention_mask=mask).logits
        bias = model.lm_head.decoder.bias.clone()
        model.resize_token_embeddings(size)
        kept = min(size, 40)
        assert model.config.vocab_size == size
        assert model.get_input_embeddings().weight.shape == (size, 16)
        assert model.lm_head.decoder.weight is model.get_input_embeddings().weight
        assert torch.equal(model.lm_head.decoder.bias[:kept], bias[:kept])
        output = model(ids, attention_mask=mask, labels=ids)
        assert output.logits.shape == (1, 4, size)
        torch.testing.assert_close(output.logits[..., :kept], before[..., :kept])
        torch.testing.assert_close(output.loss, F.cross_entropy(output.logits.view(-1, size), ids.view(-1)))
        model.save_pretrained(tmp_path)
        loaded = AutoModelForMaskedLM.from_pretrained(tmp_path)
        expected = model(ids, attention_mask=mask).logits
        torch.testing.assert_close(loaded(ids, attention_mask=mask).logits, expected, **ROUNDING)

    def test_new_tokens_can_be_used(self, tiny_model):
        model = tiny_model("sequence-classification")
        model.resize_token_embeddings(44)
        assert model(torch.tensor([[43, 2, 41]])).logits.isfinite().all()

    def test_setting_embeddings(self, tiny_model):
        model, embeddings = tiny_model("masked-lm"), torch.nn.Embedding(40, 16)
        model.set_input_embeddings(embeddings)
        assert model.itnet.encoder.word_embeddings is embeddings
        with pytest.raises(ValueError, match=r"`modality` \('image'\) has no token embeddings"):
            tiny_model("image").set_input_embeddings(embeddings)


@pytest.fixture(params=["float32", "float64"])
def steady_model(request, tiny_model):
    """Models whose outputs may be compared at 1e-6: strongly shaken in float64, or gently in float32.

    In float64 the operator is the reference: the table of a regular domain is as exact as its float32 positions.
    """
    if request.param == "float32":
        return lambda name, **overrides: tiny_model(name, scale=0.05, **overrides)
    return lambda name, **overrides: tiny_model(name, backend="reference", **overrides).double()


def cast(model, inputs):
    """Features in the dtype of the model."""
    return {key: value.to(model.dtype) if key == "inputs_embeds" else value for key, value in inputs.items()}


def pad(ids, mask, side, amount, token):
    """A row with ``amount`` paddings of an arbitrary token on one side."""
    padding, zeros = torch.full((1, amount), token), torch.zeros(1, amount, dtype=mask.dtype)
    order = slice(None, None, -1 if side == "left" else 1)
    return torch.cat([ids, padding][order], 1), torch.cat([mask, zeros][order], 1)


TEXT_VARIANTS = {
    "bidirectional": {},
    "causal": {"is_causal": True},
    "mean": {"pooling": "mean"},
    "max": {"pooling": "max"},
    "three-layer-kernel": {"kernel_num_layers": 3},
}


@pytest.mark.parametrize("variant", TEXT_VARIANTS)
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", ["text", "masked-lm", "sequence-classification"])
class TestPadding:
    def test_padding_changes_nothing(self, steady_model, name, side, variant):
        model = steady_model(name, **TEXT_VARIANTS[variant])
        ids = torch.tensor([[3, 14, 15, 9, 26]])
        expected = model(input_ids=ids)
        for amount, token in ((1, 0), (6, 0), (6, 17)):
            padded, mask = pad(ids, torch.ones_like(ids), side, amount, token)
            output = model(input_ids=padded, attention_mask=mask)
            real = slice(amount, None) if side == "left" else slice(5)
            actual = main_output(output)
            actual = actual if name == "sequence-classification" else actual[:, real]
            assert_same(actual, main_output(expected))
            if name == "text":
                assert_same(output.pooler_output, expected.pooler_output)

    def test_batch_mates_change_nothing(self, steady_model, name, side, variant):
        model = steady_model(name, **TEXT_VARIANTS[variant])
        texts = [torch.tensor([tokens]) for tokens in ([7, 8, 9], [11, 2, 33, 4, 25, 6, 17, 38], [5], [12, 21, 12])]
        rows = [pad(ids, torch.ones_like(ids), side, 8 - ids.shape[1], 0) for ids in texts]
        padded, masks = (torch.cat(parts) for parts in zip(*rows, strict=True))
        batch = main_output(model(input_ids=padded, attention_mask=masks))
        for ids, mask, together in zip(texts, masks, batch, strict=True):
            together = together if name == "sequence-classification" else together[mask.bool()]
            assert_same(together, main_output(model(input_ids=ids))[0])


class TestSymmetries:
    @pytest.mark.parametrize("measured", [False, True], ids=["uniform", "weighted"])
    def test_permutation(self, steady_model, tiny_inputs, measured):
        model = steady_model("signal")
        inputs = cast(model, tiny_inputs("signal", length=9))
        if measured:
            inputs["measure"] = torch.rand(3, 9) + 0.1
        order = torch.tensor([4, 0, 8, 2, 1, 7, 3, 6, 5])
        expected = model(**inputs)
        actual = model(**{key: value[:, order] for key, value in inputs.items()})
        assert_same(actual.last_hidden_state, expected.last_hidden_state[:, order])
        assert_same(actual.pooler_output, expected.pooler_output)

    def test_features_without_their_positions_do_not_permute(self, tiny_model, tiny_inputs):
        """The counterpart: positions do matter."""
        model, inputs = tiny_model("signal"), tiny_inputs("signal")
        expected = model(**inputs).last_hidden_state.flip(1)
        inputs["inputs_embeds"] = inputs["inputs_embeds"].flip(1)
        assert (model(**inputs).last_hidden_state - expected).abs().max() > 0.1

    @pytest.mark.parametrize("how", ["measure", "attention_mask"])
    @pytest.mark.parametrize("variant", [{}, {"is_causal": True}], ids=["all-pairs", "causal"])
    def test_no_measure_equals_no_token(self, steady_model, tiny_inputs, how, variant):
        model = steady_model("signal", **variant)
        inputs = cast(model, tiny_inputs("signal", length=6))
        kept, weights = torch.tensor([0, 1, 3, 5]), torch.tensor([[0.5, 1.0, 0.0, 2.0, 0.0, 1.5]]).repeat(3, 1)
        if how == "attention_mask":
            weights = (weights > 0).float()
        full = model(**inputs, **{how: weights})
        few = model(**{key: value[:, kept] for key, value in inputs.items()}, **{how: weights[:, kept]})
        assert_same(full.last_hidden_state[:, kept], few.last_hidden_state)
        assert_same(full.pooler_output, few.pooler_output)

    def test_two_equal_tokens_weigh_as_one_of_twice_the_measure(self, steady_model, tiny_inputs):
        model = steady_model("signal")
        inputs = cast(model, tiny_inputs("signal", length=4))
        once = model(**inputs, measure=torch.tensor([[1.0, 1.0, 1.0, 2.0]]).repeat(3, 1))
        twice = model(**{key: torch.cat([value, value[:, -1:]], dim=1) for key, value in inputs.items()})
        assert_same(twice.last_hidden_state[:, :4], once.last_hidden_state)

    @pytest.mark.parametrize("name", ["text", "signal"])
    def test_a_causal_model_does_not_see_the_future(self, steady_model, tiny_inputs, name):
        model = steady_model(name, is_causal=True)
        inputs = cast(model, tiny_inputs(name, length=8))
        full = model(**inputs).last_hidden_state
        for length in (1, 3, 7):
            start = model(**{key: value[:, :length] for key, value in inputs.items()}).last_hidden_state
            assert_same(start, full[:, :length])

    def test_a_bidirectional_model_does(self, tiny_model, tiny_inputs):
        model, inputs = tiny_model("text"), tiny_inputs("text")
        changed = inputs["input_ids"].clone()
        changed[:, -1] = 1
        before, after = model(**inputs).last_hidden_state, model(input_ids=changed).last_hidden_state
        assert (before[:, 0] - after[:, 0]).abs().max() > 1e-3


class TestLongTexts:
    """Positions are coordinates, so that `max_position_embeddings` (32) is no limit."""

    def test_bidirectional(self, tiny_model, tiny_inputs):
        """k/n at any length: the same function of the tokens as in a model that was made for longer texts."""
        inputs = tiny_inputs("text", length=40)
        actual, expected = (
            tiny_model("text", max_position_embeddings=length)(**inputs).last_hidden_state for length in (32, 64)
        )
        assert torch.equal(actual, expected)

    def test_causal(self, tiny_model, tiny_inputs, caplog, monkeypatch):
        """k/32 goes on beyond 1, which a warning says; the first 32 tokens do not see what follows."""
        monkeypatch.setattr(logging.get_logger("transformers"), "propagate", True)
        model, inputs = tiny_model("text", is_causal=True), tiny_inputs("text", length=40)
        logging.get_logger("transformers").warning_once.cache_clear()
        start = model(input_ids=inputs["input_ids"][:, :32]).last_hidden_state
        assert "max_position_embeddings" not in caplog.text
        assert_same(model(**inputs).last_hidden_state[:, :32], start)
        assert "a text is longer than `max_position_embeddings` (32)" in caplog.text
        torch.testing.assert_close(
            model.encoder(model.fourier, **inputs).positions[:, 0], torch.arange(1, 41) / 32, rtol=0, atol=1e-6
        )


IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])
PIXELS = torch.zeros(2, 3, 16, 16)
EMBEDS, POINTS = torch.zeros(2, 3, 16), torch.rand(3, 2)

# id -> (model, forward arguments, message)
INPUT_ERRORS = {
    "mask-removes-everything": (
        "text",
        {"input_ids": IDS, "attention_mask": torch.tensor([[1, 1, 1], [0, 0, 0]])},
        "`attention_mask` removes every position of sample(s) [1]",
    ),
    "mask-removes-everything-of-a-signal": (
        "signal",
        {"inputs_embeds": EMBEDS, "positions": POINTS, "attention_mask": torch.zeros(2, 3)},
        "`attention_mask` removes every position of sample(s) [0, 1]",
    ),
    **{
        f"mask-with-{value}": (
            name,
            {**inputs, "attention_mask": torch.tensor([[1.0, 1.0, 0.0], [1.0, value, 0.0]])},
            f"`attention_mask` holds {value}, but must hold 1 for each real position and 0 for padding",
        )
        for name, inputs in (
            ("text", {"input_ids": IDS}),
            ("signal", {"inputs_embeds": EMBEDS, "positions": POINTS}),
        )
        for value in (2.0, -1.0, 0.5, float("-inf"), float("nan"))
    },
    "mask-of-another-length": (
        "text",
        {"input_ids": IDS, "attention_mask": torch.ones(2, 4)},
        "`attention_mask` [2, 4] must be [2, 3]",
    ),
    "mask-of-four-dimensions": (
        "text",
        {"input_ids": IDS, "attention_mask": torch.ones(2, 1, 3, 3)},
        "`attention_mask` [2, 1, 3, 3] must be [2, 3]",
    ),
    "channels": (
        "image",
        {"pixel_values": torch.zeros(2, 1, 16, 16)},
        "`pixel_values` [2, 1, 16, 16] must be [batch, 3, height, width]: `num_channels` is 3",
    ),
    "image-without-batch": ("image", {"pixel_values": torch.zeros(3, 16, 16)}, "`pixel_values` [3, 16, 16] must be"),
    "height": (
        "image",
        {"pixel_values": torch.zeros(2, 3, 20, 16)},
        "image size [20, 16] of `pixel_values` must be a multiple of `patch_size` (8)",
    ),
    "width": (
        "image-classification",
        {"pixel_values": torch.zeros(2, 3, 16, 12)},
        "image size [16, 12] of `pixel_values` must be a multiple of `patch_size` (8)",
    ),
    "empty-image": ("image", {"pixel_values": torch.zeros(2, 3, 0, 16)}, "image size [0, 16]"),
    "image-missing": ("image", {}, "`modality` 'image' needs exactly one of `pixel_values`, got none"),
    "image-missing-in-head": ("image-classification", {}, "needs exactly one of `pixel_values`, got none"),
    "image-and-text": (
        "image",
        {"pixel_values": PIXELS, "input_ids": IDS},
        "`modality` 'image' takes ['pixel_values'], but ['input_ids'] was given too",
    ),
    "text-missing": ("text", {}, "`modality` 'text' needs exactly one of `input_ids` or `inputs_embeds`, got none"),
    "text-missing-in-head": ("masked-lm", {"attention_mask": torch.ones(2, 3)}, "got none"),
    "text-twice": (
        "sequence-classification",
        {"input_ids": IDS, "inputs_embeds": EMBEDS},
        "needs exactly one of `input_ids` or `inputs_embeds`, got ['input_ids', 'inputs_embeds']",
    ),
    "text-and-image": ("masked-lm", {"input_ids": IDS, "pixel_values": PIXELS}, "['pixel_values'] was given too"),
    "text-and-positions": ("text", {"input_ids": IDS, "positions": POINTS}, "['positions'] was given too"),
    "text-without-tokens": ("text", {"input_ids": IDS[:, :0]}, "`input_ids` holds no token"),
    "text-without-batch": ("text", {"input_ids": IDS[0]}, "`input_ids` [3] must be [batch, tokens]"),
    "signal-missing": ("signal", {"positions": POINTS}, "`modality` 'signal' needs exactly one of `inputs_embeds`"),
    "signal-without-positions": ("signal", {"inputs_embeds": EMBEDS}, "`positions` is missing"),
    "signal-and-ids": (
        "signal",
        {"inputs_embeds": EMBEDS, "positions": POINTS, "input_ids": IDS},
        "['input_ids'] was given too",
    ),
    "signal-without-points": (
        "signal",
        {"inputs_embeds": EMBEDS[:, :0], "positions": POINTS[:0]},
        "`inputs_embeds` [2, 0, 16] must be [batch, positions, 16] with at least one position",
    ),
    "signal-of-another-width": (
        "signal",
        {"inputs_embeds": torch.zeros(2, 3, 15), "positions": POINTS},
        "`inputs_embeds` [2, 3, 15] must be [batch, positions, 16]",
    ),
    "positions-of-another-count": (
        "signal",
        {"inputs_embeds": EMBEDS, "positions": torch.rand(4, 2)},
        "`positions` [4, 2] must be [3, 2] or [2, 3, 2] to go with `inputs_embeds` [2, 3, 16]",
    ),
    "positions-of-another-dimension": (
        "signal",
        {"inputs_embeds": EMBEDS, "positions": torch.rand(3, 3)},
        "`positions` [3, 3] must be [3, 2]",
    ),
    "positions-not-finite": (
        "signal",
        {"inputs_embeds": EMBEDS, "positions": torch.tensor([[0.0, 0.0], [float("nan"), 0.0], [1.0, 1.0]])},
        "`positions` holds values that are not finite",
    ),
    "measure-of-another-count": (
        "signal",
        {"inputs_embeds": EMBEDS, "positions": POINTS, "measure": torch.ones(2, 4)},
        "`measure` [2, 4] must be [2, 3]",
    ),
    "measure-negative": (
        "signal",
        {"inputs_embeds": EMBEDS, "positions": POINTS, "measure": torch.tensor([[1.0, -1, 2], [1, 1, 1]])},
        "`measure` must not be negative",
    ),
    "measure-vanishes": (
        "signal",
        {"inputs_embeds": EMBEDS, "positions": POINTS, "measure": torch.tensor([[1.0, 1, 1], [0, 0, 0]])},
        "must not vanish",
    ),
}


class TestErrors:
    @pytest.mark.parametrize("case", INPUT_ERRORS)
    def test_inputs(self, tiny_model, case):
        name, inputs, message = INPUT_ERRORS[case]
        with pytest.raises(ValueError, match=re.escape(message)):
            tiny_model(name)(**inputs)

    def test_multi_scale_image_must_fit_every_grid(self, tiny_model):
        with pytest.raises(ValueError, match=r"image size \[24, 16\].*`patch_size` \(16\)"):
            tiny_model("image", patch_size=(8, 16))(pixel_values=torch.zeros(1, 3, 24, 16))

    @pytest.mark.parametrize(
        ("model_class", "modality", "needed"),
        [
            (ITNetForImageClassification, "text", "image"),
            (ITNetForImageClassification, "signal", "image"),
            (ITNetForMaskedLM, "image", "text"),
            (ITNetForSequenceClassification, "image", "text"),
        ],
        ids=lambda value: getattr(value, "__name__", value),
    )
    def test_head_of_another_modality(self, tiny_config, model_class, modality, needed):
        message = f"{model_class.__name__} needs `modality` in ['{needed}'], but the config has '{modality}'"
        with pytest.raises(ValueError, match=re.escape(message)):
            model_class(tiny_config(modality))

    def test_backend_that_cannot_run(self, tiny_model, tiny_inputs):
        model = tiny_model("image", backend="triton")
        with pytest.raises(ValueError, match=r'`backend` \("triton"\)'):
            model(**tiny_inputs("image"))


class TestTraining:
    @pytest.mark.parametrize(
        ("name", "labels", "overrides"),
        [
            ("image-classification", torch.tensor([0, 1, 2, 1]), {}),
            ("sequence-classification", torch.tensor([0, 1, 2, 1]), {}),
            ("sequence-classification", torch.tensor([0.3, -1.2, 0.8, 2.0]), {"num_labels": 1}),
            ("image-classification", torch.tensor([[1.0, 0, 1], [0, 1, 0], [0, 0, 0], [1, 1, 1]]), {}),
            ("masked-lm", None, {}),
        ],
        ids=["image-classes", "text-classes", "text-regression", "image-multi-label", "masked-lm"],
    )
    def test_loss_falls(self, tiny_config, tiny_inputs, tiny_labels, name, labels, overrides):
        classes = {
            "image-classification": ITNetForImageClassification,
            "sequence-classification": ITNetForSequenceClassification,
            "masked-lm": ITNetForMaskedLM,
        }
        modality = "image" if name.startswith("image") else "text"
        model = classes[name](tiny_config(modality, kernel_init_scale=1e-3, **overrides)).train()
        inputs = tiny_inputs(name, batch=4)
        labels = tiny_labels(name, batch=4) if labels is None else labels
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
        for _ in range(40):
            loss = model(**inputs, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.2 * losses[0]

    @pytest.mark.parametrize("name", HEADS)
    def test_accumulation_equals_one_large_batch(self, tiny_model, tiny_inputs, tiny_labels, tmp_path, name):
        """Trainer: 4 steps of 2 samples move the parameters as 1 step of 8, though samples ask for unequal shares."""
        inputs, labels = tiny_inputs(name, batch=8), tiny_labels(name, batch=8)
        if name == "masked-lm":
            for sample in range(8):
                labels[sample, sample % 5 + 1 :] = -100
        dataset = [{**{key: value[i] for key, value in inputs.items()}, "labels": labels[i]} for i in range(8)]
        moves = []
        for size, accumulation in ((8, 1), (2, 4)):
            model = tiny_model(name)
            before = {key: value.detach().clone() for key, value in model.named_parameters()}
            arguments = TrainingArguments(
                output_dir=tmp_path,
                use_cpu=True,
                per_device_train_batch_size=size,
                gradient_accumulation_steps=accumulation,
                max_steps=1,
                optim="sgd",
                learning_rate=1.0,
                lr_scheduler_type="constant",
                max_grad_norm=0.0,
                save_strategy="no",
                logging_strategy="no",
                report_to=[],
                disable_tqdm=True,
                dataloader_pin_memory=False,
            )
            trainer = Trainer(model=model, args=arguments, train_dataset=dataset)
            trainer.train()
            assert trainer.state.global_step == 1
            moves.append({key: value.detach() - before[key] for key, value in model.named_parameters()})
        for key, expected in moves[0].items():
            assert expected.abs().max() > 0, key
            torch.testing.assert_close(moves[1][key], expected, rtol=1e-3, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}")
