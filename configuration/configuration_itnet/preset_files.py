# SPDX-License-Identifier: Apache-2.0
"""Named model sizes, one JSON file each in the folder `presets`."""

import json
from importlib.resources import files
from typing import Any


def preset_names() -> tuple[str, ...]:
    """Returns the names that `ITNetConfig.from_preset` accepts, sorted."""
    entries = (files(__package__) / "presets").iterdir()
    return tuple(sorted(entry.name.removesuffix(".json") for entry in entries if entry.name.endswith(".json")))


def read_preset(name: str) -> dict[str, Any]:
    """Returns the arguments of `ITNetConfig` that the preset `name` sets."""
    if name not in preset_names():
        raise ValueError(f"there is no preset {name!r}; there are {', '.join(preset_names())}")
    return json.loads((files(__package__) / "presets" / f"{name}.json").read_text(encoding="utf-8"))
