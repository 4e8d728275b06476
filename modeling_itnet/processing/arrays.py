# Copyright 2026 The ITNet Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
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
