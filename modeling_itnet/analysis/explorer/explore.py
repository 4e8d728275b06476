# SPDX-License-Identifier: Apache-2.0
"""``explore_kernels`` writes a page in which readers move the query and see what the kernels do."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from configuration_itnet import find_modality
from itnet_kernels.weights import KERNEL_INPUTS

from ...operator import find_operators
from ..diagnosis import diagnose_kernels
from .collect import LayerWeights, Sample, collect
from .packing import Numbers, write_page
from .views import sample_parts

#: The size that a page keeps to unless told otherwise, in bytes.
MAX_BYTES = 5_000_000
# Elements of all K_ij of a layer up to which a page comes with a diagnosis: about ten seconds.
_DIAGNOSIS_ELEMENTS = 2**26
_FIELD_TITLES = {"kernel": "exact kernel", "near": "near kernel", "low_rank": "low-rank kernel", "far": "far kernel"}


class _Plan(NamedTuple):
    """What a page holds of a model."""

    precision: str
    layers: list[int]
    heads: list[int]


def explore_kernels(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    path: str | Path | None = None,
    *,
    tokenizer=None,
    title: str | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    precision: Literal["float32", "float16"] | None = None,
    num_samples: int | None = None,
    near_size: int | None = None,
    near_radius: float | None = None,
    max_bytes: int = MAX_BYTES,
) -> str:
    r"""Writes one self-contained HTML file that evaluates K_ij = kappa(x_i, x_j, u_i, u_j) in the browser.

    The page holds the kernels' weights and the features that the layers have on ``inputs``, and evaluates one query i
    at a time, for all keys j: |K_ij|, an entry of it, K_ij u_j, and the contributions omega_ij K_ij u_j to the output.
    It needs no server and no network.

    A page that would be larger than ``max_bytes`` keeps half precision, then fewer layers, then fewer heads, and says
    so. What is left out is never approximated.

    Args:
        model: an ITNetModel, or any model that contains one, of any modality and integration mode.
        inputs: keyword arguments of its forward; every sample of the batch can be chosen on the page.
        path: where to write the page; nowhere if None.
        tokenizer: gives tokens their names, which are numbers without it.
        title: of the page; by default, the class of the model.
        layers, heads: the numbers of those that the page shows, from 0; negative ones count from the last.
        precision: of weights and features; by default float32 where that is small enough.
        num_samples: the number of Monte Carlo anchors that are compared; by default the model's, or a quarter of the
            positions where it does not use any.
        near_size, near_radius: of the neighbourhoods that are compared; by default the configuration's, or a radius
            of a quarter of the extent.
        max_bytes: the largest page.

    Returns:
        The page as text.
    """
    if precision not in (None, "float32", "float16"):
        raise ValueError(f"`precision` ({precision!r}) must be 'float32', 'float16' or None")
    config = find_operators(model)[0].config if find_operators(model) else None
    given = {"num_samples": num_samples, "near_size": near_size, "near_radius": near_radius}
    weights, samples = collect(model, inputs, **given)
    wanted = _Plan(
        precision or "float32",
        _chosen("layers", layers, len(weights)),
        _chosen("heads", heads, config.num_attention_heads),
    )
    shared = {
        "title": title or type(model).__name__,
        "modality": find_modality(config.modality).title or config.modality,
        "isCausal": config.is_causal,
        "mode": config.integration_mode,
        "totalLayers": len(weights),
        "totalHeads": config.num_attention_heads,
        "headSize": config.head_dim,
        "inputs": [name for name in KERNEL_INPUTS if name in config.kernel_inputs],
        "groups": list(KERNEL_INPUTS),
        "fields": _fields(weights[0], samples[0].mode),
        "modes": _modes(weights[0], samples[0]),
        "diagnosis": _diagnosis(model, inputs, weights, samples),
        "labels": {str(key): str(value) for key, value in (getattr(config, "id2label", None) or {}).items()},
        "nearName": _near_name(samples[0], near_size or config.near_size),
    }
    names = None if tokenizer is None else tokenizer.convert_ids_to_tokens
    views = [sample_parts(sample, inputs, names) for sample in samples]
    smallest = None
    for plan in _plans(wanted, precision):
        page = _page(plan, shared, weights, samples, views, names)
        smallest = len(page.encode())
        if smallest <= max_bytes:
            break
    else:
        raise ValueError(
            f"`max_bytes` ({max_bytes:,}) is too small: one layer and one head of these {len(samples)} samples take "
            f"{smallest:,} bytes in {plan.precision}; give fewer samples, or a larger `max_bytes`"
        )
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(page, encoding="utf-8")
    return page


def _chosen(name: str, numbers: Sequence[int] | None, count: int) -> list[int]:
    if numbers is None:
        return list(range(count))
    for number in numbers:
        if not -count <= number < count:
            raise ValueError(f"`{name}` ({list(numbers)}) must be numbers from {-count} to {count - 1}")
    if not numbers:
        raise ValueError(f"`{name}` must name at least one of {count}")
    return sorted({number % count for number in numbers})


def _plans(wanted: _Plan, precision: str | None) -> Iterator[_Plan]:
    """Yields what to keep: all that is wanted, then half precision, then fewer layers, then fewer heads."""
    yield wanted
    half = wanted._replace(precision=precision or "float16")
    if half != wanted:
        yield half
    for count in range(len(wanted.layers) - 1, 0, -1):
        yield half._replace(layers=_spread(wanted.layers, count))
    for count in range(len(wanted.heads) - 1, 0, -1):
        yield half._replace(layers=_spread(wanted.layers, 1), heads=wanted.heads[:count])


def _spread(numbers: list[int], count: int) -> list[int]:
    """Returns ``count`` of the numbers from the first to the last; if it is one, the last."""
    if count == 1:
        return numbers[-1:]
    return [numbers[round(k * (len(numbers) - 1) / (count - 1))] for k in range(count)]


def _fields(weights: LayerWeights, mode: str) -> list[dict[str, str]]:
    """Returns the kernels of a checkpoint. ``weights`` is how the model sums them: over all keys, or the near ones."""
    is_split = mode == "near_far"
    found = []
    if weights.kernel is not None:
        name = "near" if is_split else "kernel"
        found.append({"name": name, "source": "kernel", "weights": "near" if is_split else "all"})
    if weights.factors:
        found.append({"name": "far" if is_split else "low_rank", "source": "factors", "weights": "all"})
    if mode == "low_rank":  # what the model uses comes first
        found.reverse()
    return [field | {"title": _FIELD_TITLES[field["name"]]} for field in found]


def _modes(weights: LayerWeights, sample: Sample) -> list[dict[str, Any]]:
    """Returns the ways of integrating that the page compares: fields, weights, and which is the model's."""
    if sample.mode == "near_far":
        near, far = {"field": "near", "weights": "near"}, {"field": "far", "weights": "all"}
        return [
            {"title": "near + far", "terms": [near, far], "isModel": True},
            {"title": "near field alone", "terms": [near]},
            {"title": "far field alone", "terms": [far]},
        ]
    main = _fields(weights, sample.mode)[0]
    first = "low rank" if main["name"] == "low_rank" else "exact"
    uses_anchors = sample.mode == "monte_carlo" and sample.anchors is not None
    rows = [
        {"title": f"{first}, all keys", "weights": "all", "isModel": not uses_anchors},
        {"title": f"{first}, near keys alone", "weights": "near"},
    ]
    if sample.anchors is not None:
        rows.append({"title": "Monte Carlo, anchors", "weights": "anchors", "isModel": uses_anchors})
    rows.append({"title": "Monte Carlo, random keys", "weights": "samples"})
    modes = [row | {"terms": [{"field": main["name"], "weights": row.pop("weights")}]} for row in rows]
    for other in _fields(weights, sample.mode)[1:]:
        modes.append({"title": other["title"], "terms": [{"field": other["name"], "weights": "all"}]})
    return modes


def _near_name(sample: Sample, near_size: int) -> str:
    """Returns what the page calls a neighbourhood of this model."""
    if sample.domain.layout is not None:
        return f"windows of {near_size} positions"
    return "ends of edges" if sample.domain.neighbors is not None else "balls"


def _diagnosis(model: nn.Module, inputs: Mapping[str, Tensor], weights: list[LayerWeights], samples: list[Sample]):
    """Returns figures per layer and head, or a sentence that says why there are none."""
    if any(layer.kernel is None for layer in weights):
        return "The kernels of this model are low-rank: it has factors, and no exact kernels to diagnose."
    config = find_operators(model)[0].config
    count = max(sample.count for sample in samples)
    if len(samples) * count**2 * config.num_attention_heads * config.head_dim**2 > _DIAGNOSIS_ELEMENTS:
        return f"Not computed for {len(samples)} samples of {count} positions; diagnose_kernels(model, inputs) does."
    diagnosis = diagnose_kernels(model, inputs)
    heads = [{k: v for k, v in asdict(head).items() if k != "profile"} for head in diagnosis.heads]
    heads = [{k: v if math.isfinite(v) else None for k, v in head.items()} for head in heads]
    return {"heads": heads, "radius": diagnosis.radius, "uniformLocality": diagnosis.uniform_locality}


def _page(
    plan: _Plan, shared: dict[str, Any], weights: list[LayerWeights], samples: list[Sample], views: list, names
) -> str:
    numbers = Numbers(plan.precision)
    description = shared | {
        "precision": plan.precision,
        "layers": [{"number": layer, **_layer(numbers, plan, weights[layer])} for layer in plan.layers],
        "heads": plan.heads,
        "frequencies": numbers.add(samples[0].domain.frequencies, is_exact=True),
        "samples": [
            _packed(numbers, plan, sample, view, names, shared["headSize"])
            for sample, view in zip(samples, views, strict=True)
        ],
    }
    return write_page(description, numbers)


def _layer(numbers: Numbers, plan: _Plan, weights: LayerWeights) -> dict[str, Any]:
    """Returns the weights of a layer for the heads of the plan."""
    found: dict[str, Any] = {}
    if weights.kernel is not None:
        kernel = weights.kernel
        per_head = {"w2": kernel.w2, "b2": kernel.b2}
        hidden = {"w1": kernel.w1, "b1": kernel.b1, "wMid": kernel.w_mid, "bMid": kernel.b_mid}
        if kernel.has_own_hidden:
            per_head, hidden = per_head | hidden, {}
        found["kernel"] = {
            name: numbers.add(value if len(value) == 1 else value[plan.heads])
            for name, value in per_head.items()
            if value is not None
        } | {name: numbers.add(value) for name, value in hidden.items() if value is not None}
        found["kernel"]["hasOwnHidden"] = kernel.has_own_hidden
    if weights.factors:
        factors = {name: value if _is_shared(name) else value[plan.heads] for name, value in weights.factors.items()}
        found["factors"] = {name.replace(".", "_"): numbers.add(value) for name, value in factors.items()}
    return found


def _is_shared(name: str) -> bool:
    """Says whether heads share a parameter of the factors."""
    return name.endswith((".w1", ".b1"))


def _packed(
    numbers: Numbers, plan: _Plan, sample: Sample, view: list[dict[str, Any]], names, head_size: int
) -> dict[str, Any]:
    def of_heads(features: Tensor) -> Tensor:  # [n, d] -> [heads of the plan, n, d_h]
        return features.unflatten(-1, (-1, head_size))[:, plan.heads].transpose(0, 1).contiguous()

    parts = [
        {k: numbers.add(v, is_exact=True) if isinstance(v, Tensor) else v for k, v in part.items()} for part in view
    ]
    packed: dict[str, Any] = {
        "count": sample.count,
        "mode": sample.mode,
        "parts": parts,
        "positions": numbers.add(sample.domain.positions, is_exact=True),
        "measure": numbers.add(sample.domain.measure[0], is_exact=True),
        "features": [numbers.add(of_heads(sample.features[layer])) for layer in plan.layers],
        "nearPairs": numbers.add(sample.near_pairs),
        "nearScale": numbers.add(sample.near_scale, is_exact=True),
    }
    if sample.anchors is not None:
        packed["anchors"] = numbers.add(sample.anchors[0])
        packed["anchorMeasure"] = numbers.add(sample.anchors[1], is_exact=True)
    if sample.domain.neighbors is not None:
        packed["neighbors"] = numbers.add(sample.domain.neighbors[0])
        packed["edgeGate"] = float(sample.domain.edge_gate)
    if sample.predictions is not None:
        labels = sample.predictions.labels.tolist()
        is_token = len(labels) > 1 and names is not None
        packed["predictions"] = {
            "labels": [names(row) for row in labels] if is_token else labels,
            "areTokens": is_token,
            "probabilities": numbers.add(sample.predictions.probabilities),
            "gradients": [numbers.add(of_heads(sample.predictions.gradients[layer])) for layer in plan.layers],
        }
    return packed
