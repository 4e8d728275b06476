"""Properties that the heads for points, graphs, image and text, tokens and signals share."""

import pytest
import torch
from torch.nn import functional as F
from transformers import (
    AutoModel,
    AutoModelForQuestionAnswering,
    AutoModelForTokenClassification,
    AutoModelForVisualQuestionAnswering,
)

from modeling_itnet import (
    ITNetForGraphClassification,
    ITNetForImagesAndTextClassification,
    ITNetForPointCloudClassification,
    ITNetForQuestionAnswering,
    ITNetForSignalRegression,
    ITNetForTokenClassification,
    ITNetForVisualQuestionAnswering,
    ITNetModel,
)

# id -> (class, modality, configuration)
# Of a model that was loaded again: its weights lie elsewhere in memory, which changes how products are summed.
ROUNDING = {"rtol": 1e-4, "atol": 1e-5}
HEADS = {
    "point-cloud": (ITNetForPointCloudClassification, "point_cloud", {"local_neighbors": 3, "point_feature_size": 2}),
    "graph-features": (ITNetForGraphClassification, "graph", {"node_feature_size": 2}),
    "graph-types": (ITNetForGraphClassification, "graph", {"num_node_types": 5}),
    "question-answering": (ITNetForQuestionAnswering, "text", {}),
    "token-classification": (ITNetForTokenClassification, "text", {}),
    "visual-question-answering": (ITNetForVisualQuestionAnswering, "multimodal", {"measure": "balanced"}),
    "images-and-text": (ITNetForImagesAndTextClassification, "multimodal", {"measure": [3, 1]}),
    "signal-regression": (ITNetForSignalRegression, "signal", {"signal_feature_size": 2}),
}
AUTO_CLASSES = {
    "question-answering": AutoModelForQuestionAnswering,
    "token-classification": AutoModelForTokenClassification,
    "visual-question-answering": AutoModelForVisualQuestionAnswering,
}
MODES = {
    "exact": {"integration_mode": "exact"},
    "monte_carlo": {"integration_mode": "monte_carlo", "num_samples": 4},
    "low_rank": {"integration_mode": "low_rank", "rank": 4},
}
BATCH, LENGTH = 3, 7


def make_inputs(name, length=LENGTH, seed=2):
    """Forward arguments without mask: what is random does not depend on the number of positions that follow."""
    modality = HEADS[name][1]
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    def integers(high, *shape, low=0):
        return torch.randint(low, high, shape, generator=generator)

    if modality == "point_cloud":
        return {"points": normal(BATCH, length, 3), "point_features": normal(BATCH, length, 2)}
    if modality == "graph":
        nodes = integers(5, BATCH, length) if name == "graph-types" else normal(BATCH, length, 2)
        kind = "node_types" if name == "graph-types" else "node_features"
        neighbors = integers(length, BATCH, length, 3, low=-1)
        return {kind: nodes, "positions": normal(BATCH, length, 8), "neighbors": neighbors}
    if modality == "signal":
        queries = torch.rand(BATCH, 5, 2, generator=torch.Generator().manual_seed(9))
        values = {"signal_values": normal(BATCH, length, 2), "positions": normal(BATCH, length, 2)}
        return {**values, "query_positions": queries, "measure": normal(BATCH, length).exp()}
    text = {"input_ids": integers(40, BATCH, length, low=1)}
    if modality == "text":
        return text
    images = (2,) if name == "images-and-text" else ()
    return {"pixel_values": normal(BATCH, *images, 3, 16, 16), **text}


def make_labels(name, length=LENGTH):
    if name == "question-answering":
        return {"start_positions": torch.tensor([1, 0, 4]), "end_positions": torch.tensor([3, 2, 5])}
    if name == "token-classification":
        return {"labels": torch.arange(BATCH * length).view(BATCH, length) % 3}
    if name == "visual-question-answering":
        return {"labels": torch.rand(BATCH, 3, generator=torch.Generator().manual_seed(4))}
    if name == "signal-regression":
        return {"labels": torch.randn(BATCH, 5, 3, generator=torch.Generator().manual_seed(4))}
    return {"labels": torch.arange(BATCH) % 3}


def pad_inputs(inputs, extra):
    """``extra`` positions of garbage at the end, and the mask that removes them."""
    per_position = {"points", "point_features", "node_features", "node_types", "positions", "neighbors", "input_ids"}
    per_position |= {"signal_values", "measure"}
    padded = {}
    for key, value in inputs.items():
        if key in per_position:
            garbage = torch.ones(BATCH, extra, *value.shape[2:], dtype=value.dtype) * 3
            value = torch.cat([value, garbage], dim=1)
        padded[key] = value
    count = next(v.shape[1] for k, v in padded.items() if k in per_position)
    padded["attention_mask"] = (torch.arange(count) < count - extra).long().expand(BATCH, -1)
    return padded


def outputs_of(output):
    """The tensors that a head predicts."""
    names = ("logits", "start_logits", "end_logits", "predictions")
    return {name: output[name] for name in names if name in output}


@pytest.fixture
def make_model(tiny_config, shake):
    def make(name, scale=0.3, **overrides):
        model_class, modality, values = HEADS[name]
        torch.manual_seed(0)
        return shake(model_class(tiny_config(modality, **{**values, **overrides})), scale).eval()

    return make


class TestLoss:
    @pytest.mark.parametrize("name", ["point-cloud", "graph-features", "graph-types", "images-and-text"])
    def test_cross_entropy(self, make_model, name):
        model, labels = make_model(name), make_labels(name)["labels"]
        output = model(**make_inputs(name), labels=labels)
        torch.testing.assert_close(output.loss, F.cross_entropy(output.logits, labels))

    def test_spans(self, make_model):
        labels = make_labels("question-answering")
        output = make_model("question-answering")(**make_inputs("question-answering"), **labels)
        starts = F.cross_entropy(output.start_logits, labels["start_positions"])
        ends = F.cross_entropy(output.end_logits, labels["end_positions"])
        torch.testing.assert_close(output.loss, (starts + ends) / 2)

    def test_spans_beyond_the_text_are_ignored(self, make_model):
        model, inputs = make_model("question-answering"), make_inputs("question-answering")
        output = model(**inputs, start_positions=torch.tensor([1, 99, 4]), end_positions=torch.tensor([3, 99, 5]))
        kept = [0, 2]
        starts = F.cross_entropy(output.start_logits[kept], torch.tensor([1, 4]))
        ends = F.cross_entropy(output.end_logits[kept], torch.tensor([3, 5]))
        torch.testing.assert_close(output.loss, (starts + ends) / 2)

    def test_tokens(self, make_model):
        model, labels = make_model("token-classification"), make_labels("token-classification")["labels"]
        labels = labels.where(torch.arange(LENGTH) % 2 > 0, -100)
        output = model(**make_inputs("token-classification"), labels=labels)
        asked = labels != -100
        torch.testing.assert_close(output.loss, F.cross_entropy(output.logits[asked], labels[asked]))
        shared = model(**make_inputs("token-classification"), labels=labels, num_items_in_batch=torch.tensor(30)).loss
        torch.testing.assert_close(shared, output.loss * asked.sum() / 30)

    def test_soft_answers(self, make_model):
        model, targets = make_model("visual-question-answering"), make_labels("visual-question-answering")["labels"]
        output = model(**make_inputs("visual-question-answering"), labels=targets)
        p = output.logits.double().sigmoid()
        expected = -(targets * p.log() + (1 - targets) * (1 - p).log()).sum(1).mean()
        torch.testing.assert_close(output.loss, expected.float())

    def test_one_right_answer(self, make_model):
        model, inputs = make_model("visual-question-answering"), make_inputs("visual-question-answering")
        answers = torch.tensor([2, 0, 1])
        by_index = model(**inputs, labels=answers).loss
        torch.testing.assert_close(by_index, model(**inputs, labels=F.one_hot(answers, 3).float()).loss)

    def test_values(self, make_model):
        model, labels = make_model("signal-regression"), make_labels("signal-regression")["labels"]
        inputs = make_inputs("signal-regression")
        output = model(**inputs, labels=labels)
        torch.testing.assert_close(output.loss, (output.predictions - labels).square().mean())
        mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0]])
        masked = model(**inputs, labels=labels, query_mask=mask).loss
        errors = (output.predictions - labels).square().mean(-1)
        each = [sample[kept.bool()].mean() for sample, kept in zip(errors, mask, strict=True)]
        torch.testing.assert_close(masked, torch.stack(each).mean())

    def test_relative_values(self, make_model):
        model, labels = make_model("signal-regression", signal_loss="relative_l2"), make_labels("signal-regression")
        inputs, labels = make_inputs("signal-regression"), labels["labels"]
        output = model(**inputs, labels=labels)
        mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]).bool()
        masked = model(**inputs, labels=labels, query_mask=mask).loss
        for loss, kept in ((output.loss, torch.ones_like(mask)), (masked, mask)):
            pairs = [
                (p[k].flatten(), y[k].flatten()) for p, y, k in zip(output.predictions, labels, kept, strict=True)
            ]
            each = [((p - y).square().sum() / y.square().sum()).sqrt() for p, y in pairs]
            torch.testing.assert_close(loss, torch.stack(each).mean())


class TestEveryHead:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("name", HEADS)
    def test_every_parameter_gets_a_gradient(self, make_model, name, mode):
        model = make_model(name, **MODES[mode]).train()
        model(**make_inputs(name), **make_labels(name)).loss.backward()
        for parameter_name, parameter in model.named_parameters():
            assert parameter.grad is not None, parameter_name
            assert parameter.grad.isfinite().all(), parameter_name
            assert parameter.grad.abs().max() > 0, parameter_name

    @pytest.mark.parametrize("name", HEADS)
    def test_every_parameter_gets_a_gradient_at_initialisation(self, tiny_config, name):
        model_class, modality, values = HEADS[name]
        model = model_class(tiny_config(modality, **values))
        model(**make_inputs(name), **make_labels(name)).loss.backward()
        assert [n for n, p in model.named_parameters() if p.grad is None or p.grad.abs().max() == 0] == []

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("name", HEADS)
    def test_padding_changes_nothing(self, make_model, name, mode):
        model, inputs = make_model(name, scale=0.1, **MODES[mode]), make_inputs(name)
        expected = outputs_of(model(**inputs))
        actual = outputs_of(model(**pad_inputs(inputs, 4)))
        for key, value in expected.items():
            of_tokens = HEADS[name][1] == "text"
            shortened = actual[key][:, :LENGTH] if of_tokens else actual[key]
            torch.testing.assert_close(shortened, value, rtol=0, atol=1e-5)

    @pytest.mark.parametrize("name", HEADS)
    def test_batch_mates_change_nothing(self, make_model, name):
        model, inputs = make_model(name, scale=0.1), make_inputs(name)
        together = outputs_of(model(**inputs))
        alone = outputs_of(model(**{key: value[1:2] for key, value in inputs.items()}))
        for key, value in together.items():
            torch.testing.assert_close(alone[key], value[1:2], rtol=0, atol=1e-5)

    @pytest.mark.parametrize("name", HEADS)
    def test_save_and_load(self, make_model, tmp_path, name):
        model, inputs = make_model(name), make_inputs(name)
        model.save_pretrained(tmp_path)
        loaded = AUTO_CLASSES.get(name, HEADS[name][0]).from_pretrained(tmp_path)
        assert type(loaded) is type(model)
        for key, value in outputs_of(model(**inputs)).items():
            torch.testing.assert_close(outputs_of(loaded(**inputs))[key], value, **ROUNDING)

    @pytest.mark.parametrize("name", HEADS)
    def test_base_model_of_a_head(self, make_model, tmp_path, name):
        """The bare model loads from the head's checkpoint, and gives node, point or token features."""
        model, inputs = make_model(name), make_inputs(name)
        model.save_pretrained(tmp_path)
        base = AutoModel.from_pretrained(tmp_path).eval()
        assert type(base) is ITNetModel
        if name == "images-and-text":
            inputs["pixel_values"] = inputs["pixel_values"][:, 0]
        inputs.pop("query_positions", None)
        features = base(**inputs).last_hidden_state
        torch.testing.assert_close(features, model.itnet(**inputs).last_hidden_state, **ROUNDING)
        assert features.shape == (BATCH, LENGTH + 5 if "pixel_values" in inputs else LENGTH, 16)

    @pytest.mark.parametrize("name", HEADS)
    def test_tuple_output(self, make_model, name):
        model, inputs, labels = make_model(name), make_inputs(name), make_labels(name)
        output = model(**inputs, **labels)
        parts = model(**inputs, **labels, return_dict=False)
        for actual, expected in zip(parts, output.to_tuple(), strict=True):
            assert torch.equal(actual, expected)

    @pytest.mark.parametrize("name", HEADS)
    def test_main_input(self, make_model, name):
        assert make_model(name).main_input_name == next(iter(make_inputs(name)))

    @pytest.mark.parametrize("use_reentrant", [False, True], ids=["plain", "reentrant"])
    @pytest.mark.parametrize("name", ["graph-types", "point-cloud"])
    def test_checkpointing_changes_nothing(self, make_model, name, use_reentrant):
        """lambda reaches every layer from outside: its gradient must survive."""
        gradients = []
        for checkpointing in (False, True):
            model = make_model(name).train()
            if checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            model(**make_inputs(name), **make_labels(name)).loss.backward()
            gradients.append({n: p.grad for n, p in model.named_parameters()})
        for parameter_name, gradient in gradients[0].items():
            torch.testing.assert_close(gradients[1][parameter_name], gradient, msg=parameter_name)

    @pytest.mark.parametrize("name", HEADS)
    def test_wrong_modality(self, tiny_config, name):
        model_class, modality, _ = HEADS[name]
        with pytest.raises(ValueError, match=f"{model_class.__name__} needs `modality` in .'{modality}'"):
            model_class(tiny_config("image"))


class TestOneCore:
    def test_all_encoders_feed_the_same_layers(self, tiny_config, shake):
        """One set of layers, with the frequencies of each domain; only encoders differ."""
        core = shake(ITNetModel(tiny_config("image"))).eval()
        inputs = {
            "image": {"pixel_values": torch.randn(BATCH, 3, 16, 16)},
            "text": {"input_ids": torch.randint(1, 40, (BATCH, LENGTH))},
            "multimodal": make_inputs("visual-question-answering"),
            "point_cloud": {"points": torch.randn(BATCH, LENGTH, 3)},
            "graph": make_inputs("graph-features"),
            "signal": {"inputs_embeds": torch.randn(BATCH, LENGTH, 16), "positions": torch.rand(LENGTH, 2)},
        }
        for modality, given in inputs.items():
            model = ITNetModel(tiny_config(modality, node_feature_size=2)).eval()
            model.layers.load_state_dict(core.layers.state_dict())  # strict: the same names and shapes
            model.layernorm.load_state_dict(core.layernorm.state_dict())
            expected = model(**given)
            model.layers, model.layernorm = core.layers, core.layernorm  # the very same modules
            actual = model(**given)
            assert torch.equal(actual.last_hidden_state, expected.last_hidden_state), modality
            assert actual.last_hidden_state.isfinite().all()
