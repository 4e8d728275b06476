"""docs/paper_audit.md: a command in every row, tests that exist behind it, and every numbered result of the paper."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
AUDIT = (ROOT / "docs" / "paper_audit.md").read_text(encoding="utf-8")
ROWS = [line for line in AUDIT.splitlines() if line.startswith("| ") and not line.startswith("| result |")]
COMMANDS = re.findall(r"`((?:itnet|pytest|python|make) ?[^`]*)`", AUDIT)

# Theorems, propositions, lemmas with content, algorithms and tables, by the paper's labels.
RESULTS = [
    *("Theorem 1", "Theorem 2", "## Theorem 3", "Theorem 4", "## Theorem 5", "Cor. ordering"),
    *("Algorithm 1", "Algorithm 2"),
    *("conv_linear", "T_nonlinear", "conv_equivariant", "T_not_equivariant", "Lemma young", "Lemma attn_bound"),
    *("linear_attn", "causal_attn", "Prop. lstm", "Prop. gru", "Prop. rate", "io_full", "mc_var_full", "rank_bound"),
    *("app_param_breakdown", "app_configs", "Table complexity", "bp_complexity", "Table profiling", "Table wallclock"),
    *("memory_breakdown", "rank_sweep", "baseline_comparison", "Table glue", "Table imagenet", "boundary_handling"),
]  # fmt: skip


def test_every_row_has_a_command():
    assert len(ROWS) > 50
    assert [row for row in ROWS if not re.search(r"`(itnet|pytest|python|make) ?[^`]*`", row)] == []


@pytest.mark.parametrize("label", RESULTS)
def test_every_numbered_result_is_there(label):
    assert label in AUDIT


@pytest.mark.parametrize("command", sorted({c for c in COMMANDS if c.startswith("pytest")}))
def test_commands_name_tests_that_exist(command):
    paths = re.findall(r"tests/\S+", command)
    assert paths
    names = " ".join(
        name
        for path in paths
        for file in ([ROOT / path] if path.endswith(".py") else (ROOT / path).rglob("test_*.py"))
        for name in re.findall(r"(?:def|class) (test\w*|Test\w*)|ids?=\[?\"(\w+)", file.read_text(encoding="utf-8"))
        for name in name
    )
    selected = re.search(r"-k (?:\"([^\"]+)\"|(\S+))", command)
    if selected:
        words = re.split(r" or ", selected.group(1) or selected.group(2))
        assert [word for word in words if word not in names] == []


@pytest.mark.parametrize("command", sorted({c for c in COMMANDS if c.startswith("python")}))
def test_scripts_exist(command):
    assert (ROOT / command.split()[1]).exists()
