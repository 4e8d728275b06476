"""Every command of the documents works from a clone: whole where it is quick, for a step where it trains."""

import ast
import fnmatch
import importlib.metadata
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from _pytest.mark.expression import Expression
from PIL import Image
from typer.testing import CliRunner

from modeling_itnet.cli import app
from modeling_itnet.hub import create_checkpoint
from modeling_itnet.training.recipes import find_recipe

from .extract import ROOT, Command, commands, documents

#: Written in the place of an argument, in capitals or in brackets.
PLACEHOLDER = re.compile(r"^\[?[A-Z]{3,}\]?$")

#: What makes a long command short. It takes the place of what the document says.
SHORTER = {
    "docs/figures/kernels_boot.py": ["--output", "boot.png"],
    "examples/quickstart.py": ["--max_steps", "1", "--output_dir", "quickstart"],
    "examples/generate_text.py": ["--steps", "1", "--output_dir", "language"],
    "examples/results/table.py": ["--check"],
    "examples/integration_modes.py": [
        *("--model", "exact", "--output_dir", "modes", "--ranks", "1", "--samples", "4"),
        *("--calibration", "8", "--test", "8", "--steps", "1"),
    ],
    "examples/kernel_diagnosis.py": ["--model", "exact", "--output_dir", "diagnosis", "--images", "2"],
    "examples/paper/universal_approximation.py": [
        *("--widths", "4", "8", "--steps", "2", "--points", "8", "--samples", "4", "--quadrature", "4", "8")
    ],
    "examples/paper/translation_invariance.py": [
        "--points",
        "6",
        "--samples",
        "2",
        "--steps",
        "3",
        "--output_dir",
        "ti",
    ],
    "itnet bench": ["-n", "8", "--rounds", "1"],
    "itnet train": ["-o", "max_steps=1", "-o", "output_dir=run", "-o", "max_eval_samples=4"],
}
#: Long, or for another machine: that the options are known is all that is checked here, and where it runs is said.
HELP_ONLY = {
    "examples/results/kernel_figures.py": "tests/results/test_kernel_figures.py",
    "examples/results/mode_accuracy.py": "tests/results/test_mode_accuracy.py",
    "examples/results/recall.py": "tests/results/test_recall.py",
    "examples/results/language.py": "tests/results/test_language.py",
    "examples/results/evidence.py": "tests/results/test_evidence.py",
    "examples/results/force_law.py": "tests/results/test_evidence.py",
    "examples/results/make_checkpoints.py": "tests/examples/test_checkpoints.py",
    "examples/data/download.py": "tests/examples/test_download.py",
    "examples/data/make_fashion_mnist_small.py": "needs the whole Fashion-MNIST",
    "kernels/benchmarks/run.py": "tests/kernels/test_benchmarks.py",
    "kernels/hub_repository.py": "tests/kernels/test_hub_kernel.py",
    "kernels/benchmarks/inspect_kernels.py": "tests/kernels/test_triton_compile.py",
    "kernels/benchmarks/inspect_modes.py": "tests/kernels/test_triton_modes.py",
    "kernels/benchmarks/bench_gpu.py": "tests/kernels/test_bench_gpu.py",
    "kernels/benchmarks/exact_limit.py": "tests/kernels/test_triton_compile.py",
    "tests/hf_suite/run.py": "needs a clone of Transformers",
    "tests/fuzz/run.py": "tests/fuzz",
    "tests/sweep.py": "runs this suite",
    "tests.explorer.record": "tests/explorer",
    "examples/space/app.py": "tests/explorer/test_space.py",
}
#: Run whole without arguments; any other bare `itnet NAME` in a text is the name of a command.
WITHOUT_ARGUMENTS = ("itnet info", "itnet bench", "itnet verify")


def distinct() -> list[Command]:
    found = {command.text: command for path in documents() for command in commands(path)}
    return [found[text] for text in sorted(found)]


def kind(command: Command) -> str:
    words = shlex.split(command.text)
    program = os.path.basename(words[0])
    if command.text.startswith(("git clone", "source", ".venv/bin/pre-commit")) or command.text == "python -I":
        return "foreign"  # a program that a reader has anyway, with arguments that nothing here can check
    if program == "pytest" or words[:3] == ["python", "-m", "pytest"]:
        return "pytest"
    if program == "python" and words[1] == "-c":
        return "code"
    if program in ("torchrun", "accelerate"):
        return "launch"
    if words[:2] == ["python", "examples/results/run.py"]:
        return "grid"
    return program


def of_kind(*kinds: str) -> list:
    return [pytest.param(c, id=c.text[:80]) for c in distinct() if kind(c) in kinds]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """What the commands of the documents may name: a model, an exact model, a text, a picture."""
    folder = tmp_path_factory.mktemp("documents")
    create_checkpoint("itnet-tiny", folder / "itnet-tiny")
    create_checkpoint(
        "itnet-tiny",
        folder / "exact",
        task="image-classification",
        integration_mode="exact",
        image_size=28,
        num_channels=1,
        patch_size=7,
        num_labels=10,
    )
    create_checkpoint("itnet-tiny", folder / "language-model", task="causal-lm", num_hidden_layers=1)
    (folder / "corpus.txt").write_text("the red square is left of the blue circle\n" * 50, encoding="utf-8")
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (28, 28), dtype=np.uint8)).save(folder / "picture.png")
    return folder


def run(words: list[str], folder, **environment: str) -> subprocess.CompletedProcess:
    """Runs a command in ``folder``; paths of the repository are made absolute."""
    words = [str(ROOT / word) if (ROOT / word).exists() and "/" in word else word for word in words]
    words[0] = sys.executable
    paths = [str(ROOT), str(ROOT / "configuration"), str(ROOT / "kernels")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths), **environment}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done


@pytest.mark.parametrize("command", of_kind("make"))
def test_make(command):
    done = subprocess.run([*shlex.split(command.text), "--dry-run"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", of_kind("pip"))
def test_pip(command):
    """Extras exist, and nothing is installed by a name that no index has."""
    names = [word for word in shlex.split(command.text)[2:] if not word.startswith("-")]
    extras = importlib.metadata.metadata("itnet").get_all("Provides-Extra")
    known = {re.split(r"[<>=!~\[; ]", line)[0].lower() for line in importlib.metadata.requires("itnet")}
    for name in names:
        base, bracket, inside = name.partition("[")
        assert base != "itnet", f'{command.document}: the package is on no index; write ".[extra]"'
        if bracket:
            assert base == "." and set(inside.rstrip("]").split(",")) <= set(extras), name
        elif base not in (".", "constraints.txt"):
            assert base.lower() in known | {"parameterized"}, f"{command.document}: {name}"


@cache
def node_ids() -> list[str]:
    """All tests by the names that stand in their files, without parameters: collecting them takes half a minute."""
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        name = path.relative_to(ROOT).as_posix()
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            of_class = (
                [f"{node.name}::{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)]
                if isinstance(node, ast.ClassDef)
                else []
            )
            own = [node.name] if isinstance(node, ast.FunctionDef) else []
            found += [f"{name}::{test}" for test in own + of_class if test.split("::")[-1].startswith("test")]
    return found


def selected(words: list[str]) -> Iterator[str]:
    """Tests that paths and a -k expression choose, by pytest's own reading of the expression."""
    expression = Expression.compile(words[words.index("-k") + 1]) if "-k" in words else None
    paths = [word for word in words if word.startswith("tests")]
    for node in node_ids():
        if paths and not any(node.startswith(path) for path in paths):
            continue
        if expression is None or expression.evaluate(lambda name, node=node: name.lower() in node.lower()):
            yield node


@pytest.mark.parametrize("command", of_kind("pytest"))
def test_pytest_selects_something(command):
    """The suite runs the tests themselves."""
    words = shlex.split(command.text)
    if words[-2:] != ["-k", "name"]:  # the example in CONTRIBUTING
        assert next(selected(words), None), f"{command.document}: {command.text} selects no test"


def shortened(command: Command, tiny_data) -> list[str]:
    words = shlex.split(command.text)
    if words[:2] != ["itnet", "info"]:  # which reads a preset's name, or a folder's
        words = [word.replace("itnet-base", "itnet-tiny") for word in words]
    script = words[1] if words[0] == "python" else " ".join(words[:2])
    if script in HELP_ONLY or (words[:2] == ["python", "-m"] and words[2] in HELP_ONLY):
        return [*words[: 3 if words[1] == "-m" else 2], "--help"]
    name = os.path.basename(script).removesuffix(".py")
    if name in tiny_data and "--help" not in words:
        options = ["--dataset", str(tiny_data[name]), "--max_steps", "1", "--per_device_train_batch_size", "2"]
        return [*words, *options, "--output_dir", "run", "--overwrite_output_dir", "true", "--use_cpu", "true"]
    shorter = SHORTER.get(script, [])
    return [*without(words, {word for word in shorter if word.startswith("-")}), *shorter]


def without(words: list[str], options: set[str]) -> list[str]:
    """The words of a command but for these options and their values."""
    kept, is_kept = [], True
    for word in words:
        is_kept = word not in options if word.startswith("-") else is_kept
        kept += [word] * is_kept
    return kept


@cache
def help_of(script: tuple[str, ...]) -> str:
    return run([*script, "--help"], ROOT).stdout


@pytest.mark.parametrize("command", of_kind("python"))
def test_python(command, folder, tiny_data):
    words = shortened(command, tiny_data)
    if words[-1] == "--help":
        known = help_of(tuple(words[:-1]))
        options = [word.partition("=")[0] for word in shlex.split(command.text) if word.startswith("--")]
        assert [option for option in options if option not in known] == [], command.document
    else:
        run_once(tuple("made-by-a-command" if PLACEHOLDER.match(word) else word for word in words), folder)


@cache
def run_once(words: tuple[str, ...], folder: Path) -> None:
    """Commands that differ in what was made shorter are one."""
    run(list(words), folder)


@pytest.mark.parametrize("command", of_kind("itnet"))
def test_itnet(command, folder, tiny_data, monkeypatch):
    """Placeholders become folders: the first one a model, a second one of `create`, `export`, `convert` a new one."""
    words = shortened(command, tiny_data)
    is_bare = re.fullmatch(r"itnet [a-z]\S*", command.text)
    if is_bare and command.text not in WITHOUT_ARGUMENTS:
        words = [*words[:2], "--help"]
    values = {"PRESET": "itnet-tiny", "INPUT": "picture.png", "FILES": "picture.png", "[MODEL]": "itnet-tiny"}
    first = {"create": [], "generate": ["language-model"]}.get(words[1], ["exact"])  # the model that it takes
    sources = iter(first)
    for index, word in enumerate(words):
        if PLACEHOLDER.match(word):
            words[index] = values.get(word) or next(sources, f"new-{abs(hash(command.text))}-{index}")
    if words[1] == "create" and not is_bare:
        words[3] = f"new-{abs(hash(command.text))}"
    if words[1] == "convert":
        words += ["--steps", "1"]
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(app, words[1:])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("command", of_kind("grid"))
def test_patterns_of_the_grid_name_runs(command, load_script):
    runs = [run.path.stem for run in load_script("grid").runs()]
    words = shlex.split(command.text)[2:]
    for pattern in words[words.index("--only") + 1 :] if "--only" in words else ["*"]:
        assert fnmatch.filter(runs, pattern), f"{command.document}: no run is called {pattern}"


@pytest.mark.parametrize("command", of_kind("code"))
def test_one_liners(command, folder):
    run([word.replace("itnet-base", "itnet-tiny") for word in shlex.split(command.text)], folder)


@pytest.mark.parametrize("command", of_kind("launch"))
def test_launchers_name_files_that_exist(command):
    """Several processes are started by tests/examples/test_torchrun.py."""
    for word in shlex.split(command.text):
        if word.endswith((".yaml", ".py")) and word != "script.py":
            assert (ROOT / word).is_file(), f"{command.document}: {word}"
        if "recipes" in word:
            find_recipe(word)


def test_nothing_outside_of_the_repository_is_named():
    """A clone is whole: no text, script or recipe points beside it."""
    folders = ("configuration", "docs", "examples", "kernels", "model_cards", "modeling_itnet", "tests")
    kinds = (".md", ".py", ".yaml", ".json", ".toml", ".txt")
    texts = [path for name in folders for path in (ROOT / name).rglob("*") if path.suffix in kinds]
    texts = [path for path in texts if "generated" not in path.parts]
    texts += [path for path in ROOT.iterdir() if path.suffix in kinds]
    outside = "../" + "shared"
    assert len(texts) > 300
    assert [str(path) for path in texts if outside in path.read_text(encoding="utf-8")] == []
