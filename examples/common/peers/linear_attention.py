"""A causal language model with linear attention (Katharopoulos et al. 2020, https://arxiv.org/abs/2006.16236)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config
from transformers.modeling_outputs import CausalLMOutput


def linear_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Returns Σ_(j≤i) φ(q_i)·φ(k_j) v_j / Σ_(j≤i) φ(q_i)·φ(k_j) with φ = elu + 1, of [B, H, n, d_h] each.

    All n² products are formed, which is faster than the state of d_h² + d_h numbers where n is about d_h.
    """
    scores = (F.elu(query) + 1) @ (F.elu(key) + 1).transpose(-2, -1)  # [B, H, n, n]
    scores = scores.tril()
    return (scores / scores.sum(-1, keepdim=True).clamp_min(1e-6)) @ value


class LinearAttentionLayer(nn.Module):
    """Linear attention and a feed-forward network, both pre-norm with a residual: [B, n, d] -> [B, n, d]."""

    def __init__(self, config: GPT2Config):
        super().__init__()
        size, self.num_heads = config.n_embd, config.n_head
        self.norm, self.feed_forward_norm = nn.LayerNorm(size), nn.LayerNorm(size)
        self.projection, self.output = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.feed_forward = nn.Sequential(nn.Linear(size, config.n_inner), nn.GELU(), nn.Linear(config.n_inner, size))

    def forward(self, features: Tensor) -> Tensor:
        heads = self.projection(self.norm(features)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.transpose(1, 3).unbind(2)  # [B, H, n, d_h] each
        features = features + self.output(linear_attention(query, key, value).transpose(1, 2).flatten(2))
        return features + self.feed_forward(self.feed_forward_norm(features))


class LinearAttentionLM(nn.Module):
    """GPT-2 with linear attention in place of softmax attention, in the sizes of a GPT2Config."""

    def __init__(self, config: GPT2Config):
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.n_embd)
        self.positions = nn.Embedding(config.n_positions, config.n_embd)
        self.layers = nn.ModuleList(LinearAttentionLayer(config) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(config.n_embd)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=config.initializer_range)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> CausalLMOutput:
        """Turns input_ids, labels [B, n] into logits [B, n, V]; label i is predicted from the tokens before it."""
        features = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        for layer in self.layers:
            features = layer(features)
        logits = F.linear(self.norm(features), self.tokens.weight)
        loss = None if labels is None else F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)
