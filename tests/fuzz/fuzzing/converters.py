"""The family of ``from_module``: operators against the modules of torch.nn that they are made of."""

from copy import deepcopy

import torch
from torch import Tensor, nn

from modeling_itnet.special_cases import LinearAttention, LinearStateSpace, from_module

from .case import DOUBLE, Draw, Outcome, largest

# Conditioning is measured by weights and inputs that are off by this much.
_PROBE = 2.0**-40
_MARGIN = 20  # an operator sums over pairs what the module sums along a recurrence


def converters(draw: Draw, outcome: Outcome) -> None:
    """Output and gradients in float64; how far apart they may be follows from how the module itself is conditioned."""
    kind = draw.choice("kind", ("convolution", "transposed", "attention", "recurrence", "recurrence", "linear"))
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(draw.random.randrange(2**31))
            module, inputs, call = _MAKERS[kind](draw)
            module.eval()
            upstream = None
            results = {}
            for name, candidate in (("module", module), ("operator", from_module(module))):
                leaves = [*(t.clone().requires_grad_() for t in inputs), *module.parameters()]
                out = call(candidate, *leaves[: len(inputs)])
                upstream = torch.randn_like(out) if upstream is None else upstream
                results[name] = _with_gradients(out, leaves, upstream)
            spread = [0.0] * len(results["module"])
            for _ in range(2):
                moved, shifted = _disturbed(module, inputs)
                leaves = [*(t.requires_grad_() for t in shifted), *moved.parameters()]
                probe = _with_gradients(call(moved, *leaves[: len(inputs)]), leaves, upstream)
                for index, (value, exact) in enumerate(zip(probe, results["module"], strict=True)):
                    spread[index] = max(spread[index], largest(value - exact))
    finally:
        torch.set_default_dtype(default)
    # Gradients may be sums of terms that cancel, as those of whatever a normalisation removes: the size of a term.
    work = float((upstream * results["module"][0]).abs().sum()) * (1 + max(largest(t) for t in inputs))
    sizes = [largest(results["module"][0]), *(work / max(largest(t), 0.1) for t in [*inputs, *module.parameters()])]
    pairs = zip(results["operator"], results["module"], spread, sizes, strict=True)
    for index, (actual, expected, moved, size) in enumerate(pairs):
        tolerance = _MARGIN * DOUBLE * (moved / _PROBE + largest(expected) + size) + 1e-300
        outcome.compare("output" if index == 0 else f"gradient {index}", actual, expected, tolerance)


def _with_gradients(out: Tensor, leaves: list[Tensor], upstream: Tensor) -> list[Tensor]:
    grads = torch.autograd.grad(out, leaves, upstream, allow_unused=True)
    return [out.detach(), *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True))]


@torch.no_grad()
def _disturbed(module: nn.Module, inputs: list[Tensor]) -> tuple[nn.Module, list[Tensor]]:
    moved = deepcopy(module)
    for parameter in moved.parameters():
        parameter.mul_(1 + _PROBE * torch.randn_like(parameter))
    return moved, [t * (1 + _PROBE * torch.randn_like(t)) for t in inputs]


def _convolution(draw: Draw, transposed: bool = False):
    axes = draw.integer("axes", 1, 3)
    groups = draw.choice("groups", (1, 1, 2))
    channels = [groups * draw.integer(name, 1, 2) for name in ("in", "out")]
    kernel, stride, dilation = (
        tuple(draw.integer(f"{name} {i}", 1, most) for i in range(axes))
        for name, most in (("kernel", 3), ("stride", 2), ("dilation", 2))
    )
    settings = {"stride": stride, "dilation": dilation, "groups": groups, "bias": draw.chance("bias", 0.5)}
    sizes = [dilation[i] * (kernel[i] - 1) + draw.integer(f"size {i}", 1, 4) for i in range(axes)]
    if transposed:
        settings["padding"] = tuple(draw.integer(f"padding {i}", 0, (kernel[i] - 1) // 2) for i in range(axes))
        extra = [draw.integer(f"extra {i}", 0, max(stride[i], dilation[i]) - 1) for i in range(axes)]
        settings["output_padding"] = tuple(extra)
        module_class = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[axes - 1]
    else:
        settings["padding_mode"] = draw.choice("mode", ("zeros", "reflect", "replicate", "circular"))
        same = all(step == 1 for step in stride) and draw.chance("same", 0.3)
        padding = tuple(draw.integer(f"padding {i}", 0, min(2, sizes[i] - 1)) for i in range(axes))
        settings["padding"] = "same" if same else padding
        if same and settings["padding_mode"] == "reflect":  # it must be shorter than the input
            settings["padding_mode"] = "zeros"
        module_class = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
    module = module_class(*channels, kernel, **settings)
    inputs = [torch.randn(draw.integer("batch", 1, 2), channels[0], *sizes)]
    return module, inputs, lambda candidate, u: candidate(u)


def _attention(draw: Draw):
    heads = draw.integer("heads", 1, 3)
    width = heads * draw.integer("head size", 1, 3)
    batch, queries, keys = draw.integer("batch", 1, 2), draw.integer("queries", 1, 6), draw.integer("keys", 1, 6)
    module = nn.MultiheadAttention(
        width,
        heads,
        bias=draw.chance("bias", 0.7),
        add_bias_kv=draw.chance("bias of keys", 0.2),
        add_zero_attn=draw.chance("zero key", 0.2),
        batch_first=True,
    )
    own = draw.chance("self-attention", 0.5)
    keys = queries if own else keys
    inputs = [torch.randn(batch, queries, width) * draw.power("sharpness", -1, 1)]
    inputs += [] if own else [torch.randn(batch, keys, width)]
    masks = {}
    if own and draw.chance("causal", 0.4):
        masks["attn_mask"] = torch.ones(queries, keys).triu(1).bool()
    elif draw.chance("bias of pairs", 0.3):
        masks["attn_mask"] = torch.randn(queries, keys)
    if draw.chance("padding", 0.4) and masks.get("attn_mask", torch.zeros(())).dtype != torch.bool:
        masks["key_padding_mask"] = torch.arange(keys) >= draw.integers(1, keys + 1, batch, 1)
        if "attn_mask" in masks:  # torch asks for masks of one type
            padding = torch.zeros(batch, keys).masked_fill(masks["key_padding_mask"], -torch.inf)
            masks["key_padding_mask"] = padding

    def call(candidate, u, memory=None):
        memory = u if memory is None else memory
        out = candidate(u, memory, memory, need_weights=False, **masks)
        return out[0] if isinstance(out, tuple) else out

    return module, inputs, call


def _recurrence(draw: Draw):
    name = draw.choice("cell", ("RNN", "RNN", "GRU", "LSTM"))
    hidden, features = draw.integer("hidden", 1, 8), draw.integer("features", 1, 3)
    steps = draw.choice("steps", (1, 2, 5, 12, 40, 120))
    layers = draw.integer("layers", 1, 2) if steps < 40 else 1
    settings = {"num_layers": layers, "bidirectional": draw.chance("both ways", 0.3), "batch_first": True}
    if name == "RNN":
        settings["nonlinearity"] = draw.choice("activation", ("tanh", "tanh", "relu"))
    module = getattr(nn, name)(features, hidden, **settings)
    if settings.get("nonlinearity") != "relu" and draw.chance("saturating", 0.4):
        with torch.no_grad():
            for key, weight in module.named_parameters():
                if "weight_hh" in key:
                    weight.normal_(std=draw.choice("gain", (1.0, 1.5, 3.0)) / hidden**0.5)
    inputs = [torch.randn(draw.integer("batch", 1, 2), steps, features) * draw.power("loudness", -1, 1)]

    def call(candidate, u):
        out = candidate(u)
        return out[0] if isinstance(out, tuple) else out

    return module, inputs, call


def _linear(draw: Draw):
    batch, steps = draw.integer("batch", 1, 2), draw.integer("steps", 1, 20)
    if draw.chance("attention", 0.5):
        heads = draw.integer("heads", 1, 3)
        module = LinearAttention(heads * draw.integer("head size", 1, 3), heads, draw.chance("causal", 0.5))
        inputs = [torch.randn(batch, steps, module.query.in_features)]
    else:
        sizes = [draw.integer(name, 1, 4) for name in ("state", "in", "out")]
        method = draw.choice("method", ("euler", "zoh"))
        module = LinearStateSpace(*sizes, draw.power("step", -3, 0), method, draw.chance("delayed", 0.5))
        inputs = [torch.randn(batch, steps, sizes[1])]
    return module, inputs, lambda candidate, u: candidate(u)


_MAKERS = {
    "convolution": _convolution,
    "transposed": lambda draw: _convolution(draw, transposed=True),
    "attention": _attention,
    "recurrence": _recurrence,
    "linear": _linear,
}
