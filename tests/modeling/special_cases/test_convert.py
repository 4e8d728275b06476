"""What from_module shares with its module and what it refuses; swapping inside of modules that read their children."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from transformers.models.bert.modeling_bert import BertConfig, BertSelfAttention

from modeling_itnet.special_cases import from_module, swap_modules
from modeling_itnet.special_cases.attention import MultiheadAttentionOperator

MODULES = {
    "conv": (lambda: nn.Conv1d(2, 4, 3), "weight", (1, 2, 9)),
    "rnn": (lambda: nn.RNN(2, 3, batch_first=True), "weight_hh_l0", (1, 5, 2)),
}
HOOKED = {
    "weight_norm": (weight_norm, "forward_pre_hook WeightNorm"),
    "spectral_norm": (spectral_norm, "forward_pre_hook SpectralNorm"),
    "prune": (lambda module, name: prune.l1_unstructured(module, name, 0.5), "forward_pre_hook L1Unstructured"),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", HOOKED)
@pytest.mark.parametrize("module", MODULES)
def test_weights_that_a_hook_computes_are_refused(module, kind):
    make, name, shape = MODULES[module]
    add, hook = HOOKED[kind]
    module = make().eval()
    operator = from_module(module)
    add(module, name)
    with pytest.raises(ValueError, match=rf"{type(module).__name__} has hooks \({hook}\).*remove_weight_norm"):
        from_module(module)
    with pytest.raises(ValueError, match=hook):  # a hook that came after the conversion
        operator(torch.randn(shape))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
def test_after_the_hooks_are_removed():
    module, u = weight_norm(nn.Conv1d(2, 4, 3)), torch.randn(1, 2, 9)
    module.weight_g.data *= 2
    nn.utils.remove_weight_norm(module)
    torch.testing.assert_close(from_module(module)(u), module(u))


def test_hooks_on_the_output_are_refused():
    module = nn.GRU(2, 3)
    handle = module.register_forward_hook(lambda module, args, out: (2 * out[0], out[1]))
    with pytest.raises(ValueError, match=r"GRU has hooks \(forward_hook <lambda>\)"):
        from_module(module)
    handle.remove()
    from_module(module)


@pytest.mark.parametrize(
    "add", [parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal]
)
def test_parametrized_weights_follow_their_parameters(add, compare):
    module = add(nn.Conv1d(3, 3, 2)).eval()
    operator, u = from_module(module), torch.randn(2, 3, 9)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += torch.randn_like(parameter)
    torch.testing.assert_close(operator(u), module(u))
    compare(module, lambda m, u: m(u), [u])


def test_hooks_of_modules_inside_run():
    """The operator calls the projections, as the module does."""
    module = BertSelfAttention(BertConfig(hidden_size=8, num_attention_heads=2)).eval()
    u = torch.randn(1, 4, 8)
    plain = module(u)[0]
    module.value.register_forward_hook(lambda module, args, out: 2 * out)
    torch.testing.assert_close(from_module(module)(u), module(u)[0])
    torch.testing.assert_close(module(u)[0], 2 * plain)


def test_attributes_are_those_of_the_module():
    module = nn.Conv2d(3, 4, 2)
    operator = from_module(module)
    assert operator.weight is module.weight
    assert operator.out_channels == 4
    for first in (False, True):  # which nn.TransformerEncoderLayer reads from its attention
        assert from_module(nn.MultiheadAttention(4, 2, batch_first=first)).batch_first is first
    with pytest.raises(AttributeError, match=r"ConvolutionOperator.*nothing"):
        _ = operator.nothing


@pytest.mark.parametrize("mask", [None, "padding", "causal"])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_transformer_encoder_in_evaluation(mask, norm_first):
    """It computes with its attention's weights instead of calling it, unless it is told not to."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2).eval()
    u, padding = torch.randn(2, 5, 8), torch.arange(5) >= torch.tensor([[5], [3]])
    options = {
        None: {},
        "padding": {"src_key_padding_mask": padding},
        "causal": {"mask": torch.ones(5, 5).triu(1).bool(), "is_causal": True},
    }[mask]
    calls = []
    with torch.no_grad():
        expected = model(u, **options)
        assert swap_modules(model, nn.MultiheadAttention) == 2
        for module in model.modules():
            if isinstance(module, MultiheadAttentionOperator):
                module.register_forward_hook(lambda *args: calls.append(args[0]))
        actual = model(u, **options)
    real = ~padding if mask == "padding" else torch.ones(2, 5).bool()
    torch.testing.assert_close(actual[real], expected[real])
    assert len(calls) == 2


def test_transformer_decoder():
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), 2).eval()
    u, memory = torch.randn(2, 5, 8), torch.randn(2, 4, 8)
    expected = model(u, memory)
    assert swap_modules(model, nn.MultiheadAttention) == 4
    torch.testing.assert_close(model(u, memory), expected)


def test_a_model_is_swapped_as_a_whole_or_not_at_all():
    model = nn.Sequential(nn.Conv1d(1, 1, 1), nn.Conv1d(1, 1, 1, padding_mode="zeros"))
    model[1].register_forward_hook(lambda *args: None)
    with pytest.raises(ValueError, match="Conv1d has hooks"):
        swap_modules(model, nn.Conv1d)
    assert type(model[0]) is nn.Conv1d
