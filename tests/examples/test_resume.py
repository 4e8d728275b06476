"""A run that was stopped goes on as if nothing had happened: losses, weights and average of the weights."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import TrainerCallback

from modeling_itnet.training.recipes import RECIPES

SMALL = ["num_hidden_layers=1", "hidden_size=16", "num_attention_heads=2", "intermediate_size=16", "num_samples=2"]
SMALL += ["kernel_hidden_size=4", "num_fourier_features=4", "hidden_dropout_prob=0.2", "local_neighbors=2"]


class Killed(Exception):
    pass


class StopAt(TrainerCallback):
    """Ends the process, as far as the Trainer can tell, after a step."""

    def __init__(self, step: int):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise Killed


def losses(folder: Path) -> list[float]:
    state = json.loads((folder / "checkpoint-6" / "trainer_state.json").read_text(encoding="utf-8"))
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


@pytest.mark.parametrize(
    ("script", "recipe", "options"),
    [
        ("run_image_classification", "cifar10-cpu", ["--augmentation", "light", "--mixup", "0.8", "--cutmix", "1.0"]),
        ("run_point_cloud", "modelnet10-cpu", ["--num_points", "16", "--integration_mode", "monte_carlo"]),
        ("run_mlm", "wikitext2-cpu", ["--max_seq_length", "16"]),
        (
            "run_clm",
            "gutenberg-clm-cpu",
            ["--max_seq_length", "16", "--max_eval_samples", "2", "--sample_tokens", "4"],
        ),
    ],
)
def test_same_curve(run_script, load_script, tiny_data, tmp_path, monkeypatch, script, recipe, options):
    overrides = [*SMALL, *(["image_size=16", "patch_size=8"] if script == "run_image_classification" else [])]
    arguments = [str(RECIPES / f"{recipe}.yaml"), "--dataset", str(tiny_data[script]), *options]
    arguments += ["--max_steps", "6", "--per_device_train_batch_size", "4", "--logging_steps", "1"]
    arguments += ["--save_strategy", "steps", "--save_steps", "1", "--ema_decay", "0.9"]
    arguments += ["--config_overrides", *overrides]
    whole = run_script(script, *arguments, output="whole")

    module = load_script(script)
    trainer = module.ExampleTrainer
    monkeypatch.setattr(module, "ExampleTrainer", lambda **kwargs: trainer(callbacks=[StopAt(3)], **kwargs))
    with pytest.raises(Killed):
        run_script(script, *arguments, output="parts")
    monkeypatch.setattr(module, "ExampleTrainer", trainer)
    parts = run_script(script, *arguments, output="parts")

    assert not (tmp_path / "parts" / "results.json").samefile(tmp_path / "whole" / "results.json")
    assert len(losses(tmp_path / "whole")) == 6
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert parts["metrics"] == whole["metrics"]
    for file in ("model.safetensors", "ema.safetensors"):
        first, second = (load_file(tmp_path / name / "checkpoint-6" / file) for name in ("whole", "parts"))
        assert_close(first, second, rtol=0, atol=0)


def test_average_is_evaluated_and_saved(load_script, run_script, tiny_data, tmp_path):
    """With a decay d the average of weights w_1..w_t is the recurrence m <- d m + (1 - d) w from the initial ones."""
    script = "run_point_cloud"
    arguments = [str(RECIPES / "modelnet10-cpu.yaml"), "--dataset", str(tiny_data[script]), "--num_points", "16"]
    arguments += ["--max_steps", "3", "--per_device_train_batch_size", "4", "--save_strategy", "steps"]
    arguments += ["--save_steps", "1", "--ema_decay", "0.999", "--config_overrides", *SMALL]
    run_script(script, *arguments)
    saved = load_file(tmp_path / "output" / "model.safetensors")
    steps = [load_file(tmp_path / "output" / f"checkpoint-{step}" / "model.safetensors") for step in (1, 2, 3)]
    averages = [load_file(tmp_path / "output" / f"checkpoint-{step}" / "ema.safetensors") for step in (1, 2, 3)]
    for name, average in averages[2].items():
        assert_close(saved[name], average, rtol=0, atol=0)
        for step in (2, 3):
            decay = (1 + step) / (10 + step)
            expected = decay * averages[step - 2][name] + (1 - decay) * steps[step - 1][name]
            assert_close(averages[step - 1][name], expected)


def test_draws_follow_from_the_content_of_a_batch(load_script):
    """In any global state, the same rows draw the same and others do not; the global state is left as it was."""
    drawn_by = load_script("common.draws").drawn_by

    def draw(*arrays):
        with drawn_by(arrays):
            return torch.rand(())

    rows = torch.arange(6.0).reshape(2, 3)
    torch.manual_seed(0)
    first, state = draw(*rows), torch.get_rng_state()
    torch.manual_seed(1)
    assert draw(*rows.numpy()) == first
    assert draw(*rows.flip(0)) != first
    torch.manual_seed(0)
    assert torch.equal(state, torch.get_rng_state())
