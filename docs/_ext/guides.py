"""The order of the guides."""

from pathlib import Path

ORDER = (
    "own_images",
    "own_text",
    "own_points",
    "own_graphs",
    "own_meshes",
    "image_and_text",
    "generate",
    "choose_a_mode",
    "own_module",
    "gpus",
    "share_and_export",
    "troubleshooting",
)


def place(file: str) -> int:
    """Returns where a guide stands; sphinx-gallery sorts by this."""
    name = Path(file).stem
    if name not in ORDER:
        raise ValueError(f"docs/guides/{name}.py has no place yet: add it to ORDER in docs/_ext/guides.py")
    return ORDER.index(name)
