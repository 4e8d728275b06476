"""The scripts behind docs/paper_audit.md, with small settings: what they print is what the page says of them."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

from modeling_itnet import ITNetConfig, ITNetForImageClassification, ITNetImageProcessor

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def printed(monkeypatch, capsys):
    """printed(script, *arguments): the rows that an example prints, as lists of cells."""

    def run(script, *arguments):
        spec = importlib.util.spec_from_file_location(script, EXAMPLES / f"{script}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        default = torch.get_default_dtype()
        try:
            spec.loader.exec_module(module)
            module.main()
        finally:
            torch.set_default_dtype(default)
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
        return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]

    return run


def test_witnesses(printed):
    rows = printed("witnesses")
    witnesses = [row for row in rows[1:] if len(row) == 5]
    assert len(witnesses) == 6
    assert all(float(row[2]) < 1e-10 < float(row[4]) for row in witnesses)
    forms = {row[0]: (float(row[1]), row[2]) for row in rows if len(row) == 3 and row[0] != "operator"}
    assert {name for name, (difference, _) in forms.items() if difference < 1e-12} == {
        "the ITNet operator",
        "nn.Conv1d",
        "linear state space",
    }
    assert all((needs == "nothing") == (difference < 1e-12) for difference, needs in forms.values())
    assert forms["softmax attention"][0] > 1e-5


def test_paper_arithmetic(printed):
    rows = printed("paper_arithmetic")[1:]
    agrees = {row[0]: row[3] for row in rows}
    assert agrees["GLUE average, ITNet-B"] == "yes"
    assert agrees["parameters of ITNet-B, 12 layers, no embeddings"] == "NO"
    assert {agrees[name] for name in agrees if name.startswith("throughput ratios")} == {"yes"}
    contradictions = [name for name in agrees if agrees[name] == "NO"]
    for table in ("imagenet", "ablation_kernel_full", "ablation_measure_full", "rank_sweep", "baseline_comparison",
                  "memory_breakdown", "ablation_kappa", "ablation_layers"):  # fmt: skip
        assert any(table in name for name in contradictions), table
    measured = next(row[2] for row in rows if row[0].startswith("App. init: ‖K‖_F"))
    assert 0 < float(measured.split()[0]) < 0.5 * 0.064


def test_translation_invariance(printed, tmp_path):
    rows = printed("translation_invariance", "--steps", 60, "--points", 8, "--output_dir", tmp_path)[1:]
    largest = {row[0]: float(row[1].split(",")[1]) for row in rows}
    exact = [name for name in largest if name in ("free kernel, TI at the start", "kernel MLP of x-y")]
    assert len(exact) == 2
    assert all((value < 1e-10) == (name in exact) for name, value in largest.items())
    assert (tmp_path / "shares.png").exists()


def test_integration_modes(printed, tmp_path, monkeypatch):
    """All positions as anchors are exact, and the error of a Monte Carlo estimate falls as 1/sqrt(M)."""
    monkeypatch.syspath_prepend(EXAMPLES)  # for its sibling, the quickstart
    with pytest.raises(SystemExit, match=r"nothing holds no model.*quickstart"):
        printed("integration_modes", "--model", tmp_path / "nothing")
    torch.manual_seed(0)
    config = ITNetConfig(modality="image", image_size=28, patch_size=7, num_channels=1, hidden_size=16,
                         num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, kernel_hidden_size=8,
                         num_fourier_features=4, fourier_scale=1.0, kernel_init_scale=1.0, num_labels=10,
                         integration_mode="exact")  # fmt: skip
    processor = ITNetImageProcessor.from_model_config(config)
    ITNetForImageClassification(config).save_pretrained(tmp_path / "model", processor=processor)
    options = ("--model", tmp_path / "model", "--output_dir", tmp_path, "--ranks", 1, 4, "--samples", 16, 256)
    rows = printed("integration_modes", *options, "--calibration", 64, "--test", 20, "--steps", 20)
    by_rank = {row[0]: float(row[3]) for row in rows if len(row) == 5 and row[0].isdigit()}
    assert by_rank["4"] < by_rank["1"]
    anchors, samples = (
        {row[0]: row[1:] for row in rows if len(row) == 3 and ("%" in row[2]) == kind} for kind in (1, 0)
    )
    assert float(anchors["256"][0]) == 0 < float(anchors["16"][0])
    assert 0.7 < float(samples["256"][1]) / float(samples["16"][1]) < 1.4  # error times sqrt(M), over 20 draws each
    assert (tmp_path / "monte_carlo_error.png").exists()


def test_universal_approximation(printed):
    arguments = ("--widths", 8, 64, "--steps", 40, "--points", 16, "--samples", 48, "--quadrature", 8, 32)
    rows = printed("universal_approximation", *arguments)
    by_width = {(row[0], row[1]): float(row[3]) for row in rows if row[1] in ("8", "64") and len(row) == 5}
    for operator in ("selective blur", "running energy"):
        assert by_width[operator, "64"] < by_width[operator, "8"]
    exponents = {row[0]: float(row[2]) for row in rows if row[1] == "exponent" and len(row) == 4}
    assert exponents["selective blur"] < -1.8
    assert -1.2 < exponents["running energy"] < -0.8
