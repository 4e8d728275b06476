# SPDX-License-Identifier: Apache-2.0
"""Theorem 2: attention is an integral with a kernel of u(x) and u(y), normalised over y (App. proof_attn)."""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import elu, linear

from .convert import Conversion, register
from .kernel import Kernel, Pairs
from .modules import LinearAttention
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


class FeatureMapKernel(Kernel):
    """phi(q(x)) . phi(k(y)) with phi = elu + 1: linear attention, before its normalisation (Prop. linear_attn)."""

    def prepare(self, u_x, u_y, x, y, context):
        return elu(u_x) + 1, elu(u_y) + 1

    def forward(self, pairs: Pairs) -> Tensor:
        queries, keys = pairs.prepared
        return torch.einsum("bihc,bjhc->bijh", queries[:, pairs.rows], keys[:, pairs.columns])


class AttentionOperator(Conversion):
    """Base of the attention modules: projects, integrates with a normalised kernel, recombines the heads.

    W_Q u and W_K u are what the kernel depends on; W_V u is what it is integrated against, because the matrix
    alpha(x, y) W_V of Theorem 2 is applied as alpha(x, y) (W_V u(y)).
    """

    num_outputs = 2  # and attention weights, which an integral has no use for

    def attend(self, kernel, queries, keys, values, *, is_causal=False, measure=None, bias=None, coordinates=None):
        """Heads [B, n_q, H, c], [B, n_k, H, c], [B, n_k, H, c'] -> [B, n_q, H, c']."""
        if coordinates is None:
            x, y = (torch.arange(t.shape[1], device=t.device).unsqueeze(1) for t in (queries, keys))
        else:
            x, y = coordinates
        x = x + (y[..., -1:, :1] - x[..., -1:, :1] if is_causal and coordinates is None else 0)  # aligned at the end
        operator = IntegralOperator(kernel, normalization="softmax", is_causal=is_causal, measure="counting")
        return operator(keys, y, measure=measure, queries=queries, query_positions=x, values=values, context=bias)


@register(nn.MultiheadAttention)
class MultiheadAttentionOperator(AttentionOperator):
    """nn.MultiheadAttention as an integral; returns its output, without the weights.

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
        batched = query.dim() == 3
        inputs = [t if batched else t.unsqueeze(1) for t in (query, key, value)]
        if not (batched and module.batch_first):
            inputs = [t.transpose(0, 1) for t in inputs]  # [B, n, d]
        queries, keys, values = (
            linear(u, weight, bias) for u, (weight, bias) in zip(inputs, self._projections(), strict=True)
        )
        if key_padding_mask is not None and not batched:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        keys, values, attn_mask, key_padding_mask = self._extra_keys(keys, values, attn_mask, key_padding_mask)
        if is_causal and key_padding_mask is None and not need_weights:
            _check_causal(attn_mask)
        measure, bias = self._masks(attn_mask, key_padding_mask, queries)
        heads = [t.unflatten(2, (module.num_heads, -1)) for t in (queries, keys, values)]
        coordinates = None
        if self.rotary_base is not None:
            coordinates = [rotary_coordinates(t.shape[1], module.head_dim, self.rotary_base, t) for t in heads[:2]]
        out = self.attend(self.kernel, *heads, measure=measure, bias=bias, coordinates=coordinates)
        out = linear(out.flatten(2), module.out_proj.weight, module.out_proj.bias)  # which torch does not call either
        if not batched:
            return out.squeeze(0)
        return out if module.batch_first else out.transpose(0, 1)

    def _projections(self) -> list[tuple[Tensor, Tensor | None]]:
        """(weight, bias) of queries, keys and values."""
        module = self.module
        if module.in_proj_weight is not None:
            weights = module.in_proj_weight.chunk(3)
        else:
            weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
        return list(zip(weights, biases, strict=True))

    def _extra_keys(self, keys, values, attn_mask, key_padding_mask):
        """`add_bias_kv` and `add_zero_attn` add points to the domain; masks do not cover them."""
        module = self.module
        extra = [(module.bias_k, module.bias_v)] if module.bias_k is not None else []
        if module.add_zero_attn:
            extra.append((keys.new_zeros(1, 1, keys.shape[2]), values.new_zeros(1, 1, values.shape[2])))
        for key, value in extra:
            keys = torch.cat([keys, key.expand(len(keys), -1, -1)], 1)
            values = torch.cat([values, value.expand(len(values), -1, -1)], 1)
            if attn_mask is not None:
                attn_mask = nn.functional.pad(attn_mask, (0, 1))
            if key_padding_mask is not None:
                key_padding_mask = nn.functional.pad(key_padding_mask, (0, 1))
        return keys, values, attn_mask, key_padding_mask

    def _masks(self, attn_mask, key_padding_mask, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Padding is measure 0 [B, n_k]; a mask of pairs, or a padding mask of numbers, is a bias."""
        measure = bias = None
        if attn_mask is not None:
            bias = _additive(attn_mask, like)
            heads = self.module.num_heads
            bias = bias.view(1, 1, *bias.shape) if bias.dim() == 2 else bias.unflatten(0, (-1, heads))
        if key_padding_mask is not None:
            if key_padding_mask.dtype == torch.bool:
                measure = (~key_padding_mask).to(like.dtype)
            else:
                padding = key_padding_mask.to(like.dtype)[:, None, None, :]
                bias = padding.expand(-1, -1, like.shape[1], -1) if bias is None else bias + padding
        return measure, bias


@register(LinearAttention)
class LinearAttentionOperator(Conversion):
    """Linear attention as an integral over all pairs, which its own O(n) algorithm avoids."""

    def __init__(self, module: LinearAttention):
        super().__init__(module)
        self.integral = IntegralOperator(
            FeatureMapKernel(), normalization="sum", is_causal=module.is_causal, measure="counting"
        )
        self.integral.kernel.entries_per_pair = module.num_heads

    def forward(self, u: Tensor) -> Tensor:
        module = self.module
        projections = (module.query, module.key, module.value)
        queries, keys, values = (projection(u).unflatten(2, (module.num_heads, -1)) for projection in projections)
        index = torch.arange(u.shape[1], device=u.device).unsqueeze(1)
        return module.output(self.integral(keys, index, queries=queries, values=values).flatten(2))


def alibi_slopes(heads: int) -> Tensor:
    """2^(-8 h / H) for h = 1..H; between powers of two, those of the power below and every other one of the next."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    slopes += [2 ** (-4 * h / power) for h in range(1, 2 * (heads - power) + 1, 2)]
    return torch.tensor(slopes, dtype=torch.float64)


def rotary_coordinates(count: int, size: int, base: float, like: Tensor) -> Tensor:
    """Points 0..n-1 with the cosines and sines of RoPE's angles: [n, 1 + 2c]."""
    index = torch.arange(count, device=like.device, dtype=torch.float64)
    angles = index[:, None] * base ** (-torch.arange(0, size, 2, device=like.device, dtype=torch.float64) / size)
    angles = torch.cat([angles, angles], 1)
    return torch.cat([index[:, None], angles.cos(), angles.sin()], 1).to(like.dtype)


def _rotate(heads: Tensor, coordinates: Tensor) -> Tensor:
    """R(x) applied to [B, n, H, c]: the two halves of the features are the axes of c/2 planes."""
    cos, sin = coordinates[..., 1:].unsqueeze(2).chunk(2, dim=-1)  # [B or 1, n, 1, c]
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
    """True in a boolean mask of nn.MultiheadAttention means: not allowed."""
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -math.inf)
