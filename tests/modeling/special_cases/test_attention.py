"""Theorem 2 against nn.MultiheadAttention and against formulas written out."""

import pytest
import torch
from torch import nn
from torch.nn.functional import elu
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from itnet_kernels import low_rank_matrix_transform
from modeling_itnet.special_cases import LinearAttention, from_module
from modeling_itnet.special_cases.attention import alibi_slopes


def shaken(module):
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("seed", range(24))
def test_multihead_attention(seed, draw, compare):
    heads = draw.choice([1, 2, 3])
    size = heads * draw.choice([2, 4])
    cross = draw.random() < 0.5
    kdim, vdim = (draw.choice([None, 5]), draw.choice([None, 3])) if cross else (None, None)
    flags = [draw.random() < p for p in (0.7, 0.3, 0.3)]
    first = draw.random() < 0.5
    module = shaken(nn.MultiheadAttention(size, heads, 0.0, *flags, kdim, vdim, batch_first=first))
    batch, queries = draw.randint(1, 3), draw.randint(1, 9)
    keys = draw.randint(1, 9) if cross else queries
    padding = draw.choice([None, torch.rand(batch, keys) < 0.3, torch.randn(batch, keys)])
    mask = draw.choice(
        [None, torch.rand(queries, keys) < 0.3, torch.randn(queries, keys), torch.randn(batch * heads, queries, keys)]
    )
    for masks in (padding, mask):
        if masks is not None and masks.dtype == torch.bool:
            masks[..., 0] = False  # torch has no answer where everything is masked

    def call(m, q, k, v):
        q, k, v = (t if module.batch_first else t.transpose(0, 1) for t in (q, k, v))
        return m(q, k, v, key_padding_mask=padding, attn_mask=mask)

    signals = [torch.randn(batch, n, d or size) for n, d in ((queries, None), (keys, kdim), (keys, vdim))]
    compare(module, call, signals)


def test_self_attention_without_batch(compare):
    module = nn.MultiheadAttention(6, 2)
    padding = torch.tensor([False, False, True, False, True])
    compare(module, lambda m, u: m(u, u, u, key_padding_mask=padding), [torch.randn(5, 6)])


def test_more_keys_than_a_tile_holds(compare):
    module = nn.MultiheadAttention(8, 4, batch_first=True)
    compare(module, lambda m, u: m(u, u, u), [torch.randn(2, 600, 8)])


def test_alibi_is_a_bias_of_the_distance():
    module = shaken(nn.MultiheadAttention(12, 6, batch_first=True)).eval()
    u = torch.randn(2, 7, 12)
    index = torch.arange(7)
    slopes = build_alibi_tensor(torch.ones(1, 2), 6, torch.float64).view(6, 1, 2)[:, 0, 1]  # bias at key 1
    bias = -slopes[:, None, None] * (index[:, None] - index).abs()
    expected = module(u, u, u, attn_mask=bias.repeat(2, 1, 1))[0]
    torch.testing.assert_close(from_module(module, alibi=True)(u, u, u), expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("heads", [1, 2, 6, 8, 12])
def test_alibi_slopes(heads):
    expected = build_alibi_tensor(torch.ones(1, 2), heads, torch.float64).view(heads, 2)[:, 1]
    torch.testing.assert_close(alibi_slopes(heads), expected, rtol=1e-6, atol=0)  # float32 inside of Transformers


@pytest.mark.parametrize("window", [0, 2, 300])
def test_window(window):
    module = shaken(nn.MultiheadAttention(6, 2, batch_first=True)).eval()
    u = torch.randn(2, 600, 6)  # more than one tile, so that some are skipped
    index = torch.arange(600)
    mask = (index[:, None] - index).abs() > window
    expected = module(u, u, u, attn_mask=mask)[0]
    torch.testing.assert_close(from_module(module, window=window)(u, u, u), expected, rtol=0, atol=1e-10)


def test_rotary_positions_against_complex_numbers():
    module = shaken(nn.MultiheadAttention(16, 2, batch_first=True)).eval()
    u = torch.randn(2, 9, 16)
    weight_q, weight_k, weight_v = module.in_proj_weight.chunk(3)
    bias_q, bias_k, bias_v = module.in_proj_bias.chunk(3)

    def heads(weight, bias):
        return (u @ weight.T + bias).unflatten(2, (2, 8)).transpose(1, 2)  # [B, H, n, c]

    def rotated(t):
        angles = torch.arange(9)[:, None] * 10000.0 ** (-torch.arange(4) / 4)
        turned = torch.complex(t[..., :4], t[..., 4:]) * torch.polar(torch.ones(9, 4), angles)
        return torch.cat([turned.real, turned.imag], -1)

    logits = rotated(heads(weight_q, bias_q)) @ rotated(heads(weight_k, bias_k)).transpose(2, 3) / 8**0.5
    expected = (logits.softmax(-1) @ heads(weight_v, bias_v)).transpose(1, 2).flatten(2)
    expected = module.out_proj(expected)
    actual = from_module(module, rotary_base=10000.0)(u, u, u)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("is_causal", [False, True])
def test_linear_attention(is_causal, compare):
    compare(shaken(LinearAttention(12, 3, is_causal)), lambda m, u: m(u), [torch.randn(2, 40, 12)])


@pytest.mark.parametrize("is_causal", [False, True])
def test_linear_attention_is_a_low_rank_kernel(is_causal):
    """K_ij = sum_r phi(q_i)[r] phi(k_j)[r] W_V, over the same with a constant in place of W_V u."""
    module = shaken(LinearAttention(12, 3, is_causal))
    u = torch.randn(2, 40, 12)
    queries, keys, _ = module.heads(u)
    factors = elu(queries) + 1, elu(keys) + 1  # [B, n, H, 4]
    values = torch.cat([module.value.weight, module.value.bias.unsqueeze(1)], 1).view(3, 1, 4, 13).expand(3, 4, 4, 13)
    ones = torch.zeros(3, 4, 1, 13).index_fill(3, torch.tensor(12), 1)
    signal = torch.cat([u, torch.ones(2, 40, 1)], -1).unsqueeze(2).expand(-1, -1, 3, -1)  # [B, n, H, d + 1]
    above, below = (
        low_rank_matrix_transform(signal, *factors, matrices, is_causal=is_causal) for matrices in (values, ones)
    )
    actual = module.output((above / below).flatten(2))
    torch.testing.assert_close(actual, module(u), rtol=0, atol=1e-10)


def test_attention_is_permutation_equivariant():
    operator = from_module(shaken(nn.MultiheadAttention(6, 2, batch_first=True)).eval())
    u, order = torch.randn(1, 8, 6), torch.randperm(8)
    moved = u[:, order]
    torch.testing.assert_close(operator(moved, moved, moved), operator(u, u, u)[:, order])


@pytest.mark.parametrize("kind", ["bool", "float", "heads"])
def test_the_causal_hint(kind, compare):
    module = shaken(nn.MultiheadAttention(6, 2, batch_first=True))
    mask = torch.ones(5, 5).triu(1).bool()
    mask = {"bool": mask, "float": torch.zeros(5, 5).masked_fill(mask, -torch.inf), "heads": mask.expand(4, 5, 5)}[
        kind
    ]
    call = lambda m, u: m(u, u, u, attn_mask=mask, is_causal=True, need_weights=False)  # noqa: E731
    compare(module, call, [torch.randn(2, 5, 6)])


@pytest.mark.parametrize("options", [{}, {"add_zero_attn": True}])
def test_a_wrong_causal_hint_is_refused(options):
    """torch ignores the mask or the hint, depending on whether weights are asked for and on its fast path."""
    module = shaken(nn.MultiheadAttention(6, 2, batch_first=True, **options)).eval()
    operator, u = from_module(module), torch.randn(2, 5, 6)
    mask = torch.ones(5, 5).triu(1 if options else 2).bool()  # an added key is after every query
    masked = [module(u, u, u, attn_mask=mask, is_causal=True, need_weights=need)[0] for need in (False, True)]
    assert (masked[0] - masked[1]).norm() > 0.01 * masked[1].norm()
    with pytest.raises(ValueError, match=r"`attn_mask` \[5, .\], over all keys, is not the causal mask"):
        operator(u, u, u, attn_mask=mask, is_causal=True, need_weights=False)
    torch.testing.assert_close(operator(u, u, u, attn_mask=mask, is_causal=True), masked[1])


def test_errors():
    module = nn.MultiheadAttention(6, 2, dropout=0.1)
    with pytest.raises(ValueError, match=r"training mode with a dropout of 0.1.*eval"):
        from_module(module)
    operator, u = from_module(module.eval()), torch.randn(5, 6)
    with pytest.raises(ValueError, match="training mode"):
        operator.train()(u, u, u)
    with pytest.raises(ValueError, match="`is_causal` is a hint"):
        operator.eval()(u, u, u, is_causal=True)
    with pytest.raises(ValueError, match="`add_bias_kv` and `add_zero_attn`"):
        from_module(nn.MultiheadAttention(6, 2, add_zero_attn=True), window=2)
    with pytest.raises(TypeError, match=r"torch.nn.modules.linear.Linear\) cannot be converted.*MultiheadAttention"):
        from_module(nn.Linear(2, 2))


def test_a_subclass_with_another_forward_is_not_converted():
    class Scaled(nn.Conv1d):
        def forward(self, input):
            return 2 * super().forward(input)

    class Named(nn.Conv1d):
        pass

    with pytest.raises(TypeError, match="Scaled"):
        from_module(Scaled(1, 1, 1))
    assert from_module(Named(1, 1, 1))(torch.randn(1, 1, 3)).shape == (1, 1, 3)
