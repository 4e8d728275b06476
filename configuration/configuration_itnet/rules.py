# SPDX-License-Identifier: Apache-2.0
"""Checks which values an ITNet configuration may hold, and which of them go together.

Types are checked by `@strict`; what is left is ranges and combinations. Every message names the arguments it is about,
each followed by its value in brackets.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import fields
from difflib import get_close_matches
from numbers import Integral

from transformers.configuration_utils import PreTrainedConfig

from itnet_kernels import KERNEL_INPUTS

from .modalities import MODALITIES, Modality, find_modality

_MAY_BE_ZERO = (
    "num_fourier_features",
    "fourier_seed",
    "kernel_init_scale",
    "kernel_position_scale",
    "kernel_bias_scale",
    "position_init_scale",
    "exact_max_positions",
    "proposal_loss_weight",
    "signal_feature_size",
    "point_feature_size",
    "local_neighbors",
    "num_node_types",
    "edge_gate_init",
)
_PROBABILITIES = ("hidden_dropout_prob", "embedding_dropout_prob", "drop_path_rate", "classifier_dropout")
_RULES_OF_THEIR_OWN = ("image_size", "patch_size", "pad_token_id", "bos_token_id", "eos_token_id")
_POSITIVE = (lambda value: 0 < value < math.inf, "must be positive and finite")
#: What numbers may be; all others must be positive.
RANGES = {
    **dict.fromkeys(_MAY_BE_ZERO, (lambda value: 0 <= value < math.inf, "must be zero or more, and finite")),
    **dict.fromkeys(_PROBABILITIES, (lambda value: 0 <= value < 1, "must be in [0, 1)")),
    "proposal_epsilon": (lambda value: 0 < value <= 1, "must be in (0, 1]"),
    "kernel_num_layers": (lambda value: value in (2, 3), "must be 2 or 3"),
}


def check_config(config) -> None:
    """Raises a `ValueError` for the first rule that `config` breaks."""
    own = {field.name for field in fields(config)} - {field.name for field in fields(PreTrainedConfig)}
    for name in sorted(own.difference(_RULES_OF_THEIR_OWN)):
        value = getattr(config, name)
        holds, rule = RANGES.get(name, _POSITIVE)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and not holds(value):
            raise ValueError(f"`{name}` ({value}) {rule}")
    check_kernel_inputs(config.kernel_inputs)
    check_num_labels(config.num_labels)
    for is_broken, message in _combinations(config):
        if is_broken:
            raise ValueError(message)


def _combinations(c) -> Iterator[tuple[bool, str]]:
    """Yields whether a configuration breaks a rule, and what to say then. Rules may rely on those before them."""
    from transformers.activations import ACT2FN  # imports torch: only when a configuration is made

    yield c.hidden_act not in ACT2FN, f"`hidden_act` ({c.hidden_act!r}) must be one of {sorted(ACT2FN)}"
    heads = f"`num_attention_heads` ({c.num_attention_heads})"
    yield c.hidden_size % c.num_attention_heads > 0, f"`hidden_size` ({c.hidden_size}) must be a multiple of {heads}"

    image, patch = f"`image_size` ({c.image_size})", f"`patch_size` ({c.patch_size})"
    yield len(c.image_shape) != 2, f"{image} must be one number or (height, width)"
    yield not c.patch_sizes, f"{patch} must hold at least one patch size"
    yield min(c.image_shape) < 1, f"{image} must be positive"
    yield min(c.patch_sizes) < 1, f"{patch} must be positive"
    is_uneven = any(side % size for side in c.image_shape for size in c.patch_sizes)
    yield is_uneven, f"{image} must be a multiple of {patch} along each side, for every patch size"

    row = find_modality(c.modality)
    modality, dimension = f"`modality` ({c.modality!r})", f"`position_dim` ({c.position_dim})"
    yield c.position_dim is None, f"{dimension} must be given for {modality}"
    is_other = not row.has_free_position_dim and c.position_dim != row.position_dim
    yield is_other, f"{dimension} must be {row.position_dim} for {modality}"
    for is_wanted, need, field in (
        (c.pooling == "cls", "`pooling` ('cls') needs a [CLS] position", "has_cls"),
        (c.is_causal, "`is_causal` (True) needs ordered positions", "is_ordered"),
    ):
        able = ", ".join(name for name, other in MODALITIES.items() if getattr(other, field))
        yield is_wanted and not getattr(row, field), f"{need}, which {modality} does not have; only {able} do"
    decay = "`factor_decay` (True) needs a causal kernel on one coordinate"
    is_wrong = c.factor_decay and not (c.is_causal and c.position_dim == 1)
    yield is_wrong, f"{decay}: `is_causal` ({c.is_causal}) must be True and {dimension} 1"
    if "near_far" in c.integration_modes:
        yield from _near_rules(c, row, modality)
    is_outside = row.has_tokens and c.pad_token_id is not None and not 0 <= c.pad_token_id < c.vocab_size
    size = f"from 0 to {c.vocab_size - 1}, below `vocab_size` ({c.vocab_size})"
    yield is_outside, f"`pad_token_id` ({c.pad_token_id}) must be {size}, or None"

    measure = f"`measure` ({c.measure!r})"
    joint = " or ".join(repr(name) for name, other in MODALITIES.items() if other.parts)
    yield (
        c.measure != "uniform" and not row.parts,
        f"{measure} weighs modalities against each other, so {modality} must be {joint}; a single modality takes "
        "'uniform'",
    )
    weights = (1,) * len(row.parts) if isinstance(c.measure, str) else c.measure
    is_wrong = len(weights) != len(row.parts) or not all(0 < weight < math.inf for weight in weights)
    yield is_wrong, f"{measure} must hold one positive weight for each of {', '.join(row.parts)}"


def _near_rules(c, row: Modality, modality: str) -> Iterator[tuple[bool, str]]:
    """Yields the rules about neighbourhoods, which "near_far" needs, in the same form."""
    size, grid_dim = f"`near_size` ({c.near_size})", row.grid_dim
    side = round(c.near_size ** (1 / max(grid_dim, 1)))
    if not c.is_causal:
        kind = "an odd number" if grid_dim == 1 else "the square of an odd number, such as 9, 25 or 49,"
        yield (
            grid_dim > 0 and (side**grid_dim != c.near_size or side % 2 == 0),
            f"{size} must be {kind} for {modality}",
        )
    has_regions = grid_dim == 0 and not c.is_causal and not (row.has_edges and c.edge_gate)
    yield (
        has_regions and c.near_radius is None,
        f"`near_radius` (None) must be given for {modality}: the radius of the neighbourhoods of 'near_far', in units "
        "of the positions",
    )


def check_kernel_inputs(names) -> None:
    unknown = [name for name in names if name not in KERNEL_INPUTS]
    if unknown:
        raise ValueError(f"`kernel_inputs` has unknown groups {unknown}; allowed are {list(KERNEL_INPUTS)}")
    repeated = [name for name in KERNEL_INPUTS if list(names).count(name) > 1]
    if repeated:
        raise ValueError(f"`kernel_inputs` ({list(names)}) names {repeated} more than once")


def check_num_labels(count) -> None:
    if not isinstance(count, Integral) or isinstance(count, bool) or count < 1:
        raise ValueError(f"`num_labels` ({count!r}) must be a whole number, at least 1")


def check_names(given: Iterable[str], known: Iterable[str], owner: str) -> None:
    """Raises a `ValueError` for the first of the ``given`` names that is not ``known``, with the nearest that is."""
    known = sorted(known)
    for name in given:
        if name not in known:
            nearest = get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ValueError(f"`{name}` is no argument of {owner}; the nearest that is one is `{nearest}`")
