# SPDX-License-Identifier: Apache-2.0
"""Theorem 2: attention is an integral with a kernel of u(x) and u(y), normalised over y (App. proof_attn).

It covers nn.MultiheadAttention, linear attention, and the attention modules of Transformers: BERT, ViT, Llama and
Mistral.
"""

import inspect
import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import elu, linear, pad

from itnet_kernels import low_rank_matrix_transform, prefix_sum

from .convert import Conversion, register
from .kernel import Kernel, Pairs
from .operator import IntegralOperator


class AttentionKernel(Kernel):
    r"""q(x) . k(y) / sqrt(c) + bias(x, y), one scalar per head: the logarithm of Eq. attn_kernel, before Z(x).

    The first coordinate of a point is its index. Three terms of position can be added:

    - ``slopes`` [H] (ALiBi): - slope |x - y|
    - ``window``: - infinity where |x - y| > window
    - ``rotary``: q . R(x - y) k, the rotation of RoPE. The further coordinates of a point are then cos and sin of its
      angles, which makes R(x)^T R(y) a product of features of either point: [index, cos (c), sin (c)].

    ``context`` of a call is a bias table [B or 1, H or 1, n_q, n_k], such as a mask.
    """

    def __init__(self, scale: float, heads: int, *, slopes: Tensor | None = None, window=None, rotary: bool = False):
        super().__init__()
        self.scale, self.window, self.rotary = scale, window, rotary
        self.entries_per_pair = heads
        self.register_buffer("slopes", slopes, persistent=False)

    def prepare(self, u_x, u_y, x, y, context):
        queries, keys = (_rotate(u_x, x), _rotate(u_y, y)) if self.rotary else (u_x, u_y)
        return queries * self.scale, keys, context

    def forward(self, pairs: Pairs) -> Tensor:
        queries, keys, bias = pairs.prepared
        logits = torch.einsum("bihc,bjhc->bijh", queries[:, pairs.rows], keys[:, pairs.columns])
        if bias is not None:
            logits = logits + bias[:, :, pairs.rows, pairs.columns].permute(0, 2, 3, 1)
        if self.slopes is not None or self.window is not None:
            distance = (pairs.x[:, :, None, 0] - pairs.y[:, None, :, 0]).abs().unsqueeze(-1)  # [B or 1, t_q, t_k, 1]
            if self.slopes is not None:
                logits = logits - distance * self.slopes
            if self.window is not None:
                logits = logits.masked_fill(distance > self.window, -math.inf)
        return logits

    def vanishes(self, x: Tensor, y: Tensor) -> bool:
        if self.window is None:
            return False
        apart = torch.maximum(y[..., 0].amin() - x[..., 0].amax(), x[..., 0].amin() - y[..., 0].amax())
        return bool(apart > self.window)


class AttentionOperator(Conversion):
    """The base of the attention modules, which project, integrate with a normalised kernel and recombine the heads.

    W_Q u and W_K u are what the kernel depends on; W_V u is what it is integrated against, because the matrix
    alpha(x, y) W_V of Theorem 2 is applied as alpha(x, y) (W_V u(y)).
    """

    num_outputs = 2  # and attention weights, which an integral has no use for

    def attend(self, queries, keys, values, bias, *, is_causal=False, measure=None, points=(None, None)) -> Tensor:
        """Turns heads [B, n_q, H, c], [B, n_k, H, c], [B, n_k, H, c'] into outputs [B, n_q, H * c']."""
        operator = IntegralOperator(self.kernel, normalization="softmax", is_causal=is_causal, measure="counting")
        x, y = points
        features = {"queries": queries, "query_positions": x, "values": values, "context": bias}
        return operator(keys, y, measure=measure, **features).flatten(2)


@register(nn.MultiheadAttention)
class MultiheadAttentionOperator(AttentionOperator):
    """Computes nn.MultiheadAttention as an integral, and returns its output, without the weights.

    Args:
        module: the attention module.
        alibi: add - slope_h |x - y| with the slopes of ALiBi.
        window: attend only to keys at most this far.
        rotary_base: rotate queries and keys as RoPE does, with this base.
    """

    def __init__(self, module, *, alibi: bool = False, window: int | None = None, rotary_base: float | None = None):
        super().__init__(module)
        if (alibi or window is not None or rotary_base) and (module.bias_k is not None or module.add_zero_attn):
            raise ValueError("`add_bias_kv` and `add_zero_attn` add keys that have no position to measure from")
        slopes = alibi_slopes(module.num_heads).to(module.out_proj.weight) if alibi else None
        self.rotary_base = rotary_base
        self.kernel = AttentionKernel(
            module.head_dim**-0.5, module.num_heads, slopes=slopes, window=window, rotary=rotary_base is not None
        )

    def dropout(self) -> float:
        return self.module.dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> Tensor:
        module = self.module
        self.check_dropout()
        if is_causal and attn_mask is None:
            raise ValueError("`is_causal` is a hint: nn.MultiheadAttention needs `attn_mask` with it")
        queries, keys, values = (
            linear(self.with_batch_first(signal), weight, bias)
            for signal, weight, bias in zip((query, key, value), *self._projections(), strict=True)
        )
        if key_padding_mask is not None and key_padding_mask.dim() == 1:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        keys, values, attn_mask, key_padding_mask = self._extra_keys(keys, values, attn_mask, key_padding_mask)
        if is_causal and key_padding_mask is None and not need_weights:
            _check_causal(attn_mask)
        measure, bias = self._masks(attn_mask, key_padding_mask, queries)
        heads = [t.unflatten(2, (module.num_heads, -1)) for t in (queries, keys, values)]
        points = None, None
        if self.rotary_base is not None:
            points = [_points(*_rotary_tables(t.shape[1], module.head_dim, self.rotary_base, t)) for t in heads[:2]]
        out = self.attend(*heads, bias, measure=measure, points=points)
        out = linear(out, module.out_proj.weight, module.out_proj.bias)  # which torch does not call either
        return self.as_given(out, query)

    def _projections(self) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
        """Returns the weights and biases of queries, keys and values."""
        module = self.module
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        weights = weights if module.in_proj_weight is None else module.in_proj_weight.chunk(3)
        return weights, (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)

    def _extra_keys(self, keys, values, *masks):
        """Adds the points of `add_bias_kv` and `add_zero_attn` to the domain. Masks do not cover them."""
        module = self.module
        extra = [(module.bias_k, module.bias_v)] if module.bias_k is not None else []
        if module.add_zero_attn:
            extra.append((keys.new_zeros(1, 1, keys.shape[2]), values.new_zeros(1, 1, values.shape[2])))
        for key, value in extra:
            keys = torch.cat([keys, key.expand(len(keys), -1, -1)], 1)
            values = torch.cat([values, value.expand(len(values), -1, -1)], 1)
            masks = [mask if mask is None else pad(mask, (0, 1)) for mask in masks]
        return keys, values, *masks

    def _masks(self, attn_mask, key_padding_mask, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Splits masks: padding is measure 0 [B, n_k]; a mask of pairs, or a padding mask of numbers, is a bias."""
        measure = bias = None
        if attn_mask is not None:
            bias = _additive(attn_mask, like)
            bias = bias[None, None] if bias.dim() == 2 else bias.unflatten(0, (-1, self.module.num_heads))
        if key_padding_mask is not None:
            if key_padding_mask.dtype == torch.bool:
                measure = (~key_padding_mask).to(like.dtype)
            else:
                padding = key_padding_mask.to(like.dtype)[:, None, None, :]
                bias = padding.expand(-1, -1, like.shape[1], -1) if bias is None else bias + padding
        return measure, bias


class LinearAttention(nn.Module):
    """sum_y phi(q) . phi(k) v / sum_y phi(q) . phi(k) with phi = elu + 1, in O(n): the sums over y are taken first.

    Katharopoulos et al., 2020: "Transformers are RNNs". u [B, n, d] -> [B, n, d].
    """

    def __init__(self, embed_dim: int, num_heads: int, is_causal: bool = False):
        super().__init__()
        if embed_dim % num_heads:
            raise ValueError(f"`embed_dim` ({embed_dim}) must be a multiple of `num_heads` ({num_heads})")
        self.num_heads, self.is_causal = num_heads, is_causal
        self.query, self.key, self.value, self.output = (nn.Linear(embed_dim, embed_dim) for _ in range(4))

    def heads(self, u: Tensor) -> list[Tensor]:
        """Returns queries, keys and values: [B, n, H, c] each."""
        return [f(u).unflatten(2, (self.num_heads, -1)) for f in (self.query, self.key, self.value)]

    def forward(self, u: Tensor) -> Tensor:
        queries, keys, values = self.heads(u)
        queries, keys = elu(queries) + 1, elu(keys) + 1
        outer = keys.unsqueeze(-1) * values.unsqueeze(-2)  # [B, n, H, c, c]
        if self.is_causal:
            outer, keys = prefix_sum(outer), prefix_sum(keys)
        else:
            outer, keys = outer.sum(1, keepdim=True), keys.sum(1, keepdim=True)
        out = (queries.unsqueeze(-2) @ outer).squeeze(-2) / (queries * keys).sum(-1, keepdim=True)
        return self.output(out.flatten(2))


@register(LinearAttention)
class LinearAttentionOperator(Conversion):
    """Computes linear attention as the low-rank kernel sum_r phi(q(x))[r] phi(k(y))[r] W_V (Prop. linear_attn).

    W_V u is what is integrated, so that the kernel's matrices are identities; a constant beside it integrates to Z(x).
    It takes O(n).
    """

    def forward(self, u: Tensor) -> Tensor:
        queries, keys, values = self.module.heads(u)
        values = pad(values, (0, 1), value=1)  # [B, n, H, c + 1]
        matrices = torch.eye(values.shape[3], dtype=u.dtype, device=u.device).expand(*keys.shape[2:], -1, -1)
        factors = elu(queries) + 1, elu(keys) + 1
        out = low_rank_matrix_transform(values, *factors, matrices, is_causal=self.module.is_causal)
        return self.module.output((out[..., :-1] / out[..., -1:]).flatten(2))


class TransformersAttentionOperator(AttentionOperator):
    """Computes self-attention of Transformers, called as the module is: hidden_states [B, n, d] -> [B, n, d].

    The ``attention_mask`` [B, 1, n, n] is what the model passes to the module: numbers that are added, or booleans,
    True for allowed pairs. Keys and values may be shared by several heads; Mistral's window is in its mask.

    Args:
        module: the attention module.
        projections: names of its projections of queries, keys and values, and of the output if that is in the module.
        rotary: whether ``position_embeddings`` are the cosines and sines of RoPE.
    """

    def __init__(self, module, *, projections: tuple[str, ...], rotary: bool = False):
        super().__init__(module)
        self.projections = projections
        self.kernel = AttentionKernel(module.scaling, module.config.num_attention_heads, rotary=rotary)

    def dropout(self) -> float:
        rate = getattr(self.module, "attention_dropout", None)  # a number, or an nn.Dropout
        rate = getattr(self.module, "dropout", 0.0) if rate is None else rate
        return getattr(rate, "p", rate)

    def forward(self, *args, **kwargs) -> Tensor:
        self.check_dropout()
        module = self.module
        given = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
        given = given | given.get("kwargs", {})
        if given.get("past_key_values") is not None:
            raise ValueError(
                "`past_key_values` cannot be used: the keys are those of this call; pass `use_cache=False`"
            )
        heads = module.config.num_attention_heads
        size = getattr(module, "head_dim", None) or module.attention_head_size
        queries, keys, values = (
            getattr(module, name)(given["hidden_states"]).unflatten(2, (-1, size)) for name in self.projections[:3]
        )
        keys, values = (t.repeat_interleave(heads // t.shape[2], dim=2) for t in (keys, values))
        mask = given.get("attention_mask")
        if mask is not None:
            mask = _additive(~mask if mask.dtype == torch.bool else mask, queries)
        points = (_points(*given["position_embeddings"]),) * 2 if self.kernel.rotary else (None, None)
        out = self.attend(queries, keys, values, mask, is_causal=mask is None and self._is_causal(), points=points)
        for name in self.projections[3:]:
            out = getattr(module, name)(out)
        return out

    def _is_causal(self) -> bool:
        """Says whether the call is causal; without a mask, by the module's own flag, unless attention is eager."""
        eager = self.module.config._attn_implementation == "eager"
        return bool(getattr(self.module, "is_causal", False)) and not eager


# In newer releases of Transformers, the output projection of a ViT is in its attention module.
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
for _name, _options in {
    "bert.modeling_bert.BertSelfAttention": {"projections": ("query", "key", "value")},
    "vit.modeling_vit.ViTSelfAttention": {"projections": ("query", "key", "value")},
    "vit.modeling_vit.ViTAttention": {"projections": _PROJECTIONS},
    "llama.modeling_llama.LlamaAttention": {"projections": _PROJECTIONS, "rotary": True},
    "mistral.modeling_mistral.MistralAttention": {"projections": _PROJECTIONS, "rotary": True},
}.items():
    register(f"transformers.models.{_name}")(partial(TransformersAttentionOperator, **_options))


def alibi_slopes(heads: int) -> Tensor:
    """Returns 2^(-8 h / H) for h = 1..H; between powers of two, those of the power below and every other one of the
    next."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    slopes += [2 ** (-4 * h / power) for h in range(1, 2 * (heads - power) + 1, 2)]
    return torch.tensor(slopes, dtype=torch.float64)


def _rotary_tables(count: int, size: int, base: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines of RoPE's angles at the points 0..n-1: [n, c] each."""
    index, order = (torch.arange(n, device=like.device, dtype=torch.float64) for n in (count, size // 2))
    angles = (index[:, None] * base ** (-2 * order / size)).repeat(1, 2)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def _points(cos: Tensor, sin: Tensor) -> Tensor:
    """Makes points as a rotary `AttentionKernel` wants them, from tables [..., n, c]: [..., n, 1 + 2c]."""
    index = torch.arange(cos.shape[-2], device=cos.device, dtype=cos.dtype).unsqueeze(-1).expand_as(cos[..., :1])
    return torch.cat([index, cos, sin], -1)


def _rotate(heads: Tensor, points: Tensor) -> Tensor:
    """Applies R(x) to [B, n, H, c]: the two halves of the features are the axes of c/2 planes."""
    cos, sin = points[..., 1:].unsqueeze(2).chunk(2, dim=-1)  # [B or 1, n, 1, c]
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat([-second, first], -1) * sin


def _check_causal(mask: Tensor) -> None:
    """Raises if the mask [..., n_q, n_k] is not the causal one that `is_causal` says it is.

    nn.MultiheadAttention then takes the hint for the mask, or the mask for the hint, depending on its own settings.
    """
    future = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).triu(1)
    if not torch.equal(_additive(mask, torch.zeros(())), _additive(future, torch.zeros(())).expand(mask.shape)):
        raise ValueError(
            f"`is_causal` is True, but `attn_mask` {list(mask.shape)}, over all keys, is not the causal mask, -inf or "
            "True where the key comes after the query: nn.MultiheadAttention would ignore one of the two. Pass "
            "`is_causal=False` to have the mask as it is"
        )


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    """Returns a mask as numbers to add: -inf for the pairs where a boolean mask is True, which are not allowed."""
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -math.inf)
