"""Every recipe names a script, makes its model at full size, and trains two steps of a small one."""

import json

import pytest
import torch
from typer.testing import CliRunner

from modeling_itnet import (
    ITNetForGraphClassification,
    ITNetForImageClassification,
    ITNetForImagesAndTextClassification,
    ITNetForMaskedLM,
    ITNetForPointCloudClassification,
    ITNetForSequenceClassification,
    ITNetForSignalRegression,
    ITNetForVisualQuestionAnswering,
)
from modeling_itnet.cli import app
from modeling_itnet.training.recipes import RECIPES, find_recipe, read_recipe, recipe_names, recipe_options

# Modality and head by script.
HEADS = {
    "run_image_classification": ("image", ITNetForImageClassification),
    "run_point_cloud": ("point_cloud", ITNetForPointCloudClassification),
    "run_operator_learning": ("signal", ITNetForSignalRegression),
    "run_glue": ("text", ITNetForSequenceClassification),
    "run_mlm": ("text", ITNetForMaskedLM),
    "run_vqa": ("multimodal", ITNetForVisualQuestionAnswering),
    "run_nlvr": ("multimodal", ITNetForImagesAndTextClassification),
    "run_graph_classification": ("graph", ITNetForGraphClassification),
}
SMALL = ["num_hidden_layers=1", "hidden_size=16", "num_attention_heads=2", "intermediate_size=16", "rank=2"]
SMALL += ["kernel_hidden_size=4", "num_fourier_features=4", "factor_hidden_size=4", "local_neighbors=2"]
STEPS = ["--max_steps", "2", "--per_device_train_batch_size", "4", "--logging_steps", "1", "--save_strategy", "no"]
# Data, lengths and numbers of workers that fit the tiny data.
FIT = {
    "run_image_classification": ["--dataloader_num_workers", "0"],
    "run_mlm": ["--train_split", "train", "--eval_split", "validation", "--dataset_config", "none"],
    "run_graph_classification": ["--num_folds", "2", "--max_folds", "1"],
    "run_point_cloud": ["--num_points", "16"],
}
PARAMETERS = {"imagenet-small": (20e6, 60e6), "imagenet-base": (100e6, 200e6), "imagenet-large": (300e6, 600e6)}


@pytest.mark.parametrize("name", recipe_names())
def test_model_is_built(load_script, name):
    """On the meta device, where sizes count and memory does not."""
    arguments = load_script("common.arguments")
    recipe = read_recipe(find_recipe(name))
    modality, head = HEADS[recipe["script"]]
    settings = [f"{key}={json.dumps(value)}" for key, value in recipe.get("config_overrides", {}).items()]
    task = {"signal": {"position_dim": 2, "signal_feature_size": 1}, "multimodal": {"num_labels": 10}}
    config = arguments.ModelArguments(preset=recipe["preset"], config_overrides=settings).config(
        modality, **task.get(modality, {})
    )
    with torch.device("meta"):
        model = head(config)
    assert model.num_parameters() > 1e4
    if name in PARAMETERS:
        low, high = PARAMETERS[name]
        assert low < model.num_parameters() < high


@pytest.mark.parametrize("name", recipe_names())
def test_two_steps(run_script, tiny_data, name):
    recipe = read_recipe(find_recipe(name))
    script = recipe["script"]
    data = tiny_data[script] / "pairs" if name.startswith("nlvr2") else tiny_data[script]
    overrides = list(SMALL)
    if "image_size" in recipe.get("config_overrides", {}):
        overrides += ["image_size=16", "patch_size=8"]
    options = [*STEPS, *FIT.get(script, []), "--dataset", str(data), "--config_overrides", *overrides]
    if "learning_rates" in recipe:
        options += ["--learning_rates", "1e-3"]
    if "second_seq_length" in recipe:  # one step of each phase
        options += ["--max_seq_length", "8", "--second_seq_length", "16", "--first_phase_steps", "1"]
    results = run_script(script, str(RECIPES / f"{name}.yaml"), *options)
    assert results["steps"] == 2
    assert all(value == value for value in results["metrics"].values())
    assert results["cpu_seconds"] > 0 and results["peak_memory_mb"] > 0


@pytest.mark.parametrize(
    ("recipe", "model_type"),
    [
        ("cifar10-cpu", "vit"),
        ("cifar10-cpu", "convnet"),
        ("modelnet10-cpu", "pointnet"),
        ("modelnet10-cpu", "point_transformer"),
        ("sst2-cpu", "bert"),
        ("wikitext2-cpu", "bert"),
        ("easy_vqa-cpu", "vilt"),
        ("nlvr2-base", "vilt"),
        ("mutag-cpu", "gin"),
        ("darcy-cpu", "fno"),
        ("darcy-cpu", "gno"),
    ],
)
def test_peers(run_script, tiny_data, recipe, model_type):
    if model_type in ("fno", "gno"):
        pytest.importorskip("neuralop")
    script = read_recipe(find_recipe(recipe))["script"]
    data = tiny_data[script] / "pairs" if recipe == "nlvr2-base" else tiny_data[script]
    overrides = [*SMALL, "image_size=16", "patch_size=8"]
    options = [*STEPS, *FIT.get(script, []), "--dataset", str(data), "--model_type", model_type]
    results = run_script(script, str(RECIPES / f"{recipe}.yaml"), *options, "--config_overrides", *overrides)
    assert results["model_type"] == model_type and results["integration_mode"] is None


@pytest.mark.parametrize("mode", ["exact", "monte_carlo", "low_rank"])
def test_modes(run_script, tiny_data, mode):
    """Every mode trains, and is recorded."""
    options = [*STEPS, "--dataset", str(tiny_data["run_image_classification"]), "--integration_mode", mode]
    overrides = ["--config_overrides", *SMALL, "image_size=16", "patch_size=8", "num_samples=2"]
    recipe = str(RECIPES / "cifar10-cpu.yaml")
    results = run_script("run_image_classification", recipe, *options, *overrides)
    assert results["integration_mode"] == mode


def test_proposal_loss_is_added(run_script, tiny_data):
    """Monte Carlo adds the loss of its proposal, by its weight, although the script brings its own loss."""
    options = ["--max_steps", "1", "--per_device_train_batch_size", "4", "--integration_mode", "monte_carlo"]
    options += ["--dataset", str(tiny_data["run_image_classification"]), "--augmentation", "none"]
    losses = []
    for weight in (0.0, 1.0, 3.0):
        overrides = [*SMALL, "image_size=16", "patch_size=8", "num_samples=2", f"proposal_loss_weight={weight}"]
        recipe = str(RECIPES / "cifar10-cpu.yaml")
        arguments = [recipe, *options, "--config_overrides", *overrides]
        losses.append(run_script("run_image_classification", *arguments, output=f"{weight}")["train_loss"])
    proposal = losses[1] - losses[0]
    assert proposal > 0.1  # a cross entropy over five positions
    assert losses[2] - losses[0] == pytest.approx(3 * proposal, rel=1e-3)  # losses are recorded to six digits


def test_data_can_be_got(load_script):
    """Recipes name Hub datasets, or folders that download.py makes or that the recipe's head describes."""
    data = load_script("common.data")
    for name in recipe_names():
        found = read_recipe(find_recipe(name))["dataset"]
        text = find_recipe(name.partition("-")[0] + "-base" if name.startswith(("vqa2", "nlvr2")) else name).read_text(
            encoding="utf-8"
        )
        folder = found.partition("/")[2]
        if found.startswith("data/"):
            assert folder in data.DOWNLOADS or "The folder holds parquet" in " ".join(text.split()).replace("# ", "")
        else:
            assert all(part.count("/") == 1 for part in found.split("+"))


def test_options_win_and_overrides_join(tmp_path):
    (tmp_path / "a.yaml").write_text(
        "script: run_mlm\nseed: 1\nconfig_overrides: {rank: 2, num_samples: 4}\n", encoding="utf-8"
    )
    (tmp_path / "b.yaml").write_text("base: a\nlearning_rate: 0.1\nconfig_overrides: {rank: 3}\n", encoding="utf-8")
    recipe = read_recipe(tmp_path / "b.yaml")
    assert recipe == {
        "script": "run_mlm",
        "seed": 1,
        "learning_rate": 0.1,
        "config_overrides": {"rank": 3, "num_samples": 4},
    }
    words = recipe_options(recipe, ["--seed", "2", "--config_overrides", "rank=5"])
    assert words[:4] == ["--seed", "1", "--learning_rate", "0.1"]
    assert words[4:] == ["--seed", "2", "--config_overrides", "rank=3", "num_samples=4", "rank=5"]


def test_command_line():
    result = CliRunner().invoke(
        app, ["train", "cifar10-cpu", "-o", "seed=1", "-o", "config_overrides.rank=4", "--dry-run"]
    )
    assert result.exit_code == 0
    assert result.stdout.strip().endswith("cifar10-cpu.yaml --seed 1 --config_overrides rank=4")
    assert "run_image_classification.py" in result.stdout
    result = CliRunner().invoke(app, ["train", "no-such-recipe"])
    assert result.exit_code == 2 and "cifar10-cpu" in result.output


@pytest.mark.parametrize("script", ["run_image_classification", "run_operator_learning"])
def test_holdout_is_judged_on_training_rows(run_script, load_script, tiny_data, monkeypatch, script):
    """The last rows of the training data, which are then not trained on."""
    sizes = {}
    trainer = load_script(script).ExampleTrainer

    def record(**kwargs):
        evaluated = kwargs["eval_dataset"]
        evaluated = evaluated["16"] if isinstance(evaluated, dict) else evaluated
        sizes.update(train=len(kwargs["train_dataset"]), eval=len(evaluated))
        return trainer(**kwargs)

    monkeypatch.setattr(load_script(script), "ExampleTrainer", record)
    recipe = {"run_image_classification": "cifar10-cpu", "run_operator_learning": "darcy-cpu"}[script]
    overrides = [*SMALL, *(["image_size=16", "patch_size=8"] if script == "run_image_classification" else [])]
    options = [*STEPS, "--dataset", str(tiny_data[script]), "--config_overrides", *overrides]
    run_script(script, str(RECIPES / f"{recipe}.yaml"), "--holdout", "0.25", *options)
    assert sizes == {"train": 6, "eval": 2}
    with pytest.raises(ValueError, match=r"`holdout` \(0.01\) must leave some of the 8 training rows"):
        run_script(script, str(RECIPES / f"{recipe}.yaml"), "--holdout", "0.01", *options)


def test_cross_validation_holds_out_by_itself(run_script, tiny_data):
    with pytest.raises(ValueError, match=r"`holdout` \(0.1\) must be 0"):
        script = "run_graph_classification"
        run_script(script, str(RECIPES / "mutag-cpu.yaml"), "--dataset", str(tiny_data[script]), "--holdout", "0.1")
