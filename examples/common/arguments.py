"""Command lines of the run_*.py scripts: options, a YAML recipe before them, or both.

python examples/run_image_classification.py configuration/recipes/cifar10-cpu.yaml --seed 1 --model_type vit
"""

import sys
from dataclasses import dataclass, field
from typing import Any

import yaml
from transformers import HfArgumentParser, TrainingArguments

from modeling_itnet import ITNetConfig
from modeling_itnet.recipes import find_recipe, read_recipe, recipe_options


@dataclass
class ModelArguments:
    """Which model. A peer takes its layers, width, heads, feed-forward width and dropout from the same settings."""

    model_type: str = field(default="itnet", metadata={"help": "itnet, or a peer that the script names."})
    model_name_or_path: str | None = field(default=None, metadata={"help": "Checkpoint to start from."})
    preset: str = field(default="itnet-tiny", metadata={"help": "Size: a named configuration of ITNet."})
    integration_mode: str | None = field(
        default=None, metadata={"help": "exact, monte_carlo, low_rank or auto; default: that of the preset."}
    )
    config_overrides: list[str] = field(
        default_factory=list,
        metadata={"help": "Any settings of ITNetConfig, as in: --config_overrides fourier_scale=1.0 patch_size=4"},
    )

    def config(self, modality: str, **task: Any) -> ITNetConfig:
        """The configuration: preset, then what the task demands, then --config_overrides."""
        overrides = {}
        for setting in self.config_overrides:
            name, sign, value = setting.partition("=")
            if not sign:
                raise ValueError(f"`config_overrides` ({setting!r}) must have the form name=value")
            overrides[name] = yaml.safe_load(value)
        if self.integration_mode is not None:
            overrides["integration_mode"] = self.integration_mode
        return ITNetConfig.from_preset(self.preset, **{**task, **overrides, "modality": modality})


@dataclass
class DataArguments:
    """Which data."""

    dataset: str = field(metadata={"help": "Folder with one <split>.parquet per split, or the id of a Hub dataset."})
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a Hub dataset."})
    train_split: str = field(default="train", metadata={"help": "Split to train on."})
    eval_split: str = field(default="test", metadata={"help": "Split to evaluate on."})
    holdout: float = field(
        default=0.0,
        metadata={"help": "Evaluate on this share of the training rows, the last, and train on the rest: for tuning."},
    )
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on the first rows only."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on the first rows only."})


@dataclass
class ExampleTrainingArguments(TrainingArguments):
    """Transformers' TrainingArguments with the defaults of these scripts, and what they add."""

    output_dir: str = field(default="outputs/run", metadata={"help": "Checkpoints, model, card and results."})
    per_device_train_batch_size: int = field(default=32, metadata={"help": "Batch size per device in training."})
    per_device_eval_batch_size: int = field(default=64, metadata={"help": "Batch size per device in evaluation."})
    learning_rate: float = field(default=1e-3, metadata={"help": "Highest learning rate."})
    weight_decay: float = field(default=0.05, metadata={"help": "Of weight matrices only."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Schedule of the learning rate."})
    warmup_steps: float = field(default=0.1, metadata={"help": "Steps, or share of all steps if below 1."})
    logging_steps: float = field(default=0.05, metadata={"help": "Steps, or share of all steps if below 1."})
    save_strategy: str = field(default="no", metadata={"help": "When to write a checkpoint to resume from."})
    report_to: str = field(default="none", metadata={"help": "Where to send logs: none, tensorboard, wandb, ..."})
    remove_unused_columns: bool = field(default=False, metadata={"help": "Leave at False: collators need them."})
    dataloader_pin_memory: bool = field(default=False, metadata={"help": "Pin memory of batches."})
    ema_decay: float | None = field(
        default=None, metadata={"help": "Evaluate and save an exponential moving average of the weights."}
    )
    overwrite_output_dir: bool = field(
        default=False, metadata={"help": "Start anew although output_dir holds a checkpoint to resume from."}
    )
    results_file: str | None = field(
        default=None, metadata={"help": "JSON file for the results; default: results.json in output_dir."}
    )
    hub_metrics: bool = field(
        default=False, metadata={"help": "Load metrics from the Hub by `evaluate`, not the same ones from here."}
    )


def parse(*classes: type, arguments: list[str] | None = None) -> tuple:
    """One instance per dataclass, of a recipe (if the first argument is a .yaml file) and options, which win.

    Settings in --config_overrides join those of the recipe one by one.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments and arguments[0].endswith((".yaml", ".yml")):
        arguments = recipe_options(read_recipe(find_recipe(arguments[0])), arguments[1:])
    return HfArgumentParser(classes).parse_args_into_dataclasses(arguments)
