"""Model cards: valid metadata, real figures, and in step with the presets."""

import re
from pathlib import Path

import pytest
from huggingface_hub import EvalResult, ModelCard
from typer.testing import CliRunner

from configuration_itnet import ITNetConfig, preset_names
from modeling_itnet import ITNetForImageClassification, ITNetForPointCloudClassification
from modeling_itnet.analysis.parameters import parameter_table
from modeling_itnet.cli import app
from modeling_itnet.hub import model_card, result_task

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
    assert "No trained weights of this model are published" in card.text
    assert f"`itnet create {name} ./{name}`" in card.text
    width = ITNetConfig.from_preset(name).kernel_hidden_size
    assert f"w = {width} times the multiply-adds of\n  attention" in card.text
    # A bare name would be looked for on the Hub, where nobody has put it.
    assert re.findall(r'from_pretrained\("(.*?)"', card.text) == [f"./{name}"] * 3
    assert "(scripts for training are in its\nrepository)" in card.text


def test_code_of_a_card_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    text = (CARDS / "itnet-tiny.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"`itnet (create .*?)`", text)
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 0, result.output
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        names = {}
        exec(block, names)
        assert type(names["model"]).__name__ == "ITNetModel"


def test_titles_tasks_and_data(tmp_path):
    config = ITNetConfig.from_preset("itnet-tiny", modality="point_cloud")
    assert result_task(ITNetForPointCloudClassification) == "other"  # the Hub has no task for point clouds
    assert result_task(ITNetForImageClassification) == "image-classification"
    model_card(
        "runs/a-model",
        config,
        ITNetForPointCloudClassification,
        has_code=False,
        title="A model of shapes",
        datasets=["someone/shapes"],
        about_data="All of the shapes.",
    ).save(tmp_path / "README.md")
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.datasets == ["someone/shapes"]
    assert "# A model of shapes\n" in card.text and "## Data\n\nAll of the shapes.\n" in card.text
    assert '.from_pretrained("runs/a-model")' in card.text and "trust_remote_code=True)" not in card.text


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
