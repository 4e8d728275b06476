"""Finds the code of the documents: fenced Python blocks, and commands in fenced blocks and in inline code."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]

#: A code span or a line of a shell block is a command if it starts with one of these.
PROGRAMS = ("accelerate", "git", "itnet", "make", "pip", "pre-commit", "pytest", "python", "source", "torchrun")


class Command(NamedTuple):
    document: str
    text: str


def documents() -> list[Path]:
    """Every Markdown file that a reader of the repository may follow."""
    patterns = ("*.md", "docs/**/*.md", "model_cards/*.md", "examples/**/*.md", "kernels/**/*.md")
    found = {path for pattern in patterns for path in ROOT.glob(pattern)}
    return sorted(path for path in found if not {"outputs", "generated"} & set(path.parts))


def python_blocks(document: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", document.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def commands(document: Path) -> Iterator[Command]:
    """Commands of shell blocks, of indented blocks and of code spans, without comments and environment variables."""
    text = document.read_text(encoding="utf-8")
    fence = r"^```(\w*)\n(.*?)^```"
    lines = [
        line
        for kind, block in re.findall(fence, text, re.DOTALL | re.MULTILINE)
        if kind in ("bash", "")
        for line in block.splitlines()
    ]
    prose = re.sub(fence, "", text, flags=re.DOTALL | re.MULTILINE)
    lines += re.findall(r"^    (\S.*)$", prose, re.MULTILINE)
    lines += [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]
    name = document.relative_to(ROOT).as_posix()
    for line in lines:
        for part in re.split(r"\s&&\s", re.sub(r"\s+#.*$", "", line)):
            words = re.sub(r"^(\w+=\S+\s+)+", "", part.strip())
            program = Path(words.split(" ")[0]).name if words else ""
            if program in PROGRAMS and " " in words:
                yield Command(name, words)
