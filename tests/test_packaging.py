"""What the wheel and the source distribution hold, and that the command of the wheel works where there is no clone."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from modeling_itnet import __version__

ROOT = Path(__file__).resolve().parents[1]
BUILD = "import setuptools.build_meta as b; b.build_wheel('dist'); b.build_sdist('dist')"
MAIN = "from itnet_command import main; main()"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Folder with the two distributions, built of a copy."""
    copy = tmp_path_factory.mktemp("build") / "clone"
    unwanted = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "outputs", "generated")

    def ignore(folder, names):
        return {*unwanted(folder, names), *(["data"] if Path(folder) == ROOT else [])}

    shutil.copytree(ROOT, copy, ignore=ignore)
    subprocess.run([sys.executable, "-c", BUILD], cwd=copy, check=True, capture_output=True)
    return copy / "dist"


@pytest.fixture(scope="module")
def itnet(built, tmp_path_factory):
    """itnet(*arguments, cwd=...): the command of the wheel."""
    site = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        wheel.extractall(site)

    def call(*arguments, cwd):
        command = [sys.executable, "-c", MAIN, *arguments]
        environment = {**os.environ, "PYTHONPATH": str(site)}
        return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)

    return call


def test_wheel(built):
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
        (entry,) = [name for name in names if name.endswith("entry_points.txt")]
        assert b"itnet = itnet_command:main" in wheel.read(entry)
    packages = {"configuration_itnet", "itnet_kernels", "modeling_itnet", "itnet_command.py"}
    assert {name.split("/")[0] for name in names} == packages | {entry.split("/")[0]}
    assert {"modeling_itnet/hub/card_template.md", "configuration_itnet/presets/itnet-tiny.json"} < names


def test_sdist_is_the_repository(built):
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    files = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("configuration/recipes/*.yaml"), *ROOT.glob("docs/*.md")]
    files += [*ROOT.glob("examples/**/*.py"), *ROOT.glob("examples/checkpoints/*/*"), *ROOT.glob("model_cards/*.md")]
    files += [*ROOT.glob("docs/api/*.md"), *ROOT.glob("docs/guides/*"), *ROOT.glob("docs/*.py")]
    files += [ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md")]
    files += [ROOT / name for name in ("constraints.txt", "constraints-lowest.txt", "examples/data/download.py")]
    assert {file.relative_to(ROOT).as_posix() for file in files} <= names
    assert not [name for name in names if name.endswith((".pyc", "__pycache__"))]


def test_command_of_the_wheel(itnet, tmp_path):
    assert itnet("--version", cwd=tmp_path).stdout == f"itnet {__version__}\n"
    done = itnet("train", "fashion_mnist-cpu", cwd=tmp_path)
    assert done.returncode == 2 and "there is no clone of the repository around" in done.stderr
    done = itnet("train", "fashion_mnist-cpu", "--dry-run", cwd=ROOT / "docs")  # scripts are those of the clone
    assert str(ROOT / "examples" / "run_image_classification.py") in done.stdout, done.stderr
    done = itnet("create", "itnet-tiny", "m", cwd=tmp_path)
    assert done.returncode == 0 and (tmp_path / "m" / "modeling_itnet.py").exists(), done.stderr


def test_bounds_are_what_was_tested():
    """Every lower bound of pyproject.toml is the version in constraints-lowest.txt; the document names both sets."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project = project[project.index("dependencies = [") : project.index("[project.scripts]")]
    bounds = dict(re.findall(r'"([\w-]+)>=([\d.]+)', project))
    pinned, lowest = (
        dict(re.findall(r"^([\w.-]+)==([\w.]+)", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE))
        for name in ("constraints.txt", "constraints-lowest.txt")
    )
    untested = {"performer-pytorch", "nystrom-attention", "linear-attention-transformer", "neuraloperator"}  # extras
    for name, bound in bounds.items():
        if name not in untested:
            assert f"{lowest[name.lower().replace('_', '-')]}.0.0".startswith(f"{bound}."), name
    page = (ROOT / "docs" / "hf_compat.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([a-z, ]+) \| ([\d., ]+) \| ([\d., ]+) \|$", page, re.MULTILINE)
    named = {name for row in rows for name in row[0].split(", ")}
    assert {"torch", "transformers", "accelerate", "datasets", "peft"} <= named
    for names, *columns in rows:
        for versions, column in zip((pinned, lowest), columns, strict=True):
            assert [versions[name] for name in names.split(", ")] == column.split(", "), names
