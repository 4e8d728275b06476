"""How models are called: positionally, with what is no tensor, with nothing; and what their help says."""

import inspect

import numpy as np
import pytest
import torch

import modeling_itnet
from modeling_itnet import ITNetModel

TEXT, MULTIMODAL = ["input_ids", "attention_mask"], ["pixel_values", "input_ids", "attention_mask"]
# What every head, and its bare model, take in a positional call; the main input first.
ORDER = {
    "image-classification": ["pixel_values"],
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
