"""Tiny configurations, models and inputs for the tests of this folder."""

import pytest
import torch
from transformers.utils import logging

from modeling_itnet import (
    ITNetCache,
    ITNetConfig,
    ITNetForCausalLM,
    ITNetForImageClassification,
    ITNetForMaskedLM,
    ITNetForSequenceClassification,
    ITNetModel,
)

VOCABULARY = 40
# id -> (class, modality): the bare model on every modality, and every head.
MODELS = {
    "image": (ITNetModel, "image"),
    "text": (ITNetModel, "text"),
    "signal": (ITNetModel, "signal"),
    "image-classification": (ITNetForImageClassification, "image"),
    "masked-lm": (ITNetForMaskedLM, "text"),
    "sequence-classification": (ITNetForSequenceClassification, "text"),
}
# Every way in which a causal model integrates; short windows and few anchors, so that texts of 12 tokens reach beyond.
LOW_RANK, NEAR_FAR = {"integration_mode": "low_rank", "rank": 2}, {"integration_mode": "near_far", "near_size": 3}
MATRIX = {"rank": 2, "factor_form": "matrix"}
CAUSAL_MODES = {
    "exact": {"integration_mode": "exact"},
    "near_far, vector": {**NEAR_FAR, "rank": 2},
    "near_far, matrix": {**NEAR_FAR, **MATRIX},
    "near_far, decay": {**NEAR_FAR, **MATRIX, "factor_decay": True, "output_gate": True},
    "low_rank, vector": LOW_RANK,
    "low_rank, matrix": {**LOW_RANK, **MATRIX},
    "low_rank, decay": {**LOW_RANK, "factor_decay": True},
    "monte_carlo": {"integration_mode": "monte_carlo", "num_samples": 3},
    "auto, near_far": {**NEAR_FAR, **MATRIX, "integration_mode": "auto", "approximate_mode": "near_far"},
}


@pytest.fixture(scope="session", autouse=True)
def no_progress_bars():
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny_config(tiny_sizes):
    """tiny_config(modality, **overrides): two narrow layers, no dropout, a kernel that matters from the start."""

    def make(modality="image", **overrides):
        values = {**tiny_sizes, "modality": modality, **overrides}
        if modality == "signal":
            values.setdefault("position_dim", 2)
        return ITNetConfig(**values)

    return make


@pytest.fixture(scope="session")
def shake():
    """shake(module): moves every parameter off its initial value, so that no 0, 1 or identity hides a mistake."""

    def move(module, scale=0.3, seed=1):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter += scale * torch.randn(parameter.shape, generator=generator)
        return module

    return move


@pytest.fixture(scope="session")
def tiny_model(tiny_config, shake):
    """tiny_model(name, **overrides): a shaken model of MODELS in evaluation mode."""

    def make(name, scale=0.3, **overrides):
        model_class, modality = MODELS[name]
        torch.manual_seed(0)
        return shake(model_class(tiny_config(modality, **overrides)), scale).eval()

    return make


@pytest.fixture(scope="session")
def tiny_inputs(tiny_sizes):
    """tiny_inputs(name, batch): forward arguments for a model of MODELS, without labels."""

    def make(name, batch=3, length=7, seed=2):
        generator = torch.Generator().manual_seed(seed)
        modality = MODELS[name][1]
        if modality == "image":
            return {"pixel_values": torch.randn(batch, 3, 16, 16, generator=generator)}
        if modality == "text":
            return {"input_ids": torch.randint(1, VOCABULARY, (batch, length), generator=generator)}
        return {
            "inputs_embeds": torch.randn(batch, length, tiny_sizes["hidden_size"], generator=generator),
            "positions": torch.rand(batch, length, 2, generator=generator),
        }

    return make


@pytest.fixture(scope="session")
def tiny_labels(tiny_sizes):
    """tiny_labels(name, batch): integer targets for a head of MODELS; the masked LM is asked two of three tokens."""

    def make(name, batch=3, length=7, seed=3):
        generator = torch.Generator().manual_seed(seed)
        if name != "masked-lm":
            return torch.arange(batch) % tiny_sizes["num_labels"]
        labels = torch.randint(1, VOCABULARY, (batch, length), generator=generator)
        return labels.where(torch.arange(batch * length).view(batch, length) % 3 > 0, -100)

    return make


@pytest.fixture(scope="session")
def low_rank_kernels():
    """low_rank_kernels(factors, heads, domain, queries, query_domain): every K_ij [B, m, n, H, d_h, d_h] of an
    ITNetFactors, from its parameters themselves."""

    def kernels(factors, heads, domain, queries, query_domain):

        def outputs(factor, heads, domain):
            gamma = domain.gamma(heads.dtype).unsqueeze(2).expand(*heads.shape[:3], -1)
            hidden = torch.nn.functional.gelu(torch.cat([gamma, heads], -1) @ factor.w1.T + factor.b1)
            return torch.einsum("bnhk,h...k->bnh...", hidden, factor.w2) + factor.b2

        phi, psi = outputs(factors.phi, queries, query_domain), outputs(factors.psi, heads, domain)
        decay = torch.ones(())
        if factors.log_decay is not None:
            x, y = query_domain.positions[..., 0], domain.positions[..., 0]
            spans = (x.unsqueeze(2) - y.unsqueeze(1)).clamp(min=0)[..., None, None]
            decay = torch.exp(-factors.log_decay.exp() * spans)  # [B, m, n, H, r]
        if factors.is_matrix:
            terms = torch.einsum("bihr,bjhr,hrac->bijhrac", phi, psi, factors.matrices)
        else:
            terms = torch.einsum("bihra,bjhrc->bijhrac", phi, psi)
        return (decay[..., None, None] * terms).sum(-3) + factors.bias

    return kernels


@pytest.fixture(scope="session", params=CAUSAL_MODES)
def causal_mode(request):
    """The name of one of CAUSAL_MODES: a test that asks for it runs in each."""
    return request.param


@pytest.fixture(scope="session", params=["exact", "near_far, decay", "low_rank, vector", "monte_carlo"])
def cache_mode(request):
    """One mode of every kind of cache, for what the form of the factors has no part in."""
    return request.param


@pytest.fixture(scope="session")
def causal_model(tiny_config, shake):
    """causal_model(mode, model_class, dtype): a shaken causal model of texts at evaluation; "auto" approximates."""

    def make(mode, model_class=ITNetForCausalLM, dtype=torch.float64, seed=1, **overrides):
        torch.manual_seed(0)
        settings = {"is_causal": True, "max_position_embeddings": 64, "exact_max_positions": 8, "pad_token_id": 0}
        config = tiny_config("text", **{**settings, **CAUSAL_MODES[mode], **overrides})
        return shake(model_class(config), 0.3, seed).to(dtype).eval()

    return make


@pytest.fixture(scope="session")
def texts():
    """texts(batch, length): token ids."""

    def make(batch=2, length=20, seed=4):
        return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))

    return make


@pytest.fixture(scope="session")
def new_cache():
    """new_cache(model, spare): a cache that forgets early, so that short texts show what it does then."""
    return lambda model, spare=3: ITNetCache(model.config, spare=spare)


@pytest.fixture(scope="session")
def read():
    """read(model, ids, sizes, cache, mask): the logits of all tokens, read in pieces of these sizes, the last of them
    for all that remains. The mask [B, n] is that of the tokens in the cache and of these."""

    @torch.no_grad()
    def run(model, ids, sizes, cache, mask=None):
        logits, start, before = [], 0, cache.get_seq_length()
        for size in [*sizes, ids.shape[1]]:
            piece = ids[:, start : start + size]
            if piece.shape[1] == 0:
                break
            start += piece.shape[1]
            given = {} if mask is None else {"attention_mask": mask[:, : before + start]}
            logits.append(model(piece, past_key_values=cache, **given).logits)
        return torch.cat(logits, dim=1)

    return run


@pytest.fixture(scope="session")
def full():
    """full(model, ids, mask): the logits of all tokens in one call, without a cache."""

    @torch.no_grad()
    def run(model, ids, mask=None):
        return model(ids, attention_mask=mask, use_cache=False).logits

    return run


@pytest.fixture(scope="session")
def assert_near():
    """assert_near(actual, expected, tolerance): equal to a part of the largest value, or of 1."""

    def check(actual, expected, tolerance=1e-10):
        size = max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * size)

    return check
