"""One step of decoding with explicit state: token by token it is the model, in every mode."""

import pytest
import torch

from modeling_itnet import ITNetConfig, ITNetForCausalLM
from modeling_itnet.generation.step import DecodingStep

LOW_RANK, NEAR = (
    {"integration_mode": "low_rank", "rank": 3},
    {"integration_mode": "near_far", "near_size": 4, "rank": 3},
)
MODES = {
    "exact": {"integration_mode": "exact"},
    "monte-carlo": {"integration_mode": "monte_carlo", "num_samples": 3},
    "auto": {"integration_mode": "auto", "exact_max_positions": 4, "num_samples": 2},  # Monte Carlo, too
    "near-vector": NEAR,
    "near-matrix-decay": NEAR | {"factor_form": "matrix", "factor_decay": True},
    "near-of-one": NEAR | {"near_size": 1},
    "vector": LOW_RANK,
    "vector-decay": LOW_RANK | {"factor_decay": True},
    "matrix": LOW_RANK | {"factor_form": "matrix"},
    "matrix-decay": LOW_RANK | {"factor_form": "matrix", "factor_decay": True},
}
LENGTH = 11


@pytest.fixture
def make_model(tiny_sizes):
    def make(dtype=torch.float32, **overrides):
        model = ITNetForCausalLM(ITNetConfig(**{**tiny_sizes, "modality": "text", "is_causal": True, **overrides}))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.3 * torch.randn_like(parameter)
        return model.to(dtype).eval()

    return make


@pytest.fixture
def texts():
    """Two texts of unlike lengths; the second has padding before its first token, and after its third."""
    ids = torch.randint(1, 40, (2, LENGTH))
    numbers = torch.arange(LENGTH)
    return ids, torch.stack([numbers, torch.tensor([-1, -1, 0, 1, 2, -1, 3, 4, 5, 6, 7])])


def decode(step, ids, positions, state):
    logits = []
    for k in range(ids.shape[1]):
        last, *state = step(ids[:, k : k + 1], positions[:, k], *state)
        logits.append(last)
    return torch.stack(logits, 1), state


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-10)], ids=["f32", "f64"])
@pytest.mark.parametrize("name", MODES)
@torch.no_grad()
def test_token_by_token_is_the_whole(name, dtype, tolerance, make_model, texts):
    model, (ids, positions) = make_model(dtype, **MODES[name]), texts
    real = positions >= 0
    expected = model(ids, attention_mask=real.long()).logits
    step = DecodingStep(model)
    first = step.initial_state(2)
    actual, last = decode(step, ids, positions, first)
    torch.testing.assert_close(actual[real], expected[real], rtol=tolerance, atol=tolerance)
    assert [(t.shape, t.dtype) for t in last] == [(t.shape, t.dtype) for t in first]
    assert len(first) == len(step.state_names)
    for count in (2, 8):  # a prompt that the model has read at once; in a batch, one text may have no token yet
        cache = model(ids[:, :count], attention_mask=real[:, :count].long(), use_cache=True).past_key_values
        actual, _ = decode(step, ids[:, count:], positions[:, count:], step.state_after(cache))
        left = real[:, count:]
        torch.testing.assert_close(actual[left], expected[:, count:][left], rtol=tolerance, atol=tolerance)


@torch.no_grad()
def test_the_state_has_a_fixed_size(make_model):
    """Whatever the text's length, and in an exact model as many tokens as it is told."""
    model = make_model(**MODES["near-matrix-decay"])
    step = DecodingStep(model)
    shapes = dict(zip(step.state_names, (list(t.shape) for t in step.initial_state(3)), strict=True))
    assert shapes["positions"] == [3, 3, 1] and shapes["measure"] == [3, 3]
    assert shapes["layers.1.features"] == [3, 3, 2, 8] and shapes["layers.1.moments"] == [3, 2, 3, 8]
    assert shapes["layers.0.mean"] == [3, 2, 8] and shapes["layers.0.mass"] == shapes["layers.0.position"] == [3]
    model = make_model(integration_mode="exact", num_hidden_layers=1)
    ids = torch.randint(1, 40, (1, LENGTH))
    actual, _ = decode(step := DecodingStep(model, 4), ids, torch.arange(LENGTH)[None], step.initial_state())
    for k in range(LENGTH):  # of a longer text, the last four tokens at their own places
        seen = slice(max(k - 3, 0), k + 1)
        expected = model(ids[:, seen], position_ids=torch.arange(LENGTH)[None, seen]).logits[:, -1]
        torch.testing.assert_close(actual[:, k], expected, rtol=1e-5, atol=1e-5)


def test_mistakes(make_model):
    with pytest.raises(ValueError, match=r"`capacity` \(8\) must be 2 or more, and is for exact and Monte Carlo"):
        DecodingStep(make_model(**LOW_RANK), capacity=8)
    model = make_model(**LOW_RANK)
    cache = model(torch.randint(1, 40, (1, 9))).past_key_values
    cache.crop(-2)
    with pytest.raises(ValueError, match="none may have been taken back"):
        DecodingStep(model).state_after(cache)
    other = make_model(**LOW_RANK | {"rank": 2})
    with pytest.raises(ValueError, match="`rank` 3, but this one has 2"):
        DecodingStep(other).state_after(cache)
