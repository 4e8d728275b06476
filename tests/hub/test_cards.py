"""Model cards: valid metadata, real figures, and in step with the presets."""

from pathlib import Path

import pytest
from huggingface_hub import EvalResult, ModelCard
from typer.testing import CliRunner

from configuration_itnet import ITNetConfig, preset_names
from modeling_itnet import ITNetForImageClassification
from modeling_itnet.cli import app
from modeling_itnet.hub import model_card
from modeling_itnet.parameters import parameter_table

CARDS = Path(__file__).parents[2] / "model_cards"


def test_cards_are_up_to_date(tmp_path):
    result = CliRunner().invoke(app, ["cards", str(CARDS), "--check"])
    assert result.exit_code == 0, result.stderr
    result = CliRunner().invoke(app, ["cards", str(tmp_path), "--check"])
    assert result.exit_code == 2 and "out of date: itnet-base.md" in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", preset_names())
def test_preset_card(name):
    card = ModelCard.load(CARDS / f"{name}.md")
    assert card.data.library_name == "transformers" and card.data.license == "apache-2.0"
    assert card.data.pipeline_tag in ("image-feature-extraction", "feature-extraction")
    assert {"itnet", "custom_code"} <= set(card.data.tags)
    assert "model-index" not in card.content  # untrained
    total = parameter_table(name, ITNetConfig.from_preset(name)).total
    assert f"**{total:,}**" in card.text and "The weights are random" in card.text


def test_results_become_a_model_index(tmp_path):
    result = EvalResult(
        task_type="image-classification",
        dataset_type="fashion_mnist",
        dataset_name="Fashion-MNIST",
        metric_type="accuracy",
        metric_value=0.9,
        metric_args={"command": "make demo"},
    )
    config = ITNetConfig.from_preset("itnet-tiny", num_labels=10)
    model_card("someone/itnet", config, ITNetForImageClassification, [result]).save(tmp_path / "README.md")
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.eval_results == [result]
    assert "| Fashion-MNIST | accuracy | 0.9 | `make demo` |" in card.text
    assert "random" not in card.text
