"""How models are called: positionally, with what is no tensor, with nothing; and what their help says."""

import inspect

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import modeling_itnet
from modeling_itnet import ITNetModel

TEXT, MULTIMODAL = ["input_ids", "attention_mask"], ["pixel_values", "input_ids", "attention_mask"]
# What every head, and its bare model, take in a positional call; the main input first.
ORDER = {
    "image-classification": ["pixel_values"],
    "causal-lm": TEXT,
    "masked-lm": TEXT,
    "sequence-classification": TEXT,
    "token-classification": TEXT,
    "question-answering": TEXT,
    "visual-question-answering": MULTIMODAL,
    "images-and-text": MULTIMODAL,
    "point-cloud": ["points"],
    "graph": ["node_types"],
    "signal": ["signal_values"],
}


def with_mask(inputs):
    if "input_ids" in inputs:
        mask = torch.ones_like(inputs["input_ids"])
        mask[0, -2:] = 0
        inputs["attention_mask"] = mask
    return inputs


def outputs(model, *args, **kwargs):
    with torch.no_grad():
        return model(*args, **kwargs)


@pytest.mark.parametrize("bare", [True, False], ids=["bare", "head"])
@pytest.mark.parametrize("name", ORDER)
def test_main_input_comes_first(name, bare, make_model, make_inputs, predictions):
    model, inputs = make_model(name), with_mask(make_inputs(name))
    if bare and name == "images-and-text":
        inputs["pixel_values"] = inputs["pixel_values"][:, 0]
    model = model.base_model if bare else model
    order = ORDER[name]
    assert model.main_input_name == order[0]
    by_name = predictions(outputs(model, **inputs))
    for count in range(1, len(order) + 1):
        named = {key: value for key, value in inputs.items() if key not in order[:count]}
        in_order = predictions(outputs(model, *(inputs[key] for key in order[:count]), **named))
        assert all(torch.equal(in_order[key], value) for key, value in by_name.items())


def test_positional_and_named_at_once(make_model, make_inputs):
    model, inputs = make_model("masked-lm").base_model, make_inputs("masked-lm")
    with pytest.raises(TypeError, match="input_ids"):
        model(inputs["input_ids"], **inputs)
    with pytest.raises(TypeError, match=r"at most 5 positional arguments, \['input_ids', 'attention_mask'"):
        model(*[inputs["input_ids"]] * 6)


def test_signature_is_kept():
    """Trainer drops the columns that the signature does not name; exporters bind arguments to it."""
    names = list(inspect.signature(ITNetModel.forward).parameters)
    assert names[1] == ITNetModel.main_input_name
    assert {"input_ids", "attention_mask", "points", "node_features", "signal_values"} <= set(names)


@pytest.mark.parametrize("name", ORDER)
@pytest.mark.parametrize("convert", [np.asarray, torch.Tensor.tolist], ids=["array", "list"])
def test_what_is_no_tensor(name, convert, make_model, make_inputs):
    model, inputs = make_model(name), make_inputs(name)
    for key in inputs:
        with pytest.raises(ValueError, match=rf"`{key}` \((ndarray|list)\) must be a torch\.Tensor"):
            model(**{**inputs, key: convert(inputs[key])})


@pytest.mark.parametrize("name", ORDER)
def test_no_sample(name, make_model, make_inputs):
    model, inputs = make_model(name), make_inputs(name)
    empty = {key: value if key == "positions" and value.dim() == 2 else value[:0] for key, value in inputs.items()}
    with pytest.raises(ValueError, match=r"`\w+` \[0, .*\] is an empty batch"):
        model(**empty)


def test_help_has_no_placeholders():
    for name in modeling_itnet.__all__:
        thing = getattr(modeling_itnet, name)
        if isinstance(thing, type) and hasattr(thing, "forward"):
            text = inspect.getdoc(thing) + inspect.getdoc(thing.forward)
            assert "processor_class" not in text, name


CLASSIFIERS = ["image-classification", "sequence-classification", "images-and-text", "point-cloud", "graph"]
TOKENS = ["causal-lm", "masked-lm", "token-classification"]
BAD_LABELS = {
    "out-of-range": (lambda good: good + 39, "`labels` hold (39|40|41|42), but there are (3|40) classes"),
    "negative": (lambda good: good - 5, "`labels` hold -[345], but there are (3|40) classes"),
    "longer": (lambda good: torch.cat([good, good]), r"`labels` \[6(, 7)?\] must be \[3(, 7)?\]: class indices"),
    "list": (torch.Tensor.tolist, r"`labels` \(list\) must be a torch\.Tensor"),
}


@pytest.mark.parametrize("case", BAD_LABELS)
@pytest.mark.parametrize("name", [*CLASSIFIERS, *TOKENS, "visual-question-answering"])
def test_bad_labels(name, case, make_model, make_inputs, make_labels):
    change, message = BAD_LABELS[case]
    labels = make_labels(name)["labels"]
    with pytest.raises(ValueError, match=message):
        make_model(name)(**make_inputs(name), labels=change(labels))


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_labels_of_every_kind(name, make_model, make_inputs):
    """Against the losses of torch: indices with some missing, several labels at once, one number."""
    model, inputs = make_model(name), make_inputs(name)
    logits = outputs(model, **inputs).logits
    indices, targets = torch.tensor([2, -100, 0]), torch.tensor([[1.0, 0, 1], [0, 0, 0], [0, 1, 1]])
    loss = outputs(model, **inputs, labels=indices).loss
    torch.testing.assert_close(loss, F.cross_entropy(logits, indices))
    model.config.problem_type = None
    loss = outputs(model, **inputs, labels=targets).loss
    torch.testing.assert_close(loss, F.binary_cross_entropy_with_logits(logits, targets))
    model = make_model(name, num_labels=1)
    values = torch.tensor([0.5, -1.0, 2.0])
    for labels in (values, values.unsqueeze(1)):
        loss = outputs(model, **inputs, labels=labels).loss
        torch.testing.assert_close(loss, F.mse_loss(outputs(model, **inputs).logits[:, 0], values))
    with pytest.raises(ValueError, match=r"`label_smoothing` \(0.1\) is for classes, not for 'regression'"):
        model(**inputs, labels=values, label_smoothing=0.1)
    with pytest.raises(ValueError, match=r"`labels` \[3, 3\] must be \[3\]: one number for each"):
        model(**inputs, labels=targets)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_shares_of_classes(name, make_model, make_inputs):
    """Soft labels, as MixUp makes them, where the config says that a sample has one class."""
    model, inputs = make_model(name, problem_type="single_label_classification"), make_inputs(name)
    logits, shares = outputs(model, **inputs).logits, torch.tensor([[0.3, 0.7, 0], [1, 0, 0], [0.2, 0.2, 0.6]])
    loss = outputs(model, **inputs, labels=shares, label_smoothing=0.3).loss
    torch.testing.assert_close(loss, -((0.7 * shares + 0.1) * logits.log_softmax(-1)).sum(-1).mean())
    for wrong in (2 * shares, shares - 1 / 3):
        with pytest.raises(ValueError, match=r"`labels` \[3, 3\] must be shares of the classes, .* sum to 1"):
            model(**inputs, labels=wrong)
