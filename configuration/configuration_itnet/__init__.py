# SPDX-License-Identifier: Apache-2.0
"""Configuration of ITNet models: `ITNetConfig` and the named presets."""

from itnet_kernels import KERNEL_INPUTS

from .configuration_itnet import ITNetConfig
from .modalities import MODALITIES, Head, Modality, find_modality, find_task, task_settings
from .preset_files import preset_names
from .rules import check_names

__all__ = [
    "KERNEL_INPUTS",
    "MODALITIES",
    "Head",
    "ITNetConfig",
    "Modality",
    "check_names",
    "find_modality",
    "find_task",
    "preset_names",
    "task_settings",
]
