"""``itnet info``: counts, JSON, and errors in one line with exit code 2."""

import json

import pytest
from typer.testing import CliRunner

from configuration_itnet import ITNetConfig
from modeling_itnet import ITNetForImageClassification, ITNetModel
from modeling_itnet.cli import app
from modeling_itnet.parameters import PAPER_BASE, count_parameters, parameter_table


@pytest.fixture
def run():
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


def test_base_rows_are_those_of_the_papers_table():
    """The paper's rows are right, only their sum is not: W2 per head makes 148 M, not 86 M."""
    table = parameter_table("itnet-base", ITNetConfig.from_preset("itnet-base"))
    for component, printed in PAPER_BASE.items():
        assert table.components[component] == pytest.approx(printed, rel=0.05), component
    assert table.total > sum(PAPER_BASE.values()) * 0.99
    assert table.paper_total == 86e6


def test_counts_are_the_models(tmp_path):
    config = ITNetConfig.from_preset("itnet-tiny", num_labels=7)
    model = ITNetForImageClassification(config)
    counts = count_parameters(model)
    assert sum(counts.values()) == model.num_parameters()
    assert counts["head"] == 7 * (config.hidden_size + 1)
    assert parameter_table("itnet-tiny", config).total == ITNetModel(config).num_parameters()


def test_json_and_table_agree(run):
    as_json = json.loads(run("info", "itnet-tiny", "--json").stdout)
    assert as_json["itnet-tiny"]["total"] == 325376
    printed = run("info", "itnet-tiny").stdout
    assert "325,376" in printed and "kernel W2" in printed


def test_checkpoint_folder(run, tmp_path):
    ITNetConfig.from_preset("itnet-tiny", num_hidden_layers=1).save_pretrained(tmp_path)
    total = json.loads(run("info", str(tmp_path), "--json").stdout)[str(tmp_path)]["total"]
    assert total < 325376


def test_unknown_preset_is_one_line(run):
    result = run("info", "itnet-huge")
    assert result.exit_code == 2
    assert result.stderr.startswith("itnet: unknown preset 'itnet-huge'") and result.stderr.count("\n") == 1
