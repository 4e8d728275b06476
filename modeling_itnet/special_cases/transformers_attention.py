# SPDX-License-Identifier: Apache-2.0
"""Theorem 2 for the attention modules of Transformers: BERT, ViT, Llama and Mistral (RoPE)."""

import math

import torch
from torch import Tensor

from .attention import AttentionKernel, AttentionOperator
from .convert import register

_MODELS = "transformers.models"


class TransformersAttentionOperator(AttentionOperator):
    """Self-attention of Transformers: hidden_states [B, n, d], attention_mask [B, 1, n, n_k] -> [B, n, d].

    The mask is what the model passes to the module: numbers that are added, or booleans, True for allowed pairs.
    """

    projections = ("query", "key", "value")
    output: str | None = None
    rotary = False

    def __init__(self, module):
        super().__init__(module)
        self.kernel = AttentionKernel(module.scaling, module.config.num_attention_heads, rotary=self.rotary)

    def dropout(self) -> float:
        rate = getattr(self.module, "attention_dropout", None)  # a number, or an nn.Dropout
        rate = getattr(self.module, "dropout", 0.0) if rate is None else rate
        return getattr(rate, "p", rate)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values=None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs,
    ) -> Tensor:
        self.check_dropout()
        if past_key_values is not None:
            raise ValueError("`past_key_values`: the integral is over the keys of this call; pass `use_cache=False`")
        module = self.module
        heads = module.config.num_attention_heads
        size = getattr(module, "head_dim", None) or module.attention_head_size
        queries, keys, values = (
            getattr(module, name)(hidden_states).unflatten(2, (-1, size)) for name in self.projections
        )
        keys, values = (t.repeat_interleave(heads // t.shape[2], dim=2) for t in (keys, values))
        out = self.attend(
            self.kernel,
            queries,
            keys,
            values,
            bias=_bias(attention_mask, queries),
            is_causal=attention_mask is None and self._is_causal(),
            coordinates=None if position_embeddings is None else _coordinates(*position_embeddings),
        ).flatten(2)
        return out if self.output is None else getattr(module, self.output)(out)

    def _is_causal(self) -> bool:
        """Without a mask, all implementations of attention but the eager one go by the module's own flag."""
        eager = self.module.config._attn_implementation == "eager"
        return bool(getattr(self.module, "is_causal", False)) and not eager


@register(f"{_MODELS}.bert.modeling_bert.BertSelfAttention")
@register(f"{_MODELS}.vit.modeling_vit.ViTSelfAttention")
class BertSelfAttentionOperator(TransformersAttentionOperator):
    """Projections `query`, `key`, `value`; the output projection is in another module."""


@register(f"{_MODELS}.vit.modeling_vit.ViTAttention")
class ViTAttentionOperator(TransformersAttentionOperator):
    """The same in newer releases of Transformers, with the output projection."""

    projections = ("q_proj", "k_proj", "v_proj")
    output = "o_proj"


@register(f"{_MODELS}.llama.modeling_llama.LlamaAttention")
@register(f"{_MODELS}.mistral.modeling_mistral.MistralAttention")
class LlamaAttentionOperator(ViTAttentionOperator):
    """Causal attention with RoPE; keys and values may be shared by several heads. Mistral's window is in its mask."""

    rotary = True

    def forward(
        self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs
    ) -> Tensor:
        return super().forward(hidden_states, attention_mask, past_key_values, position_embeddings, **kwargs)


def _bias(mask: Tensor | None, like: Tensor) -> Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(~mask, -math.inf)


def _coordinates(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Points as `AttentionKernel` wants them, from the model's tables [B, n, c]: the same for queries and keys."""
    index = torch.arange(cos.shape[1], device=cos.device, dtype=cos.dtype)[None, :, None].expand(len(cos), -1, -1)
    points = torch.cat([index, cos, sin], -1)
    return points, points
