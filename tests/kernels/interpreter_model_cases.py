"""Models in every mode whose sums run in Triton's interpreter, against the same models in PyTorch. Run by
test_triton_modes.py."""

import pytest
import torch

from modeling_itnet import ITNetConfig, ITNetForCausalLM, ITNetModel

SMALL = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8}
SMALL |= {"kernel_hidden_size": 16, "num_fourier_features": 2, "factor_hidden_size": 4, "rank": 2, "near_size": 3}
TEXT = {"modality": "text", "vocab_size": 11, "max_position_embeddings": 8}
MODES = {
    "near_far": {"integration_mode": "near_far"},
    "near_far-matrix": {"integration_mode": "near_far", "factor_form": "matrix", "factor_decay": True},
    "low_rank": {"integration_mode": "low_rank", "factor_decay": True},
}


def in_both(make, compute):
    """What ``compute(model)`` returns for one model with each of the two backends."""
    model = make().eval()
    results = []
    for backend in ("triton", "tiled"):
        for module in model.modules():
            if hasattr(module, "config"):
                module.config.backend = backend
        model.zero_grad()
        results.append(compute(model))
    return results


def with_gradients(model, **inputs) -> dict:
    torch.manual_seed(0)  # of Monte Carlo samples
    out = model(**inputs).last_hidden_state
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"out": out.detach(), **found}


def assert_same(actual: dict, expected: dict) -> None:
    assert actual.keys() == expected.keys()
    floor = 1e-4 * float(expected["out"].norm())
    for name, value in expected.items():
        assert float((actual[name] - value).norm()) <= 1e-4 * float(value.norm()) + floor, name


@pytest.mark.parametrize("mode", MODES)
def test_text(mode):
    """Left and right of padding, every parameter's gradient."""
    config = ITNetConfig(**SMALL, **TEXT, **MODES[mode], is_causal=MODES[mode].get("factor_decay", False))
    tokens = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    results = in_both(lambda: ITNetModel(config), lambda m: with_gradients(m, input_ids=tokens, attention_mask=mask))
    assert_same(*results)


def test_monte_carlo():
    """Samples of training, edges of graphs are lists as these are."""
    config = ITNetConfig(**SMALL, modality="signal", position_dim=2, integration_mode="monte_carlo", num_samples=3)
    features, positions = torch.randn(1, 5, 32), torch.rand(5, 2)

    def compute(model):
        return with_gradients(model.train(), inputs_embeds=features, positions=positions)

    assert_same(*in_both(lambda: ITNetModel(config), compute))


@pytest.mark.parametrize("mode", MODES)
def test_generation(mode):
    """A cache that grows by one token at a time: the logits of every step."""
    config = ITNetConfig(**SMALL, **TEXT, **MODES[mode], is_causal=True)

    @torch.no_grad()
    def compute(model):
        found = model(input_ids=torch.tensor([[1, 2]]), use_cache=True)
        logits = [found.logits]
        for token in (3, 4, 5):
            found = model(input_ids=torch.tensor([[token]]), past_key_values=found.past_key_values, use_cache=True)
            logits.append(found.logits)
        return torch.cat(logits, dim=1)

    torch.testing.assert_close(*in_both(lambda: ITNetForCausalLM(config), compute), rtol=1e-4, atol=1e-5)
