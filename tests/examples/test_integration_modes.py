"""The tutorial of the integration modes, with small settings."""

import pytest
import torch

from modeling_itnet import ITNetConfig, ITNetForImageClassification, ITNetImageProcessor


def test_integration_modes(printed_rows, tmp_path):
    """All positions as anchors are exact, and the error of a Monte Carlo estimate falls as 1/sqrt(M)."""
    with pytest.raises(SystemExit, match=r"nothing holds no model.*quickstart"):
        printed_rows("integration_modes", "--model", tmp_path / "nothing")
    torch.manual_seed(0)
    config = ITNetConfig(modality="image", image_size=28, patch_size=7, num_channels=1, hidden_size=16,
                         num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, kernel_hidden_size=8,
                         num_fourier_features=4, fourier_scale=1.0, kernel_init_scale=1.0, num_labels=10,
                         integration_mode="exact")  # fmt: skip
    processor = ITNetImageProcessor.from_model_config(config)
    ITNetForImageClassification(config).save_pretrained(tmp_path / "model", processor=processor)
    options = ("--model", tmp_path / "model", "--output_dir", tmp_path, "--ranks", 1, 4, "--samples", 16, 256)
    rows = printed_rows("integration_modes", *options, "--calibration", 64, "--test", 20, "--steps", 20)
    by_rank = {row[0]: float(row[3]) for row in rows if len(row) == 5 and row[0].isdigit()}
    assert by_rank["4"] < by_rank["1"]
    anchors, samples = (
        {row[0]: row[1:] for row in rows if len(row) == 3 and ("%" in row[2]) == kind} for kind in (1, 0)
    )
    assert float(anchors["256"][0]) == 0 < float(anchors["16"][0])
    assert 0.7 < float(samples["256"][1]) / float(samples["16"][1]) < 1.4  # error times sqrt(M), over 20 draws each
    assert (tmp_path / "monte_carlo_error.png").exists()
