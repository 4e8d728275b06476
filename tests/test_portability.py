"""The code runs on Windows too: text files have a named encoding, and nothing imports a Unix library at the top."""

import ast
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("modeling_itnet", "configuration", "kernels", "examples", "tests")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
UNIX_ONLY = {"resource", "fcntl", "pwd", "grp", "termios"}


def unnamed_encodings(tree: ast.AST) -> list[int]:
    """Lines that read or write text in the encoding of the machine, which is not UTF-8 everywhere."""
    lines = []
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)
        if any(keyword.arg == "encoding" for keyword in call.keywords):
            continue
        words = [value.value for value in call.args if isinstance(value, ast.Constant)]
        opens_text = name == "open" and (
            any(word in ("r", "w", "a", "x") for word in words) or isinstance(call.func, ast.Name)
        )
        binary = any(isinstance(word, str) and "b" in word and len(word) <= 3 for word in words)
        if name in ("read_text", "write_text") or (opens_text and not binary):
            lines.append(call.lineno)
    return lines


def imports_of(tree: ast.Module) -> set[str]:
    """Modules that the import of a file imports; functions and try blocks may import what is not everywhere."""
    names = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
    return names


def test_the_check_sees_what_it_looks_for():
    bad = "p.read_text()\np.write_text(t)\np.open('w')\nopen(p)\nopen(p, 'a')\n"
    good = "p.read_text(encoding='utf-8')\nopen(p, 'rb')\np.open('wb')\nImage.open(p)\nopen(p, encoding='utf-8')\n"
    assert unnamed_encodings(ast.parse(bad)) == [1, 2, 3, 4, 5]
    assert unnamed_encodings(ast.parse(good)) == []


def test_encodings_are_named():
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in FILES
        for line in unnamed_encodings(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found


def test_imports_exist_everywhere():
    found = {
        str(path.relative_to(ROOT)): names
        for path in FILES
        if (names := imports_of(ast.parse(path.read_text(encoding="utf-8"))) & UNIX_ONLY)
    }
    assert not found


def test_peak_memory_without_the_unix_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "resource", None)  # what importing it on Windows amounts to
    memory = SimpleNamespace(peak_wset=3 * 2**20)
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(memory_info=lambda: memory))
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    runs = importlib.import_module("common.runs")
    if not runs.torch.cuda.is_available():
        assert runs._peak_memory_mb() == pytest.approx(3)
