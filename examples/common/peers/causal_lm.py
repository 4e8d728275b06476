"""Causal language models to compare with, each with as many parameters as an ITNet.

Heads, vocabulary and length are those of the ITNet, and so are the layers, but Mamba has twice as many: its blocks
mix and transform in one. Each peer keeps the proportions that it is known with; the width is what makes its number of
parameters the nearest, and then, where there is one, the feed-forward width. Initial values are its own.
"""

from collections.abc import Callable

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MambaConfig, PreTrainedConfig

from modeling_itnet import ITNetConfig, ITNetForCausalLM

from .linear_attention import LinearAttentionLM
from .mamba_scan import ScannedMamba
from .short_convolution import ConvolvedGPT2, ConvolvedLlama

#: (ITNetConfig, width, feed-forward width) -> the configuration of a peer.
MakeConfig = Callable[[ITNetConfig, int, int], PreTrainedConfig]


def _tokens(config: ITNetConfig) -> dict:
    names = ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")
    return {name: getattr(config, name) for name in names} | {"tie_word_embeddings": True}


def gpt2_sizes(config: ITNetConfig, width: int, inner: int) -> GPT2Config:
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.hidden_dropout_prob)
    return GPT2Config(
        n_embd=width,
        n_inner=inner,
        n_layer=config.num_hidden_layers,
        n_head=config.num_attention_heads,
        n_positions=config.max_position_embeddings,
        **dropout,
        **_tokens(config),
    )


def llama_sizes(config: ITNetConfig, width: int, inner: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        max_position_embeddings=config.max_position_embeddings,
        attention_dropout=config.hidden_dropout_prob,
        **_tokens(config),
    )


def mamba_sizes(config: ITNetConfig, width: int, inner: int) -> MambaConfig:
    """Returns the configuration of a Mamba. ``inner`` is not used: it is always twice the width."""
    return MambaConfig(hidden_size=width, num_hidden_layers=2 * config.num_hidden_layers, **_tokens(config))


def count_parameters(model_class: type[nn.Module], config: PreTrainedConfig) -> int:
    """Counts those of a model that is never made: on the meta device tensors have sizes only. Tied ones count once."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in model_class(config).parameters())


def nearest_size(count: Callable[[int], int], target: int, step: int) -> int:
    """Returns the positive multiple of ``step`` at which ``count``, which grows, is nearest to ``target``."""
    low, high = 0, 1  # in steps; count(low) < target <= count(high)
    while count(high * step) < target:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count(middle * step) < target else (low, middle)
    candidates = [size * step for size in (low, high) if size]
    return min(candidates, key=lambda size: abs(count(size) - target))


def matched(model_class: type[nn.Module], make: MakeConfig, ratio: float) -> Callable[[ITNetConfig], PreTrainedConfig]:
    """Returns a function from an ITNetConfig to the configuration of a peer with as many parameters.

    ``ratio`` is the feed-forward width over the width; the former is then fitted too, unless the ratio is 0.
    """

    def config_of(config: ITNetConfig) -> PreTrainedConfig:
        target = count_parameters(ITNetForCausalLM, config)
        step = 2 * config.num_attention_heads if ratio else 2  # rotary positions need even heads
        width = nearest_size(
            lambda width: count_parameters(model_class, make(config, width, round(ratio * width))), target, step
        )
        if not ratio:
            return make(config, width, 0)
        inner = nearest_size(lambda inner: count_parameters(model_class, make(config, width, inner)), target, 8)
        return make(config, width, inner)

    return config_of


#: Name -> class, and the function that makes its configuration of that of an ITNet. 8/3 is what Llama's gated
#: feed-forward network has in place of 4.
CAUSAL_PEERS: dict[str, tuple[type[nn.Module], Callable[[ITNetConfig], PreTrainedConfig]]] = {
    "gpt2": (GPT2LMHeadModel, matched(GPT2LMHeadModel, gpt2_sizes, 4)),
    "gpt2_conv": (ConvolvedGPT2, matched(ConvolvedGPT2, gpt2_sizes, 4)),
    "llama": (LlamaForCausalLM, matched(LlamaForCausalLM, llama_sizes, 8 / 3)),
    "llama_conv": (ConvolvedLlama, matched(ConvolvedLlama, llama_sizes, 8 / 3)),
    "mamba": (ScannedMamba, matched(ScannedMamba, mamba_sizes, 0)),
    "linear_attention": (LinearAttentionLM, matched(LinearAttentionLM, gpt2_sizes, 4)),
}


def causal_peer(name: str, **own) -> Callable[[ITNetConfig], nn.Module]:
    """Returns a function from an ITNetConfig to a peer of its size. ``own`` are other settings of its own."""
    model_class, config_of = CAUSAL_PEERS[name]

    def build(config: ITNetConfig) -> nn.Module:
        peer_config = config_of(config)
        for setting, value in own.items():
            setattr(peer_config, setting, value)
        return model_class(peer_config)

    return build


def same_size_itnet(config: ITNetConfig, reference: ITNetConfig) -> ITNetConfig:
    """Returns the configuration with the feed-forward width that makes it as large as another ITNet."""

    def wider(inner: int) -> ITNetConfig:
        return ITNetConfig.from_dict({**config.to_dict(), "intermediate_size": inner})

    target = count_parameters(ITNetForCausalLM, reference)
    return wider(nearest_size(lambda inner: count_parameters(ITNetForCausalLM, wider(inner)), target, 8))
