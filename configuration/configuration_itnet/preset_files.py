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
"""Named model sizes, one JSON file each in the folder `presets`."""

import json
from importlib.resources import files
from typing import Any


def preset_names() -> tuple[str, ...]:
    """Names that `ITNetConfig.from_preset` accepts, sorted. Empty where the folder was not shipped (a Hub bundle)."""
    folder = files(__package__) / "presets"
    if not folder.is_dir():
        return ()
    return tuple(
        sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))
    )


def read_preset(name: str) -> dict[str, Any]:
    """The arguments of `ITNetConfig` that the preset `name` sets."""
    names = preset_names()
    if name not in names:
        available = ", ".join(names) or "none here; they ship with the installed package"
        raise ValueError(f"unknown preset {name!r}; available: {available}")
    return json.loads((files(__package__) / "presets" / f"{name}.json").read_text(encoding="utf-8"))
