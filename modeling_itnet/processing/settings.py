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
