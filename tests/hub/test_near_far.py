"""Near and far fields in every head: training, compiled and exported graphs, adapters, code that goes along."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import save_file

from modeling_itnet.hub.onnx_export import export_graph
from modeling_itnet.training.lora import lora_config

NEAR_FAR = {"integration_mode": "near_far", "rank": 3, "near_size": 9, "near_radius": 0.8, "factor_form": "matrix"}
ISOLATED = Path(__file__).with_name("isolated.py")
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
# Of a batch: the tensors whose entries a mask can hide.
PADDED = ["masked-lm", "visual-question-answering", "point-cloud", "signal"]


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
        losses.append(float(loss))
    assert losses[1] < losses[0]
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), key


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", ["image-classification", *PADDED, "graph"])
def test_compiles_to_one_graph(name, padded, near_far, arguments, make_labels, predictions):
    """Windows are found while tracing; balls are a table of all pairs there, with the same result."""
    if padded and name not in PADDED:
        pytest.skip("nothing to hide")
    model, given = near_far(name, num_hidden_layers=1), arguments(name, padded) | make_labels(name, length=20)
    expected = model(**given)
    expected.loss.backward()
    gradients = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
    model.zero_grad()
    torch._dynamo.reset()
    output = torch.compile(model, fullgraph=True, backend="aot_eager")(**given)
    assert_same(output, expected, predictions)
    output.loss.backward()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[key], rtol=1e-3, atol=1e-5, msg=key)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", ["image-classification", *PADDED])
def test_exports_with_a_dynamic_batch(name, padded, near_far, arguments, predictions):
    if padded and name not in PADDED:
        pytest.skip("nothing to hide")
    model, inputs = near_far(name, num_hidden_layers=1), arguments(name, padded)
    shared = {"positions"} if name == "signal" else set()
    dynamic = {key: {} if key in shared else {0: torch.export.Dim("batch", min=2, max=64)} for key in inputs}
    program = torch.export.export(model, (), inputs, dynamic_shapes=dynamic, strict=False)
    other = arguments(name, padded, batch=5, seed=9)
    if padded:
        other["attention_mask"][2, [1, 2, 7]] = 0
    with torch.no_grad():
        assert_same(program.module()(**other), model(**other), predictions)


@pytest.mark.parametrize("name", ["image-classification", "masked-lm", "point-cloud"])
def test_graph_of_plain_operations(name, near_far, arguments, predictions):
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


class TestCode:
    def test_in_isolation(self, tmp_path, cases, near_far, arguments, predictions):
        """`python -I`, our packages and SciPy not importable: the same outputs."""
        requests = {}
        for name in ("image-classification", "masked-lm", "point-cloud", "graph", "signal"):
            model, inputs, folder = near_far(name), arguments(name, name == "masked-lm"), tmp_path / name
            model.save_pretrained(folder, with_code=True)
            with torch.no_grad():
                outputs = predictions(model(**inputs))
            files = {"inputs": inputs, "outputs": outputs}
            for key, tensors in files.items():
                save_file({k: v.contiguous() for k, v in tensors.items()}, tmp_path / f"{name}-{key}.safetensors")
            requests[name] = {key: str(tmp_path / f"{name}-{key}.safetensors") for key in files}
            requests[name] |= {"auto_class": cases[name].auto_class, "folder": str(folder)}
        settings = {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
        result = subprocess.run(
            [sys.executable, "-I", str(ISOLATED)],
            input=json.dumps(requests),
            capture_output=True,
            text=True,
            env=os.environ | settings,
        )
        assert result.returncode == 0, result.stderr[-4000:]
        report = json.loads(result.stdout.splitlines()[-1])
        assert report.pop("blocked") == []
        assert report.keys() == requests.keys()
        for name, found in report.items():
            assert found["equal"] and all(found["equal"].values()), (name, found)

    @pytest.mark.parametrize("name", ["image", "signal"])
    def test_goes_with_models_that_run_it(self, tmp_path, make_model, name):
        files = {}
        for mode in ("exact", "low_rank", "near_far"):
            model = make_model(name, **NEAR_FAR | {"integration_mode": mode})
            model.save_pretrained(tmp_path / mode, with_code=True)
            files[mode] = {path.stem for path in (tmp_path / mode).glob("*.py")}
        own = {"modeling_itnet_integration_near", "itnet_kernels_near_balls"}
        assert files["near_far"] - files["low_rank"] == own
        assert files["exact"] < files["low_rank"] < files["near_far"]
