"""Tiny configurations, models and inputs for the tests of this folder."""

import pytest
import torch
from transformers.utils import logging

from modeling_itnet import (
    ITNetConfig,
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
