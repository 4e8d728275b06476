# SPDX-License-Identifier: Apache-2.0
"""What processors share: checked arguments, arrays out of lists and tensors, and padding."""

from collections.abc import Sequence
from inspect import signature
from typing import Any

import numpy as np

from configuration_itnet import check_names

# What Transformers writes into the file of any processor.
_COMMON = ("auto_map", "feature_extractor_type", "image_processor_type", "processor_class", "processor_type")


class CheckedSettings:
    """A mixin of processors: an argument that one does not have is a `ValueError` that names the nearest it has.

    The file of another version may hold more: what is unknown in it is left out.
    """

    @classmethod
    def from_model_config(cls, config):
        """Returns the processor that goes with a model's configuration."""
        return cls()

    @classmethod
    def setting_names(cls) -> set[str]:
        """Returns the arguments of the constructor."""
        return set(signature(cls.__init__).parameters) - {"self", "kwargs"}

    @classmethod
    def check_settings(cls, given: dict[str, Any]) -> None:
        names = [name for name in given if name not in _COMMON and not name.startswith("_")]
        check_names(names, cls.setting_names(), cls.__name__)

    @classmethod
    def from_dict(cls, values: dict[str, Any], **kwargs):
        known = cls.setting_names().union(_COMMON)
        return super().from_dict({k: v for k, v in values.items() if k in known or k.startswith("_")}, **kwargs)


def as_array(values: Any, name: str) -> np.ndarray:
    """Returns the NumPy form of a list, array or tensor of numbers. ``name`` is what an error calls it."""
    try:
        array = np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
    except ValueError as error:
        raise ValueError(f"{name} is not an array: its rows differ in length") from error
    if not (np.issubdtype(array.dtype, np.number) or array.dtype == bool):
        raise ValueError(f"{name} must hold numbers, got dtype {array.dtype}")
    return array


def stack(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Stacks arrays [n_b, ...] with zeros after their ends, up to the longest: [B, n, ...]."""
    batch = np.zeros((len(arrays), max(map(len, arrays)), *arrays[0].shape[1:]), dtype=arrays[0].dtype)
    for row, array in zip(batch, arrays, strict=True):
        row[: len(array)] = array
    return batch


def stack_mask(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Returns 1 where :func:`stack` has an entry of an array and 0 where it has a zero of its own: [B, n]."""
    return stack([np.ones(len(array), dtype=np.int64) for array in arrays])
