# SPDX-License-Identifier: Apache-2.0
"""The values an ITNet configuration may hold, and which of them go together.

Types are checked by `@strict`; what is left is ranges and combinations. Every message names the arguments it is about,
each followed by its value in brackets.
"""

import math
from collections.abc import Iterable
from dataclasses import fields
from difflib import get_close_matches
from numbers import Integral

from transformers.configuration_utils import PreTrainedConfig

from itnet_kernels import KERNEL_INPUTS

from .modalities import MODALITIES, find_modality

_MAY_BE_ZERO = (
    "num_fourier_features",
    "fourier_seed",
    "kernel_init_scale",
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
    """Raise a `ValueError` for the first rule that `config` breaks."""
    check_ranges(config)
    check_kernel_inputs(config.kernel_inputs)
    check_heads(config)
    check_patches(config)
    check_modality(config)
    check_tokens(config)
    check_num_labels(config.num_labels)
    check_measure(config)
    check_activation(config.hidden_act)


def check_ranges(config) -> None:
    own = {field.name for field in fields(config)} - {field.name for field in fields(PreTrainedConfig)}
    for name in sorted(own.difference(_RULES_OF_THEIR_OWN)):
        value = getattr(config, name)
        holds, rule = RANGES.get(name, _POSITIVE)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and not holds(value):
            raise ValueError(f"`{name}` ({value}) {rule}")


def check_kernel_inputs(names) -> None:
    unknown = [name for name in names if name not in KERNEL_INPUTS]
    if unknown:
        raise ValueError(f"`kernel_inputs` has unknown groups {unknown}; allowed are {list(KERNEL_INPUTS)}")
    repeated = [name for name in KERNEL_INPUTS if list(names).count(name) > 1]
    if repeated:
        raise ValueError(f"`kernel_inputs` ({list(names)}) names {repeated} more than once")


def check_heads(config) -> None:
    if config.hidden_size % config.num_attention_heads:
        raise ValueError(
            f"`hidden_size` ({config.hidden_size}) must be a multiple of "
            f"`num_attention_heads` ({config.num_attention_heads})"
        )


def check_patches(config) -> None:
    if not isinstance(config.image_size, int) and len(config.image_size) != 2:
        raise ValueError(f"`image_size` ({config.image_size}) must be one number or (height, width)")
    if not config.patch_sizes:
        raise ValueError(f"`patch_size` ({config.patch_size}) must hold at least one patch size")
    for name, sizes in (("image_size", config.image_shape), ("patch_size", config.patch_sizes)):
        if min(sizes) < 1:
            raise ValueError(f"`{name}` ({getattr(config, name)}) must be positive")
    if any(side % patch for side in config.image_shape for patch in config.patch_sizes):
        raise ValueError(
            f"`image_size` ({config.image_size}) must be a multiple of `patch_size` ({config.patch_size}) along each "
            "side, for every patch size"
        )


def check_modality(config) -> None:
    row = find_modality(config.modality)
    if config.position_dim is None:
        raise ValueError(f"`position_dim` (None) must be given for `modality` ({row.name!r})")
    if not row.has_free_position_dim and config.position_dim != row.position_dim:
        raise ValueError(
            f"`position_dim` ({config.position_dim}) must be {row.position_dim} for `modality` ({row.name!r})"
        )
    if config.pooling == "cls" and not row.has_cls:
        raise ValueError(
            f"`pooling` ('cls') needs a [CLS] position, which `modality` ({row.name!r}) does not have; "
            f"only {_names_with('has_cls')} do"
        )
    if config.is_causal and not row.is_ordered:
        raise ValueError(
            f"`is_causal` (True) needs ordered positions, which `modality` ({row.name!r}) does not have; "
            f"only {_names_with('is_ordered')} do"
        )


def _names_with(property_name: str) -> str:
    return ", ".join(name for name, row in MODALITIES.items() if getattr(row, property_name))


def check_tokens(config) -> None:
    padding, size = config.pad_token_id, config.vocab_size
    if find_modality(config.modality).has_tokens and padding is not None and not 0 <= padding < size:
        raise ValueError(
            f"`pad_token_id` ({padding}) must be from 0 to {size - 1}, below `vocab_size` ({size}), or None"
        )


def check_num_labels(count) -> None:
    if not isinstance(count, Integral) or isinstance(count, bool) or count < 1:
        raise ValueError(f"`num_labels` ({count!r}) must be a whole number, at least 1")


def check_names(given: Iterable[str], known: Iterable[str], owner: str) -> None:
    """Raise a `ValueError` for the first of the ``given`` names that is not ``known``, with the nearest that is."""
    known = sorted(known)
    for name in given:
        if name not in known:
            nearest = get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ValueError(f"`{name}` is no argument of {owner}; the nearest that is one is `{nearest}`")


def check_measure(config) -> None:
    measure = config.measure
    if measure == "uniform":
        return
    parts = find_modality(config.modality).parts
    if not parts:
        joint = " or ".join(repr(name) for name, row in MODALITIES.items() if row.parts)
        raise ValueError(
            f"`measure` ({measure!r}) weighs modalities against each other, so `modality` ({config.modality!r}) "
            f"must be {joint}; a single modality takes 'uniform'"
        )
    if measure == "balanced":
        return
    if len(measure) != len(parts) or not all(0 < weight < math.inf for weight in measure):
        raise ValueError(f"`measure` ({measure!r}) must hold one positive weight for each of {', '.join(parts)}")


def check_activation(name: str) -> None:
    from transformers.activations import ACT2FN  # imports torch: only when a configuration is made

    if name not in ACT2FN:
        raise ValueError(f"`hidden_act` ({name!r}) must be one of {sorted(ACT2FN)}")
