"""Checks of the sums with the full kernel: exact, over lists of keys, and of one token."""

import torch
from torch import Tensor

from itnet_kernels import (
    KERNEL_INPUTS,
    Blocks,
    KernelWeights,
    ball_blocks,
    cluster_measure,
    integral_transform,
    kernel_input_size,
    kmeans_anchors,
    listed_blocks,
    monte_carlo_transform,
    sampled_transform,
    window_blocks,
)

from . import literal
from .cases import Case, Draw, Tensors
from .scope import Scope


def problem(
    scope: Scope, n: int, *, dim: int = 2, per_sample: bool = False, padding: int = 0, regular: bool = False,
    head_dim: int | None = None, width: int | None = None,
) -> Tensors:  # fmt: skip
    """Returns features, positions, measure and weights; the last sample ends in ``padding`` positions of measure 0."""
    draw, heads = Draw(scope.device), scope.check_heads
    samples = scope.samples if per_sample else scope.sharing
    head_dim, width = head_dim or scope.head_dim, width or scope.width
    columns = kernel_input_size(KERNEL_INPUTS, scope.frequencies, dim, head_dim)
    points = draw.uniform(samples, n, dim)
    if regular:
        points = torch.arange(1, n + 1, device=scope.device, dtype=torch.float64)[:, None].expand(samples, n, dim) / n
    tensors = {
        "u": draw.normal(samples, n, heads, head_dim),
        "positions": (points if per_sample else points[0]).clone(),
        "measure": 2 * draw.uniform(samples, n) / n,
        "w1": draw.normal(width, columns) / columns**0.5,
        "b1": 0.1 * draw.normal(width),
        "w2": draw.normal(heads, head_dim**2, width) / width**0.5,
        "b2": draw.normal(heads, head_dim**2) / head_dim**0.5,
        "fourier": 2 * draw.normal(scope.frequencies, dim),
    }
    if padding:
        tensors["measure"][-1, -padding:] = 0
    return tensors


def weights_of(t: Tensors) -> KernelWeights:
    return KernelWeights(t["w1"], t["b1"], t["w2"], t["b2"], fourier=t["fourier"])


def _run(t: Tensors, **settings) -> Tensor:
    settings = {"measure": t["measure"], "backend": "triton"} | settings
    return integral_transform(t["u"], t["positions"], weights_of(t), **settings)


def _literal(t: Tensors, coefficients: Tensor) -> Tensor:
    return literal.pair_sum(t["u"], t["u"], t["positions"], t["positions"], weights_of(t), coefficients)


def exact_cases(scope: Scope) -> list[Case]:
    def case(name: str, n: int, is_causal=False, is_repeated=False, is_trained=False, is_fused=False, **settings):
        """Makes a case. With ``is_trained`` positions and measure have no gradients, which takes other kernels."""

        def expected(t: Tensors) -> Tensor:
            omega = literal.causal(t["measure"]) if is_causal else t["measure"].unsqueeze(1).expand(-1, n, -1)
            return _literal(t, omega)

        def kernel(t: Tensors) -> Tensor:
            return _run(t, is_causal=is_causal)

        fixed = ("fourier", "positions", "measure") if is_trained else ("fourier",)
        flags = {"is_causal": is_causal, "is_repeated": is_repeated, "is_fused": is_fused, "fixed": fixed}
        return Case("exact", name, problem(scope, n, **settings), kernel, expected, **flags)

    half, odd = scope.short // 2, {"head_dim": scope.head_dim * 3 // 4, "width": scope.width * 3 // 4}
    return [
        case("one position", 1, is_repeated=True),
        case("ragged", scope.long, is_fused=True),
        case("training", scope.long, is_trained=True, is_fused=True),
        case("training, causal", scope.short, is_causal=True, is_trained=True),
        case("training, padded, positions per sample", scope.short, per_sample=True, padding=half, is_trained=True),
        case("causal, padded, per sample", scope.long, is_causal=True, per_sample=True, padding=half),
        case("training, odd sizes, causal", scope.short, is_causal=True, is_trained=True, **odd),
        case("large heads", scope.short, head_dim=2 * scope.head_dim, width=scope.width // 2),
    ]


def _dense(blocks: list[Blocks], n: int) -> Tensor:
    return sum(part.dense(n, n).to(torch.float64) for part in blocks)


def list_cases(scope: Scope) -> list[Case]:
    n, half, device = scope.long, scope.short // 2, scope.device
    reach = max(1, n // 8)

    def near(name: str, tensors: Tensors, blocks: list[Blocks], is_repeated: bool = False) -> Case:
        table = _dense(blocks, n)

        def expected(t: Tensors) -> Tensor:
            return _literal(t, table.to(t["measure"].dtype) * t["measure"].unsqueeze(1))

        return Case("lists", name, tensors, lambda t: _run(t, blocks=blocks), expected, is_repeated=is_repeated)

    text = problem(scope, n, dim=1, regular=True)
    padded = problem(scope, n, dim=1, regular=True, per_sample=True, padding=half)
    points = problem(scope, n, dim=3, per_sample=True, padding=half)
    where, real = points["positions"], points["measure"] > 0
    return [
        near("windows", text, window_blocks((n,), reach, device=device), is_repeated=True),
        near("causal windows, padded", padded, window_blocks((n,), reach, is_causal=True, device=device)),
        near("balls", points, ball_blocks(where, where, 0.5, real, real)),
        _edges(scope),
        _anchors(scope),
        _monte_carlo(scope, is_causal=False),
        _monte_carlo(scope, is_causal=True),
    ]


def _edges(scope: Scope) -> Case:
    """Takes the neighbours of a node with weights of their own, 0 where there is none."""
    tensors, draw, n = problem(scope, scope.long, dim=3), Draw(scope.device, 1), scope.long
    indices = draw.integers(n, len(tensors["u"]), n, 3)
    tensors["coefficients"] = draw.normal(*indices.shape) * (draw.uniform(*indices.shape) > 0.3)
    del tensors["measure"]

    def kernel(t: Tensors) -> Tensor:
        lists = {"indices": indices, "coefficients": t["coefficients"], "backend": "triton"}
        return sampled_transform(t["u"], t["positions"], weights_of(t), **lists)

    def expected(t: Tensors) -> Tensor:
        return _literal(t, literal.listed(indices, t["coefficients"], n))

    return Case("lists", "edges", tensors, kernel, expected)


def _anchors(scope: Scope) -> Case:
    """Lets all positions integrate over a few of their own, with the measure of whole clusters."""
    tensors, count = problem(scope, scope.long), max(2, scope.long // 8)
    indices, clusters = kmeans_anchors(tensors["positions"], tensors["measure"], count)

    def parts(t: Tensors) -> tuple[Tensor, Tensor, Tensor]:
        chosen = indices[..., None, None].expand(-1, -1, *t["u"].shape[2:])
        places = t["positions"][indices]  # [B, M, s]
        return t["u"].gather(1, chosen), places, cluster_measure(t["measure"], clusters, count)

    def kernel(t: Tensors) -> Tensor:
        keys, places, measure = parts(t)
        given = {"measure": measure, "queries": t["u"], "query_positions": t["positions"], "backend": "triton"}
        return integral_transform(keys, places, weights_of(t), **given)

    def expected(t: Tensors) -> Tensor:
        keys, places, measure = parts(t)
        omega = measure.unsqueeze(1).expand(-1, t["u"].shape[1], -1)
        return literal.pair_sum(t["u"], keys, t["positions"], places, weights_of(t), omega)

    return Case("lists", "anchors", tensors, kernel, expected)


def _monte_carlo(scope: Scope, is_causal: bool) -> Case:
    """Draws samples with replacement, with their importance weights."""
    tensors, draw, n = problem(scope, scope.long, per_sample=is_causal), Draw(scope.device, 2), scope.long
    count = scope.num_samples
    indices = draw.integers(n, len(tensors["u"]), n, count)
    probabilities = (0.5 + draw.uniform(*indices.shape)).float() / n

    def kernel(t: Tensors) -> Tensor:
        drawn = {"indices": indices, "probabilities": probabilities, "measure": t["measure"], "backend": "triton"}
        return monte_carlo_transform(t["u"], t["positions"], weights_of(t), **drawn, is_causal=is_causal)

    def expected(t: Tensors) -> Tensor:
        omega = literal.causal(t["measure"]) if is_causal else t["measure"].unsqueeze(1).expand(-1, n, -1)
        weights = omega.gather(2, indices) / (count * probabilities.to(omega.dtype))
        return _literal(t, literal.listed(indices, weights, n))

    name = "Monte Carlo samples, causal" if is_causal else "Monte Carlo samples"
    return Case("lists", name, tensors, kernel, expected, is_causal=is_causal)


def step_cases(scope: Scope) -> list[Case]:
    """Asks for the last query alone, without gradients, as a cache does: over all keys, and over its window."""
    n = scope.long
    window = torch.arange(n - min(n, 4), n, device=scope.device).expand(scope.samples, 1, -1)

    def case(name: str, blocks: Blocks | None) -> Case:
        def kernel(t: Tensors) -> Tensor:
            given = {"queries": t["u"][:, -1:], "query_positions": t["positions"][:, -1:]}
            given |= {"is_causal": True} if blocks is None else {"blocks": blocks}
            return _run(t, **given)

        def expected(t: Tensors) -> Tensor:
            omega = literal.causal(t["measure"])[:, -1:]
            if blocks is not None:
                omega = blocks.dense(1, n).to(omega.dtype) * t["measure"].unsqueeze(1)
            where = t["positions"]
            return literal.pair_sum(t["u"][:, -1:], t["u"], where[:, -1:], where, weights_of(t), omega)

        tensors = problem(scope, n, dim=1, regular=True, per_sample=True)
        return Case("one token", name, tensors, kernel, expected, has_gradients=False)

    return [case("exact", None), case("near field", listed_blocks(window))]
