# SPDX-License-Identifier: Apache-2.0
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
