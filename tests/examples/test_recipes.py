"""Every recipe names a script, makes its model at full size, and trains two steps of a small one."""

import json
import re
import sys

import datasets
import pytest
import torch
from typer.testing import CliRunner

from modeling_itnet import (
    ITNetForCausalLM,
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
from modeling_itnet.training.recipes import RECIPES, find_recipe, read_recipe, recipe_names

# Modality and head by script.
HEADS = {
    "run_image_classification": ("image", ITNetForImageClassification),
    "run_point_cloud": ("point_cloud", ITNetForPointCloudClassification),
    "run_operator_learning": ("signal", ITNetForSignalRegression),
    "run_glue": ("text", ITNetForSequenceClassification),
    "run_mlm": ("text", ITNetForMaskedLM),
    "run_clm": ("text", ITNetForCausalLM),
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
    "run_clm": ["--train_split", "train", "--eval_split", "validation", "--dataset_config", "none"],
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
    settings = recipe.get("config_overrides", {})
    task = {"signal": {"position_dim": 2, "signal_feature_size": 1}, "multimodal": {"num_labels": 10}}
    task["text"] = {"is_causal": recipe["script"] == "run_clm"}
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
    if script == "run_clm":
        options += ["--max_seq_length", "16", "--vocab_size", "300", "--sample_tokens", "4"]
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
        ("gutenberg-clm-cpu", "gpt2"),
        ("gutenberg-clm-cpu", "gpt2_conv"),
        ("gutenberg-clm-cpu", "llama"),
        ("gutenberg-clm-cpu", "llama_conv"),
        ("gutenberg-clm-cpu", "mamba"),
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
    """Monte Carlo adds the loss of its proposal, by its weight."""
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


@pytest.fixture
def parse(load_script):
    """parse(recipe, options): the model's, the data's and the trainer's arguments."""
    module = load_script("common.arguments")
    classes = (module.ModelArguments, module.DataArguments, module.ExampleTrainingArguments)
    return lambda recipe, options=(): module.parse(*classes, recipe=recipe, options=list(options))


def test_options_win_and_overrides_join(parse, tmp_path):
    (tmp_path / "a.yaml").write_text(
        "script: run_mlm\ndataset: x\nseed: 1\nlearning_rate: 1e-3\nconfig_overrides: {rank: 2, num_samples: 4}\n",
        encoding="utf-8",
    )
    (tmp_path / "b.yaml").write_text("base: a\nbf16: no\nconfig_overrides: {rank: 3}\n", encoding="utf-8")
    recipe = read_recipe(tmp_path / "b.yaml")
    assert recipe == {
        "script": "run_mlm",
        "recipe": str(tmp_path / "b.yaml"),
        "dataset": "x",
        "seed": 1,
        "learning_rate": "1e-3",  # what YAML makes of a number without a point
        "bf16": False,
        "config_overrides": {"rank": 3, "num_samples": 4},
    }
    model, data, training = parse(recipe, ["--seed", "2", "--config_overrides", "rank=5", "measure=[3, 1]"])
    assert model.overrides == {"rank": 5, "num_samples": 4, "measure": [3, 1]}
    assert (data.dataset, training.seed, training.learning_rate, training.bf16) == ("x", 2, 1e-3, False)
    assert training.script == "run_mlm" and training.remove_unused_columns is False


def test_a_json_file_is_a_recipe(load_script, tmp_path, monkeypatch):
    module = load_script("common.arguments")
    path = tmp_path / "a.json"
    path.write_text('{"script": "run_mlm", "dataset": "x", "adam_beta1": 0.8}', encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["run_mlm.py", str(path), "--seed", "3"])
    data, training = module.parse(module.DataArguments, module.ExampleTrainingArguments)
    assert (data.dataset, training.adam_beta1, training.seed) == ("x", 0.8, 3)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"sed": 1},
            "no such option: sed, in a.yaml, did you mean 'seed'?; run_mlm, the script of a.yaml, has .*dataset.* and",
        ),
        ({"seed": 1.5}, "`seed` (1.5) of a.yaml must be a whole number"),
        ({"learning_rate": "fast"}, "`learning_rate` ('fast') of a.yaml must be a number"),
        ({"bf16": "perhaps"}, "`bf16` ('perhaps') of a.yaml must be true or false"),
        ({"dataset": ["x", "y"]}, "`dataset` (['x', 'y']) of a.yaml must be a text"),
        ({"config_overrides": {"rnk": 3}}, "ITNetConfig has no setting 'rnk', did you mean 'rank'?"),
    ],
)
def test_what_is_wrong_with_a_recipe(parse, wrong, message):
    with pytest.raises(ValueError) as caught:
        parse({"script": "run_mlm", "recipe": "a.yaml", "dataset": "x", **wrong})
    assert re.search(re.escape(message).replace(re.escape(".*"), ".*"), str(caught.value))


def test_a_recipe_may_lack_what_the_options_give(parse):
    recipe = {"script": "run_mlm", "recipe": "a.yaml"}
    assert parse(recipe, ["--dataset", "x"])[1].dataset == "x"
    with pytest.raises(ValueError, match="the following arguments are required: --dataset"):
        parse(recipe)
    with pytest.raises(
        ValueError,
        match=r"no such option: --sed, did you mean '--seed'.*; run_mlm, the script of a.yaml, has model_type",
    ):
        parse(recipe, ["--dataset", "x", "--sed", "1"])


def test_train_runs_in_this_process(tiny_data, tmp_path, monkeypatch, load_script):
    """`itnet train` reads the recipe once, hands it to the script, and records itself as what to repeat."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(sys, "path", list(sys.path))
    read, script = [], load_script("run_point_cloud")
    monkeypatch.setattr("modeling_itnet.cli.train.read_recipe", lambda path: read.append(path) or read_recipe(path))
    main = script.main
    monkeypatch.setattr(script, "main", lambda recipe, options: read.append(recipe["script"]) or main(recipe, options))
    overrides = [f"dataset={tiny_data['run_point_cloud']}", f"output_dir={tmp_path / 'out'}", "max_steps=1"]
    overrides += [
        "num_points=16",
        "use_cpu=true",
        "disable_tqdm=true",
        *(f"config_overrides.{word}" for word in SMALL),
    ]
    words = ["train", "modelnet10-cpu", *(word for override in overrides for word in ("-o", override))]
    monkeypatch.setattr(sys, "argv", ["/usr/bin/itnet", *words])
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert read == [find_recipe("modelnet10-cpu"), "run_point_cloud"]
    results = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    assert (results["script"], results["steps"], results["width"]) == ("run_point_cloud", 1, 16)
    assert results["command"].startswith("itnet train modelnet10-cpu -o dataset=")
    assert "output_dir" not in results["command"] and "-o num_points=16" in results["command"]


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
