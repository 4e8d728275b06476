"""Quantised models of every modality run, and compute what their dequantised weights say."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

NAMES = [
    "image-classification",
    "sequence-classification",
    "causal-lm",
    "masked-lm",
    "visual-question-answering",
    "images-and-text",
    "point-cloud",
    "graph",
    "graph-features",
    "signal",
]


class Int8Linear(nn.Module):
    """What bitsandbytes and its like put in the place of a linear layer: integers, a scale, and a floating bias."""

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.scale = linear.weight.detach().abs().max() / 127
        integers = (linear.weight.detach() / self.scale).round().to(torch.int8)
        self.weight = nn.Parameter(integers, requires_grad=False)

    def forward(self, inputs):
        assert inputs.is_floating_point(), "the input was cast to the dtype of the integers"
        return F.linear(inputs, self.weight * self.scale, self.bias)


def linear_layers(model):
    """(parent, name, layer) of every linear layer that is not tied to an embedding."""
    tied = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is nn.Linear and id(layer.weight) not in tied:
                yield parent, name, layer


@pytest.fixture
def model_and_inputs(make_model, make_inputs):
    def make(name):
        if name != "graph-features":
            return make_model(name), make_inputs(name)
        inputs = make_inputs("graph")
        types = inputs.pop("node_types")
        model = make_model("graph", num_node_types=0, node_feature_size=2)
        return model, {**inputs, "node_features": torch.stack([types, types * 0.3], dim=-1).float()}

    return make


@pytest.mark.parametrize("name", NAMES)
def test_integer_weights(name, model_and_inputs, predictions):
    model, inputs = model_and_inputs(name)
    rounded = copy.deepcopy(model)
    count = 0
    for parent, key, layer in linear_layers(model):
        setattr(parent, key, Int8Linear(layer))
        count += 1
    assert count >= 8
    for _, _, layer in linear_layers(rounded):
        quantised = Int8Linear(layer)
        layer.weight.data.copy_(quantised.weight * quantised.scale)
    with torch.no_grad():
        expected, actual = predictions(rounded(**inputs)), predictions(model(**inputs))
    for key, value in expected.items():
        torch.testing.assert_close(actual[key], value)


@pytest.mark.parametrize("name", NAMES)
def test_dynamic_quantisation(name, model_and_inputs, predictions):
    """torch.ao rounds weights and activations to 8 bits; two layers amplify the 1/255 of each several times."""
    model, inputs = model_and_inputs(name)
    quantised = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear}, dtype=torch.qint8)
    with torch.no_grad():
        expected, actual = predictions(model(**inputs)), predictions(quantised(**inputs))
    for key, value in expected.items():
        assert not torch.equal(actual[key], value)
        assert (actual[key] - value).norm() < 0.25 * value.norm()
