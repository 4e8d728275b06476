"""torch.export with a batch of any size, graphs of plain operations, ONNX, and torch.compile of every head."""

import logging
import sys

import pytest
import torch

from modeling_itnet.hub.onnx_export import _output_names, export_graph, export_onnx

MODES = {
    "exact": {"integration_mode": "exact"},
    "near_far": {"integration_mode": "near_far", "near_size": 9, "rank": 3, "patch_size": 4},
    "low_rank": {"integration_mode": "low_rank", "rank": 3},
}
NEAR = {"integration_mode": "near_far", "rank": 3}


def assert_same(actual, expected, predictions):
    for key, value in predictions(expected).items():
        torch.testing.assert_close(actual[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["image-classification", "causal-lm", "masked-lm", "visual-question-answering", "point-cloud"]
)
def test_export_with_a_dynamic_batch(name, make_model, make_inputs, predictions):
    model = make_model(name, num_hidden_layers=1)
    inputs, other = make_inputs(name), make_inputs(name, batch=5, seed=9)
    dynamic = {key: {0: torch.export.Dim("batch", min=2, max=64)} for key in inputs}
    program = torch.export.export(model, (), inputs, dynamic_shapes=dynamic, strict=False)
    with torch.no_grad():
        assert_same(program.module()(**other), model(**other), predictions)


def test_export_of_graphs_has_a_fixed_batch(make_model, make_inputs, predictions):
    model, inputs = make_model("graph", num_hidden_layers=1), make_inputs("graph")
    program = torch.export.export(model, (), inputs, strict=False)
    assert_same(program.module()(**inputs), model(**inputs), predictions)


@pytest.mark.parametrize(
    "name, overrides",
    [
        ("image-classification", {}),
        ("masked-lm", {"is_causal": True, "kernel_num_layers": 3, "kernel_output_sharing": "shared"}),
        ("signal", {"kernel_inputs": ["y", "distance", "u_y"], "num_fourier_features": 0}),
        ("image-classification", NEAR | {"near_size": 9, "patch_size": 4}),
        ("masked-lm", NEAR | {"near_size": 3}),
        ("masked-lm", NEAR | {"near_size": 2, "is_causal": True, "kernel_num_layers": 3, "factor_form": "matrix"}),
        ("point-cloud", NEAR | {"near_radius": 0.5}),
        ("signal", NEAR | {"near_radius": 0.4, "kernel_input_sharing": "per_head"}),
        ("point-cloud", {"kernel_directions": True}),
    ],
    ids=[
        *("image", "causal-three-layers", "other-queries"),
        *("near-image", "near-text", "near-causal", "near-points", "near-queries", "directions"),
    ],
)
def test_graph_of_plain_operations(name, overrides, make_model, make_inputs, predictions):
    model, other = make_model(name, num_hidden_layers=1, **overrides), make_inputs(name, batch=5, seed=9)
    program = export_graph(model, make_inputs(name))
    assert not [node for node in program.graph.nodes if "pair_sum" in str(node.target)]
    with torch.no_grad():
        assert_same(program.module()(**other), model(**other), predictions)


@pytest.mark.parametrize("mode", MODES)
def test_onnx(mode, tmp_path, make_model, make_inputs, capfd, caplog, recwarn):
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    model, name = make_model("image-classification", **MODES[mode]), "image-classification"
    path = export_onnx(model, make_inputs(name), tmp_path / "model.onnx")
    assert capfd.readouterr() == ("", "") and not recwarn.list
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    other = make_inputs(name, batch=5, seed=9)
    session = runtime.InferenceSession(path)
    shapes = {value.name: value.shape for value in [*session.get_inputs(), *session.get_outputs()]}
    assert shapes == {"pixel_values": ["batch", 3, 16, 16], "logits": ["batch", 3]}
    (logits,) = session.run(None, {"pixel_values": other["pixel_values"].numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(logits), model(**other).logits, rtol=1e-4, atol=1e-5)


def test_onnx_output_names(make_model, make_inputs):
    """All that a model returns by itself, in its order; several tensors in one field are numbered."""
    graph = export_graph(make_model("question-answering", num_hidden_layers=1), make_inputs("question-answering"))
    assert _output_names(graph) == ["start_logits", "end_logits"]
    graph = export_graph(make_model("image", num_hidden_layers=1, output_hidden_states=True), make_inputs("image"))
    assert _output_names(graph) == ["last_hidden_state", "pooler_output", "hidden_states.0", "hidden_states.1"]


def test_missing_onnx_names_the_extra(tmp_path, make_model, make_inputs, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match=r"pip install onnx onnxscript"):
        export_onnx(make_model("image"), make_inputs("image"), tmp_path / "model.onnx")


@pytest.mark.parametrize("name", ["visual-question-answering", "point-cloud", "graph"])
def test_compile_in_one_graph(name, make_model, make_inputs, make_labels, predictions):
    """The image classifier is in tests/kernels/test_compiled_model.py."""
    model, inputs, labels = make_model(name, num_hidden_layers=1), make_inputs(name), make_labels(name)
    expected = model(**inputs, **labels)
    expected.loss.backward()
    gradients = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
    model.zero_grad()
    torch._dynamo.reset()
    output = torch.compile(model, fullgraph=True, backend="aot_eager")(**inputs, **labels)
    assert_same(output, expected, predictions)
    output.loss.backward()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[key], rtol=1e-3, atol=1e-5, msg=key)
