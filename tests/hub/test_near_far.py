"""Near and far fields in every head: training, compiled and exported graphs, adapters, code that goes along."""

import copy

import pytest
import torch
from peft import PeftModel, get_peft_model

from modeling_itnet.hub.onnx_export import export_graph
from modeling_itnet.training.lora import lora_config

NEAR_FAR = {"integration_mode": "near_far", "rank": 3, "near_size": 9, "near_radius": 0.8, "factor_form": "matrix"}
HEADS = [
    "image-classification",
    "masked-lm",
    "sequence-classification",
    "token-classification",
    "question-answering",
    "visual-question-answering",
    "images-and-text",
    "point-cloud",
    "graph",
    "signal",
]


@pytest.fixture
def near_far(make_model):
    """near_far(name, **overrides): a model of the cases with near and far fields; images have 16 patches."""

    def make(name, **overrides):
        return make_model(name, **NEAR_FAR | {"patch_size": 4} | overrides)

    return make


@pytest.fixture
def arguments(make_inputs):
    """arguments(name, padded): forward arguments of 20 positions, half of one sample hidden and a hole in another."""

    def make(name, padded=False, **sizes):
        inputs = make_inputs(name, length=20, **sizes)
        if padded:
            batch = len(next(iter(inputs.values())))
            inputs["attention_mask"] = torch.ones(batch, 20, dtype=torch.long)
            inputs["attention_mask"][0, 10:] = 0
            inputs["attention_mask"][1, 5] = 0
        return inputs

    return make


def assert_same(actual, expected, predictions):
    for key, value in predictions(expected).items():
        torch.testing.assert_close(actual[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", HEADS)
def test_a_step_lowers_the_loss(name, near_far, arguments, make_labels):
    model = near_far(name).train()
    given = arguments(name) | make_labels(name, length=20)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=1e-3), []
    for _ in range(2):
        loss = model(**given).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[1] < losses[0]
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), key


TRACED = [
    ("image-classification", False),
    ("masked-lm", True),
    ("visual-question-answering", True),
    ("point-cloud", True),
    ("signal", False),
]


@pytest.mark.parametrize(("name", "padded"), TRACED, ids=[name for name, _ in TRACED])
def test_compiles_to_one_graph(name, padded, near_far, arguments, make_labels, predictions):
    """Windows are found while tracing; balls are a table of all pairs there, with the same result."""
    model, given = near_far(name, num_hidden_layers=1), arguments(name, padded) | make_labels(name, length=20)
    expected = model(**given)
    expected.loss.backward()
    gradients = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
    model.zero_grad()
    torch._dynamo.reset()
    output = torch.compile(model, fullgraph=True, backend="eager")(**given)
    assert_same(output, expected, predictions)
    output.loss.backward()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[key], rtol=1e-3, atol=1e-5, msg=key)


@pytest.mark.parametrize(("name", "padded"), TRACED, ids=[name for name, _ in TRACED])
def test_exports_with_a_dynamic_batch(name, padded, near_far, arguments, predictions):
    model, inputs = near_far(name, num_hidden_layers=1), arguments(name, padded)
    shared = {"positions"} if name == "signal" else set()
    dynamic = {key: {} if key in shared else {0: torch.export.Dim("batch", min=2, max=64)} for key in inputs}
    program = torch.export.export(model, (), inputs, dynamic_shapes=dynamic, strict=False)
    other = arguments(name, padded, batch=5, seed=9)
    if padded:
        other["attention_mask"][2, [1, 2, 7]] = 0
    with torch.no_grad():
        assert_same(program.module()(**other), model(**other), predictions)


def test_graph_of_plain_operations(near_far, arguments, predictions):
    name = "point-cloud"
    model, other = near_far(name, num_hidden_layers=1), arguments(name, batch=5, seed=9)
    program = export_graph(model, arguments(name))
    assert not [node for node in program.graph.nodes if "pair_sum" in str(node.target)]
    with torch.no_grad():
        assert_same(program.module()(**other), model(**other), predictions)


@pytest.mark.parametrize("name", ["image-classification", "point-cloud", "signal"])
def test_lora(name, tmp_path, near_far, arguments, predictions):
    model, inputs = near_far(name), arguments(name)
    base, before = copy.deepcopy(model), model(**inputs)
    adapted = get_peft_model(model, lora_config(model, r=2, init_lora_weights=False))
    after = adapted.eval()(**inputs)
    assert not any(torch.allclose(after[key], value) for key, value in predictions(before).items())
    adapted.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(base, tmp_path).eval()
    assert_same(again(**inputs), after, predictions)
    assert_same(again.merge_and_unload()(**inputs), after, predictions)


@pytest.mark.parametrize("name", ["image", "signal"])
def test_code_goes_with_models_that_run_it(name, tmp_path, make_model):
    """tests/hub/test_remote_code.py runs it."""
    files = {}
    for mode in ("exact", "low_rank", "near_far"):
        model = make_model(name, **NEAR_FAR | {"integration_mode": mode})
        model.save_pretrained(tmp_path / mode, with_code=True)
        files[mode] = {path.stem for path in (tmp_path / mode).glob("*.py")}
    own = {
        "modeling_itnet_integration_near",
        *(f"itnet_kernels_near_{name}" for name in ("balls", "blocks", "windows")),
        "itnet_kernels_sampled_list_sum",
        *(f"itnet_kernels_sampled_triton_{name}" for name in ("backward", "bias", "forward", "lists", "sums")),
    }
    assert own <= files["near_far"] - files["low_rank"] - files["exact"]
    assert files["exact"] | files["low_rank"] | own == files["near_far"]
