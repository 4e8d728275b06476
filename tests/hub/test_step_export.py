"""One step of decoding as a graph of plain operations and as an ONNX file, run token by token."""

import pytest
import torch

from modeling_itnet import ITNetConfig, ITNetForCausalLM
from modeling_itnet.generation.step import DecodingStep
from modeling_itnet.hub.onnx_export import export_decoding_step, export_decoding_step_onnx

DECAY = {"rank": 3, "factor_form": "matrix", "factor_decay": True}
MODES = {
    "exact": {"integration_mode": "exact"},
    "monte_carlo": {"integration_mode": "monte_carlo", "num_samples": 3},
    "near_far": {"integration_mode": "near_far", "near_size": 3, **DECAY},
    "low_rank": {"integration_mode": "low_rank", "rank": 3},
    "low_rank-matrix": {"integration_mode": "low_rank", **DECAY},
}
LENGTH = 7


@pytest.fixture
def make_case(tiny_sizes):
    """make_case(mode, dtype): a model, the capacity of its step, and two texts with what the model makes of them."""

    def make(mode, dtype=torch.float32):
        sizes = {**tiny_sizes, "num_hidden_layers": 1, "modality": "text", "is_causal": True}
        model = ITNetForCausalLM(ITNetConfig(**{**sizes, **MODES[mode]}))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.3 * torch.randn_like(parameter)
        model = model.to(dtype).eval()
        ids = torch.randint(1, 40, (2, LENGTH))
        positions = torch.stack([torch.arange(LENGTH), torch.arange(LENGTH) - 2]).clamp(min=-1)
        with torch.no_grad():
            logits = model(ids, attention_mask=(positions >= 0).long()).logits
        return model, LENGTH if mode in ("exact", "monte_carlo") else None, ids, positions, logits

    return make


@pytest.mark.parametrize(
    "mode, dtype, tolerance",
    [
        *((mode, torch.float32, 1e-5) for mode in MODES),
        pytest.param("near_far", torch.float64, 1e-10, marks=pytest.mark.slow),
    ],
    ids=[*MODES, "near_far-float64"],
)
def test_graph(mode, dtype, tolerance, make_case):
    model, capacity, ids, positions, expected = make_case(mode, dtype)
    program = export_decoding_step(model, capacity)
    assert not [node for node in program.graph.nodes if "pair_sum" in str(node.target)]
    run, state, logits = program.module(), DecodingStep(model, capacity).initial_state(2), []
    for k in range(LENGTH):
        last, *state = run(ids[:, k : k + 1], positions[:, k], *state)
        logits.append(last)
    real = positions >= 0
    torch.testing.assert_close(torch.stack(logits, 1)[real], expected[real], rtol=tolerance, atol=tolerance)
    step = DecodingStep(model, capacity)
    inputs = torch.tensor([[5]] * 3), torch.zeros(3, dtype=torch.long), *step.initial_state(3)
    with torch.no_grad():  # the number of texts is free
        torch.testing.assert_close(run(*inputs)[0], step(*inputs)[0], rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["exact", "near_far", "monte_carlo"])
def test_onnx(mode, make_case, tmp_path):
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    model, capacity, ids, positions, expected = make_case(mode)
    step = DecodingStep(model, capacity)
    session = runtime.InferenceSession(export_decoding_step_onnx(model, tmp_path / "step.onnx", capacity))
    names = [value.name for value in session.get_inputs()]
    assert names == ["input_ids", "position", *step.state_names]
    assert [value.name for value in session.get_outputs()] == ["logits", *(f"new_{n}" for n in step.state_names)]
    assert all(value.shape[0] == "batch" for value in session.get_inputs())
    state, logits = [tensor.numpy() for tensor in step.initial_state(len(ids))], []
    for k in range(LENGTH):
        inputs = [ids[:, k : k + 1].numpy(), positions[:, k].numpy(), *state]
        last, *state = session.run(None, dict(zip(names, inputs, strict=True)))
        logits.append(torch.from_numpy(last))
    real = positions >= 0
    torch.testing.assert_close(torch.stack(logits, 1)[real], expected[real], rtol=1e-5, atol=1e-5)
    three = torch.tensor([[5], [6], [7]]), torch.zeros(3, dtype=torch.long), *step.initial_state(3)
    with torch.no_grad():  # the number of texts is free
        expected = step(*three)[0]
    last = session.run(None, {name: tensor.numpy() for name, tensor in zip(names, three, strict=True)})[0]
    torch.testing.assert_close(torch.from_numpy(last), expected, rtol=1e-5, atol=1e-5)
