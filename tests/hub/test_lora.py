"""PEFT LoRA: trains what it says, and save, reload, merge and unload agree."""

import pytest
import torch
from peft import AutoPeftModel, PeftModel, get_peft_model

from modeling_itnet.training.lora import LORA_TARGET_MODULES, lora_config

HEADS = [
    "image-classification",
    "causal-lm",
    "sequence-classification",
    "point-cloud",
    "question-answering",
    "signal",
]


def trained(model, inputs, labels, steps=3):
    """A few steps of SGD on everything that requires a gradient."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        model(**inputs, **labels).loss.backward()
        optimizer.step()
    return model.eval()


def outputs(model, inputs, predictions):
    with torch.no_grad():
        return predictions(model(**inputs))


def assert_close(actual, expected, **tolerance):
    for key, value in expected.items():
        torch.testing.assert_close(actual[key], value, **tolerance)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("mode", ["exact", "low_rank"])
def test_save_reload_merge(name, mode, tmp_path, make_model, make_inputs, make_labels, predictions):
    overrides = {"integration_mode": mode, "rank": 3}
    base, inputs, labels = make_model(name, **overrides), make_inputs(name), make_labels(name)
    before = outputs(base, inputs, predictions)
    model = get_peft_model(base, lora_config(base, r=2))
    assert_close(outputs(model, inputs, predictions), before)  # LoRA starts at zero
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    model = trained(model, inputs, labels)
    after = outputs(model, inputs, predictions)
    assert not any(torch.allclose(after[key], value) for key, value in before.items())
    assert all(torch.equal(p, frozen[n]) for n, p in model.named_parameters() if n in frozen)

    model.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").stat().st_size < 120_000
    again = PeftModel.from_pretrained(make_model(name, **overrides), tmp_path).eval()
    assert_close(outputs(again, inputs, predictions), after, rtol=1e-4, atol=1e-5)
    assert_close(outputs(model.merge_and_unload(), inputs, predictions), after, rtol=1e-4, atol=1e-5)


def test_an_adapted_model_generates(make_model, make_inputs, make_labels):
    """With a cache as without one, and merged as adapted."""
    base, inputs = make_model("causal-lm", integration_mode="near_far", near_size=3, rank=2), make_inputs("causal-lm")
    model = trained(get_peft_model(base, lora_config(base, r=2)), inputs, make_labels("causal-lm"))
    settings = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(inputs["input_ids"])}
    expected = model.generate(**inputs, **settings, use_cache=False)
    assert expected.shape == (3, 13)
    assert torch.equal(model.generate(**inputs, **settings), expected)
    assert torch.equal(model.merge_and_unload().generate(**inputs, **settings), expected)


def test_transformers_own_adapter_interface(tmp_path, make_model, make_inputs, make_labels, predictions):
    base, inputs = make_model("image-classification"), make_inputs("image-classification")
    model = trained(get_peft_model(base, lora_config(base)), inputs, make_labels("image-classification"))
    model.save_pretrained(tmp_path)
    plain = make_model("image-classification")
    plain.load_adapter(str(tmp_path))
    assert_close(outputs(plain, inputs, predictions), outputs(model, inputs, predictions))


def test_adapter_finds_its_base(tmp_path, make_model, make_inputs, make_labels, predictions):
    """Trained on a folder, the adapter names it, and loads it."""
    make_model("image").save_pretrained(tmp_path / "base")
    base = type(make_model("image")).from_pretrained(tmp_path / "base")
    get_peft_model(base, lora_config(base, init_lora_weights=False)).save_pretrained(tmp_path / "adapter")
    again = AutoPeftModel.from_pretrained(tmp_path / "adapter", import_allowlist=["modeling_itnet"]).eval()
    inputs = make_inputs("image")
    assert not torch.allclose(again(**inputs)[0], make_model("image")(**inputs)[0])


def test_what_is_adapted(make_model):
    model = make_model("image-classification", output_gate=True)
    config = lora_config(model)
    assert config.modules_to_save == ["classifier"] and config.target_parameters == ["kernel.w2"]
    assert lora_config(make_model("image", integration_mode="low_rank", rank=3)).target_parameters is None
    assert lora_config(model, adapt_kernels=False).target_parameters is None
    adapted = get_peft_model(model, config)
    names = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    layers = model.config.num_hidden_layers
    for target in LORA_TARGET_MODULES:
        assert sum(f"{target}.lora_" in name for name in names) == 2 * layers, target
    assert sum("kernel" in name and "lora_" in name for name in names) == 2 * layers
    assert not [name for name in names if "lora_" not in name and "classifier" not in name]
