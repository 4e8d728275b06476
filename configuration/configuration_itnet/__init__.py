# SPDX-License-Identifier: Apache-2.0
"""Configuration of ITNet models: `ITNetConfig` and the named presets."""

from .configuration_itnet import ITNetConfig
from .preset_files import preset_names
from .rules import KERNEL_INPUTS, check_names

__all__ = ["KERNEL_INPUTS", "ITNetConfig", "check_names", "preset_names"]
