"""How the pictures of the results are saved."""

from pathlib import Path


def save(figure, path: Path) -> None:
    """Writes a figure of matplotlib, without the version of matplotlib, so that the same figure is the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
