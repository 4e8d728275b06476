"""Whole models of Transformers give the same logits when all their mixers are swapped for ITNet operators."""

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertLMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.models.bert.modeling_bert import BertSelfAttention
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.mamba.modeling_mamba import MambaMixer
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.vit import modeling_vit

from modeling_itnet.special_cases import IntegralOperator, SelectiveScanKernel, from_module, swap_modules

ViTSelfAttention = getattr(modeling_vit, "ViTAttention", None) or modeling_vit.ViTSelfAttention
SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
IDS = torch.randint(1, 90, (3, 11), generator=torch.Generator().manual_seed(0))
MASK = (torch.arange(11) < torch.tensor([[11], [6], [3]])).long()


def bert(is_decoder, implementation):
    config = BertConfig(vocab_size=100, is_decoder=is_decoder, attn_implementation=implementation, **SIZES)
    return (BertLMHeadModel if is_decoder else BertForSequenceClassification)(config)


def vit(implementation):
    config = ViTConfig(image_size=32, patch_size=8, num_labels=5, attn_implementation=implementation, **SIZES)
    return ViTForImageClassification(config)


def llama(implementation):
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=100, num_key_value_heads=2, attn_implementation=implementation, **SIZES)
    )


def mistral(implementation):
    config = MistralConfig(
        vocab_size=100, num_key_value_heads=2, sliding_window=3, attn_implementation=implementation, **SIZES
    )
    return MistralForCausalLM(config)


def mamba(implementation):
    return MambaForCausalLM(MambaConfig(vocab_size=100, hidden_size=16, num_hidden_layers=3, state_size=4))


TEXT = {"input_ids": IDS}
PADDED = {"input_ids": IDS, "attention_mask": MASK}
CASES = {
    "bert": (lambda i: bert(False, i), BertSelfAttention, [TEXT, PADDED]),
    "bert-causal": (lambda i: bert(True, i), BertSelfAttention, [TEXT, PADDED]),
    "vit": (vit, ViTSelfAttention, [{"pixel_values": torch.ones(2, 3, 32, 32).cumsum(2).sin()}]),
    "llama-rope": (llama, LlamaAttention, [TEXT, PADDED]),
    "mistral-window": (mistral, MistralAttention, [TEXT, PADDED]),
    "mamba": (mamba, MambaMixer, [TEXT, PADDED]),
}


def forbidden(*args, **kwargs):
    raise AssertionError("the model called a module that was replaced")


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("case", CASES)
def test_swapped_models_give_the_same_logits(case, implementation):
    make, module_class, inputs = CASES[case]
    torch.set_default_dtype(torch.float32)  # what the models are used in; the fixture restores it
    torch.manual_seed(0)
    model = make(implementation).eval()
    options = {} if case in ("bert", "vit") else {"use_cache": False}
    with torch.no_grad():
        expected = [model(**kwargs, **options).logits for kwargs in inputs]
        assert swap_modules(model, module_class) == 3
        for module in model.modules():
            if isinstance(module, module_class):  # kept for its weights
                module.forward = forbidden
        actual = [model(**kwargs, **options).logits for kwargs in inputs]
    for kwargs, got, want in zip(inputs, actual, expected, strict=True):
        real = kwargs.get("attention_mask", torch.ones(1)).bool()
        if got.dim() == 3 and "attention_mask" in kwargs:  # what is computed at padding is nobody's business
            got, want = got[real], want[real]
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["bert", "vit"])
def test_self_attention_alone(name, padded, compare):
    """In float64, with gradients, called as the module is."""
    if name == "bert":
        module = BertSelfAttention(BertConfig(attn_implementation="eager", **SIZES))
    else:
        module = ViTSelfAttention(ViTConfig(attn_implementation="sdpa", **SIZES))  # the eager one is float32 inside
    mask = torch.zeros(2, 1, 1, 9)
    mask[1, ..., 5:] = torch.finfo(torch.float64).min
    mask = mask.expand(2, 1, 9, 9) if padded else None
    compare(module.double(), lambda m, u: m(u, mask), [torch.randn(2, 9, 32)])


def test_llama_attention_alone(compare):
    config = LlamaConfig(num_key_value_heads=2, attn_implementation="sdpa", **SIZES)
    angles = torch.rand(1, 9, 4).repeat(2, 1, 2)
    tables = angles.cos(), angles.sin()
    compare(LlamaAttention(config, 0).double(), lambda m, u: m(u, tables, None), [torch.randn(2, 9, 32)])


@pytest.mark.parametrize("seed", range(6))
def test_mamba_mixer(seed, draw, compare):
    config = MambaConfig(
        hidden_size=draw.choice([4, 8]),
        state_size=draw.randint(1, 4),
        conv_kernel=draw.randint(1, 4),
        use_conv_bias=draw.random() < 0.5,
        use_bias=draw.random() < 0.5,
        num_hidden_layers=1,
        vocab_size=8,
    )
    module = MambaMixer(config, 0).double()
    for parameter in module.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    length = draw.randint(1, 40)
    mask = (torch.arange(length) < torch.tensor([[length], [1 + length // 2]])).long() if draw.random() < 0.5 else None
    compare(module, lambda m, u: m(u, attention_mask=mask), [torch.randn(2, length, config.hidden_size)])


def test_selective_scan_over_long_times():
    """The sum S of the time steps grows to 6,000, where float32 has steps of 5e-4: differences need more."""
    torch.manual_seed(0)
    length, channels, states = 2000, 2, 3
    a, step = -0.1 * torch.rand(channels, states), 2 + 2 * torch.rand(1, length, channels)
    b, c, u = torch.randn(1, length, states), torch.randn(1, length, states), torch.randn(1, length, channels)
    state, expected = torch.zeros(channels, states), []
    for t in range(length):
        decay = (step[0, t, :, None] * a).exp()
        state = decay * state + (step[0, t] * u[0, t])[:, None] * b[0, t]
        expected.append(state @ c[0, t])
    operator = IntegralOperator(SelectiveScanKernel(channels, states), is_causal=True, measure="counting")
    context = tuple(t.float() for t in (a, step, b, c))
    actual = operator(u.float(), torch.arange(length).unsqueeze(1), context=context)
    expected = torch.stack(expected).unsqueeze(0)
    # Half a dozen roundings in each of the terms, of which about 1 / (0.1 * 3) count.
    assert (actual - expected).norm() < 10 * torch.finfo(torch.float32).eps * expected.norm()


def test_errors():
    bert_attention = BertSelfAttention(BertConfig(**SIZES))  # dropout of 0.1
    with pytest.raises(ValueError, match=r"BertSelfAttention is in training mode with a dropout of 0.1"):
        from_module(bert_attention)
    with pytest.raises(ValueError, match="`past_key_values`"):
        from_module(bert_attention.eval())(torch.randn(1, 3, 32), past_key_values=object())
    mixer = MambaMixer(MambaConfig(hidden_size=4, num_hidden_layers=1), 0)
    with pytest.raises(ValueError, match="`cache_params`"):
        from_module(mixer)(torch.randn(1, 3, 4), cache_params=object())
