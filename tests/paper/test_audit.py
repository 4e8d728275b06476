"""docs/paper_audit.md: a row for every numbered result of the paper, verdicts from a list, commands that can run."""

import ast
import re
import shlex
from pathlib import Path

import pytest
import typer

from modeling_itnet.cli import app

ROOT = Path(__file__).parents[2]
AUDIT = (ROOT / "docs" / "paper_audit.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip().strip("|").split(" | ")]
    for line in AUDIT.splitlines()
    if line.startswith("| ") and not line.startswith("| result |")
]
VERDICTS = tuple(re.findall(r"^- \*\*(.+?)\*\*:", AUDIT, re.MULTILINE))
COMMANDS = sorted(
    {c for row in ROWS for cell in row for c in re.findall(r"`((?:itnet|pytest|python|make) [^`]*)`", cell)}
)

# Every label of a theorem, proposition, lemma, corollary, algorithm and table in the source of the paper.
LABELS = [
    *(f"Theorem {k}" for k in range(1, 6)),
    "Def. itnet_operator",
    "Cor. ordering",
    "Algorithm 1",
    "Algorithm 2",
    *(f"Lemma {name}" for name in ("scalar_id", "young", "attn_bound", "mlp_uat", "chen_chen", "kernel_approx")),
    *(
        f"Prop. {name}"
        for name in (
            *("conv_linear", "T_nonlinear", "conv_equivariant", "T_not_equivariant", "linear_attn", "causal_attn"),
            *("lstm", "gru", "rate", "io_full", "mc_var_full", "rank_bound"),
        )
    ),
    *(
        f"Table {name}"
        for name in (
            *("imagenet", "glue", "modelnet", "multimodal", "ablation_kernel_full"),
            *("notation1", "notation2", "notation3", "complexity", "app_configs", "app_param_breakdown", "profiling"),
            *("bp_complexity", "hp_imagenet", "hp_modelnet", "wallclock", "rank_sweep", "baseline_comparison"),
            *("memory_breakdown", "ablation_kappa", "ablation_pc", "ablation_measure_full", "ablation_fourier"),
            *("ablation_layers",),
        )
    ),
]


@pytest.mark.parametrize("label", LABELS)
def test_every_numbered_result_has_a_row_of_its_own(label):
    """A row that begins with the label."""
    assert [row[0] for row in ROWS if re.match(rf"{re.escape(label)}(?![\w])", row[0])]


def test_every_row_has_a_command_an_outcome_and_a_verdict():
    assert VERDICTS[:2] == ("holds", "holds with an addition") and len(VERDICTS) == 8
    for row in ROWS:
        assert len(row) == 4, row
        assert re.search(r"`(itnet|pytest|python|make) [^`]*`", row[1]), row
        assert row[2], row
        assert re.match(rf"({'|'.join(VERDICTS)})(?![\w])", row[3]), row


def test_every_verdict_is_in_use():
    assert [verdict for verdict in VERDICTS if not any(row[3].startswith(verdict) for row in ROWS)] == []


def functions(path: Path) -> set[str]:
    """Names of the tests of a file, or of a folder."""
    files = [path] if path.suffix else path.rglob("test_*.py")
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef) and "est" in node.name[:4]}


def check_pytest(words: list[str]) -> None:
    paths = [ROOT / word for word in words if word.startswith("tests/")]
    assert paths and all(path.exists() for path in paths)
    names = set().union(*(functions(path) for path in paths))
    assert names
    if "-k" in words:
        chosen = words[words.index("-k") + 1].split(" or ")
        assert [word for word in chosen if not any(word in name for name in names)] == []


def check_python(words: list[str]) -> None:
    """The script parses, has a main, and declares the options that the command gives it."""
    source = (ROOT / words[0]).read_text(encoding="utf-8")
    assert any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in ast.parse(source).body)
    assert [word for word in words[1:] if word.startswith("--") and f'"{word}"' not in source] == []


def check_itnet(words: list[str]) -> None:
    """The arguments parse: the name of the command, of a recipe or preset, and every option."""
    group = typer.main.get_command(app)
    name, command, rest = group.resolve_command(typer.Context(group), words)
    command.make_context(name, list(rest), resilient_parsing=False)


def check_make(words: list[str]) -> None:
    assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_can_be_run(command):
    tool, *words = shlex.split(command)
    {"pytest": check_pytest, "python": check_python, "itnet": check_itnet, "make": check_make}[tool](words)


def test_commands_that_cannot_be_run_are_found():
    with pytest.raises(AssertionError):
        check_pytest(["tests/paper/test_claims.py", "-k", "no_such_test"])
    with pytest.raises((AssertionError, FileNotFoundError)):
        check_python(["examples/no_such_script.py"])
    with pytest.raises(Exception, match="nosuch"):
        check_itnet(["verify", "--nosuch"])
    with pytest.raises(AssertionError):
        check_make(["nosuch"])
