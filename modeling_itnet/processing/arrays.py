# SPDX-License-Identifier: Apache-2.0
"""What processors share: arrays out of lists and tensors, and padding."""

from typing import Any

import numpy as np


def as_array(values: Any, name: str) -> np.ndarray:
    """NumPy form of a list, array or tensor of numbers; ``name`` is what an error calls it."""
    try:
        array = np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
    except ValueError as error:
        raise ValueError(f"{name} is not an array: its rows differ in length") from error
    if not (np.issubdtype(array.dtype, np.number) or array.dtype == bool):
        raise ValueError(f"{name} must hold numbers, got dtype {array.dtype}")
    return array


def pad(array: np.ndarray, length: int) -> np.ndarray:
    """Zeros after the end of the first axis, up to ``length``."""
    return np.concatenate([array, np.zeros((length - len(array), *array.shape[1:]), dtype=array.dtype)])
