"""Tables hp_imagenet and hp_modelnet of the paper, as typed from its source, against the recipes."""

from pathlib import Path

import pytest

from modeling_itnet.training.recipes import read_recipe

RECIPES = Path(__file__).parents[2] / "configuration" / "recipes"
IMAGENET = {
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "lr_scheduler_kwargs": {"min_lr": 1e-5},
    "weight_decay": 0.1,
    "num_train_epochs": 300,
    "randaugment_magnitude": 9,
    "mixup": 0.8,
    "cutmix": 1.0,
    "erasing": 0.25,
    "label_smoothing_factor": 0.1,
    "max_grad_norm": 1.0,
    "ema_decay": 0.9999,
}
MODELNET = {
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "learning_rate": 1e-3,
    "lr_scheduler_kwargs": {"min_lr": 1e-5},
    "weight_decay": 0.05,
    "per_device_train_batch_size": 32,
    "num_train_epochs": 300,
    "num_points": 1024,
}


def differences(recipe, table):
    return {name: (recipe.get(name), value) for name, value in table.items() if recipe.get(name) != value}


@pytest.mark.parametrize(
    ("size", "rate", "drop_path"), [("small", 1e-3, 0.1), ("base", 1e-3, 0.2), ("large", 5e-4, 0.3)]
)
def test_imagenet(size, rate, drop_path):
    recipe = read_recipe(RECIPES / f"imagenet-{size}.yaml")
    assert differences(recipe, IMAGENET | {"learning_rate": rate}) == {}
    overrides = {"image_size": 224, "patch_size": 16, "drop_path_rate": drop_path}
    assert differences(recipe["config_overrides"], overrides) == {}
    assert recipe["per_device_train_batch_size"] * 8 == 1024  # on eight devices
    assert recipe["warmup_steps"] * recipe["num_train_epochs"] == pytest.approx(5, abs=1e-3)


@pytest.mark.parametrize("size", ["pc", "small", "base", "large"])
def test_modelnet(size):
    recipe = read_recipe(RECIPES / f"modelnet40-{size}.yaml")
    assert differences(recipe, MODELNET) == {}
    assert differences(recipe["config_overrides"], {"drop_path_rate": 0.1, "local_neighbors": 16}) == {}
    assert recipe["warmup_steps"] * recipe["num_train_epochs"] == pytest.approx(10, abs=1e-3)
