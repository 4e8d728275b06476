# SPDX-License-Identifier: Apache-2.0
"""Arguments of processors: those that a processor does not have are an error."""

from inspect import signature
from typing import Any

from configuration_itnet import check_names

# What Transformers writes into the file of any processor.
_COMMON = ("auto_map", "feature_extractor_type", "image_processor_type", "processor_class", "processor_type")


class CheckedSettings:
    """Mixin of a processor: an argument that it does not have is a `ValueError` that names the nearest it has.

    The file of another version may hold more: what is unknown in it is left out.
    """

    @classmethod
    def setting_names(cls) -> set[str]:
        """The arguments of the constructor."""
        return set(signature(cls.__init__).parameters) - {"self", "kwargs"}

    @classmethod
    def check_settings(cls, given: dict[str, Any]) -> None:
        names = [name for name in given if name not in _COMMON and not name.startswith("_")]
        check_names(names, cls.setting_names(), cls.__name__)

    @classmethod
    def from_dict(cls, values: dict[str, Any], **kwargs):
        known = cls.setting_names() | set(_COMMON)
        return super().from_dict({k: v for k, v in values.items() if k in known or k.startswith("_")}, **kwargs)
