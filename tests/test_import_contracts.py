"""Imports point one way: the contracts of pyproject.toml hold, and a breach of each is found."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("modeling_itnet", "configuration/configuration_itnet", "kernels/itnet_kernels")
CHECK = "from importlinter.cli import lint_imports; import sys; sys.exit(lint_imports(no_cache=True))"


def check(root: Path) -> subprocess.CompletedProcess:
    """Reads the imports of the three packages in ``root``, without importing them."""
    paths = os.pathsep.join(str(root / name) for name in (".", "configuration", "kernels"))
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONUTF8": "1"}
    return subprocess.run(
        [sys.executable, "-c", CHECK], cwd=root, env=environment, capture_output=True, text=True, encoding="utf-8"
    )


def test_contracts_hold():
    result = check(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    assert " 0 broken" in result.stdout


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("modeling_itnet/domain.py", "from .analysis import diagnosis"),
        ("modeling_itnet/operator.py", "from .layers import ITNetLayer"),
        ("modeling_itnet/integration/near.py", "from ..operator import ITNetOperator"),  # which the domain imports
        ("modeling_itnet/heads/image.py", "from ..hub.export import write_code"),
        ("modeling_itnet/encoders/text.py", "from modeling_itnet import ITNetConfig"),  # which imports everything
        ("modeling_itnet/analysis/diagnosis.py", "from ..training import optimization"),
        ("modeling_itnet/hub/card.py", "from ..cli import app"),
        ("kernels/itnet_kernels/weights.py", "import transformers"),
        ("kernels/itnet_kernels/weights.py", "import configuration_itnet"),
        ("configuration/configuration_itnet/rules.py", "def late():\n    from modeling_itnet import domain"),
    ],
)
def test_breach_is_found(tmp_path, file, line):
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    path = tmp_path / file
    path.write_text(f"{path.read_text(encoding='utf-8')}\n{line}\n", encoding="utf-8")
    result = check(tmp_path)
    assert result.returncode == 1 and "BROKEN" in result.stdout, result.stdout + result.stderr
