"""PEFT's other methods: train a little, merge, and compute the same without PEFT."""

import peft
import pytest
import torch
from peft import TaskType, get_peft_model

CONFIGS = {
    "ia3": lambda: peft.IA3Config(target_modules="all-linear", feedforward_modules=[], task_type=TaskType.SEQ_CLS),
    "loha": lambda: peft.LoHaConfig(r=2, target_modules="all-linear", task_type=TaskType.SEQ_CLS),
    "lokr": lambda: peft.LoKrConfig(r=2, target_modules="all-linear", task_type=TaskType.SEQ_CLS),
    "oft": lambda: peft.OFTConfig(oft_block_size=4, target_modules="all-linear", task_type=TaskType.SEQ_CLS),
    "boft": lambda: peft.BOFTConfig(boft_block_size=4, target_modules="all-linear", task_type=TaskType.SEQ_CLS),
    "vera": lambda: peft.VeraConfig(r=4, target_modules=["expand"], task_type=TaskType.SEQ_CLS),
    "hra": lambda: peft.HRAConfig(r=2, target_modules="all-linear", task_type=TaskType.SEQ_CLS),
    "fourierft": lambda: peft.FourierFTConfig(n_frequency=9, target_modules="all-linear", task_type=TaskType.SEQ_CLS),
    "lora": lambda: peft.LoraConfig(r=2, target_modules="all-linear", task_type=TaskType.SEQ_CLS),
}


@pytest.mark.parametrize("method", CONFIGS)
def test_merge(method, make_model, make_inputs, make_labels):
    torch.manual_seed(0)
    name, sizes = "sequence-classification", {"intermediate_size": 32, "num_fourier_features": 4}  # multiples of 4
    inputs, labels = make_inputs(name), make_labels(name)
    model = get_peft_model(make_model(name, **sizes), CONFIGS[method]())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in range(2):
        optimizer.zero_grad()
        model(**inputs, **labels).loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        before, expected = make_model(name, **sizes)(**inputs).logits, model(**inputs).logits
        merged = model.merge_and_unload()
        actual = merged(**inputs).logits
    assert not torch.allclose(expected, before, rtol=1e-3)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert [key for key in merged.state_dict() if "classifier" in key] == ["classifier.weight", "classifier.bias"]
