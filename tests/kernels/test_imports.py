"""The package without Triton, and next to Hugging Face's ``kernels``."""

import ast
import subprocess
import sys
from pathlib import Path

BLOCK = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Block())
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.split(".")[0] in {blocked} else find_spec(name, *rest)
"""

USE = """
import torch
from itnet_kernels import KernelWeights, integral_transform
u = torch.randn(1, 5, 2, 16, requires_grad=True)
w1, b1, w2, b2 = torch.randn(32, 3 * 4 + 1 + 3 * 16), torch.randn(32), torch.randn(2, 256, 32), torch.randn(2, 256)
weights = KernelWeights(w1, b1, w2, b2, fourier=torch.randn(2, 1))
positions = torch.rand(5, 1)
for backend in ("auto", "tiled", "reference"):
    integral_transform(u, positions, weights, backend=backend).sum().backward()
try:
    integral_transform(u, positions, weights, backend="triton")
except ValueError as error:
    print(error)
"""


def run(code: str, environment: dict[str, str]) -> str:
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_everything_but_triton_works_without_triton(subprocess_environment):
    out = run(BLOCK.format(blocked={"triton"}) + USE, subprocess_environment)
    assert "cannot run: the triton package is not installed: pip install triton" in out


def test_triton_on_cpu_says_why_not(subprocess_environment):
    out = run(USE, subprocess_environment)
    assert "`u` is on cpu" in out and "TRITON_INTERPRET=1" in out


def test_import_neither_imports_triton_nor_looks_for_a_gpu(subprocess_environment):
    code = """
import sys, torch
before = set(sys.modules)
import itnet_kernels
assert not [name for name in set(sys.modules) - before if name.split(".")[0] == "triton"]
assert not torch.cuda.is_initialized()
"""
    run(code, subprocess_environment)


def test_every_module_guards_its_import_of_triton():
    """The loader of Hub code takes an import of Triton for a requirement unless it is in a ``try``."""
    package = Path(__file__).parents[2] / "kernels" / "itnet_kernels"
    found = 0
    for path in package.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        guarded = {inner for node in nodes if isinstance(node, ast.Try) for inner in ast.walk(node)}
        imports = [node for node in nodes if imports_triton(node)]
        assert guarded.issuperset(imports), path.name
        found += len(imports)
    assert found > 0


def imports_triton(node: ast.AST) -> bool:
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
    return any(name.split(".")[0] == "triton" for name in names)


def test_the_folder_kernels_is_not_a_package():
    assert not (Path(__file__).parents[2] / "kernels" / "__init__.py").exists()
