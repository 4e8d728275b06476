"""Command lines of the run_*.py scripts: options, a YAML recipe before them, or both.

python examples/run_image_classification.py configuration/recipes/fashion_mnist-cpu.yaml --seed 1 --model_type vit
"""

import dataclasses
import difflib
import sys
from dataclasses import dataclass, field
from typing import Any

import yaml
from transformers import HfArgumentParser, TrainingArguments

from modeling_itnet import ITNetConfig
from modeling_itnet.training.recipes import find_recipe, read_recipe, recipe_options

CHECKPOINTS = ("model_name_or_path", "image_checkpoint", "text_checkpoint")  # options that bring a configuration
NEW_MODEL = ("preset", "integration_mode", "config_overrides")  # options that describe one


@dataclass
class ModelArguments:
    """Which model. A peer takes its layers, width, heads, feed-forward width and dropout from the same settings."""

    model_type: str = field(default="itnet", metadata={"help": "itnet, or a peer that the script names."})
    model_name_or_path: str | None = field(
        default=None,
        metadata={
            "help": "Checkpoint to start from. Its configuration replaces preset and config_overrides of a recipe; "
            "--integration_mode and --config_overrides on the command line change it."
        },
    )
    ignore_mismatched_sizes: bool = field(
        default=False,
        metadata={"help": "Start weights anew whose size in the checkpoint differs: a classifier of other classes."},
    )
    preset: str | None = field(
        default=None, metadata={"help": "Size of a new model: a named configuration; default: itnet-tiny."}
    )
    integration_mode: str | None = field(
        default=None, metadata={"help": "exact, monte_carlo, low_rank or auto; default: that of the preset."}
    )
    config_overrides: list[str] = field(
        default_factory=list,
        metadata={"help": "Any settings of ITNetConfig, as in: --config_overrides fourier_scale=1.0 patch_size=4"},
    )

    def __post_init__(self):
        if self.model_name_or_path is not None and self.preset is not None:
            raise ValueError(
                f"`preset` ({self.preset!r}) is the size of a new model, but the checkpoint "
                f"{self.model_name_or_path!r} has its own"
            )
        _ = self.overrides  # a wrong name is an error before any data are read

    @property
    def overrides(self) -> dict[str, Any]:
        """Settings of ITNetConfig that the options name, by --config_overrides and --integration_mode."""
        known = [setting.name for setting in dataclasses.fields(ITNetConfig)] + ["num_labels"]
        settings = {}
        for setting in self.config_overrides:
            name, sign, value = setting.partition("=")
            if not sign:
                raise ValueError(f"`config_overrides` ({setting!r}) must have the form name=value")
            if name not in known:
                raise ValueError(f"`config_overrides`: ITNetConfig has no setting {name!r}{nearest(name, known)}")
            settings[name] = yaml.safe_load(value)
        if self.integration_mode is not None:
            settings["integration_mode"] = self.integration_mode
        return settings

    def config(self, modality: str, **task: Any) -> ITNetConfig:
        """The configuration: of the preset or the checkpoint, then what the task demands, then the overrides.

        A checkpoint keeps its sizes. If they cannot hold what the task needs, that is an error.
        """
        if self.model_name_or_path is None or self.model_type != "itnet":
            preset = self.preset or "itnet-tiny"
            return ITNetConfig.from_preset(preset, **{**task, **self.overrides, "modality": modality})
        labels = {name: task.pop(name) for name in ("id2label", "label2id", "num_labels") if name in task}
        config = ITNetConfig.from_pretrained(self.model_name_or_path, **self.overrides)
        if config.modality != modality:
            raise ValueError(
                f"the checkpoint {self.model_name_or_path!r} has `modality` {config.modality!r}, not {modality!r}"
            )
        for name, value in task.items():
            found = getattr(config, name)
            fits = found >= value if name in ("vocab_size", "max_position_embeddings") else found == value
            if not fits:
                raise ValueError(
                    f"the data need `{name}` {value}, but the checkpoint {self.model_name_or_path!r} has {found}"
                )
        config.problem_type = None
        for name, value in labels.items():
            setattr(config, name, value)
        return config


@dataclass
class DataArguments:
    """Which data."""

    dataset: str = field(
        metadata={
            "help": "Folder with <split>.parquet, .csv, .json, .jsonl or .txt files or <split>/<class>/ folders of "
            "images, such a file, or the id of a Hub dataset."
        }
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a Hub dataset."})
    train_split: str = field(default="train", metadata={"help": "Split to train on."})
    eval_split: str = field(default="test", metadata={"help": "Split to evaluate on."})
    holdout: float = field(
        default=0.0,
        metadata={
            "help": "Evaluate on this share of the training rows, the last, and train on the rest: for tuning, and "
            "for data without another split."
        },
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
        default=False,
        metadata={"help": "Start anew: checkpoints and vocabularies that output_dir holds are not used again."},
    )
    results_file: str | None = field(
        default=None, metadata={"help": "JSON file for the results; default: results.json in output_dir."}
    )
    hub_metrics: bool = field(
        default=False, metadata={"help": "Load metrics from the Hub by `evaluate`, not the same ones from here."}
    )


def nearest(name: str, known) -> str:
    """The end of an error message: the known name that is most like a wrong one, if any is."""
    found = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f", did you mean {found[0]!r}?" if found else ""


def with_recipe(arguments: list[str]) -> list[str]:
    """The options that a recipe, if the first argument is a .yaml file, and the arguments after it stand for.

    Where these name a checkpoint, the model that the recipe describes is not built: of its settings only the measure
    of image and text stays.
    """
    if not arguments or not arguments[0].endswith((".yaml", ".yml")):
        return list(arguments)
    recipe, options = read_recipe(find_recipe(arguments[0])), list(arguments[1:])
    given = {option.partition("=")[0].removeprefix("--") for option in options}
    if given & set(CHECKPOINTS):
        settings = recipe.get("config_overrides", {})
        recipe = {name: value for name, value in recipe.items() if name not in NEW_MODEL}
        if "measure" in settings and "model_name_or_path" not in given:
            recipe["config_overrides"] = {"measure": settings["measure"]}
    return recipe_options(recipe, options)


def parse(*classes: type, arguments: list[str] | None = None) -> tuple:
    """One instance per dataclass, of a recipe (if the first argument is a .yaml file) and options, which win.

    Settings in --config_overrides join those of the recipe one by one. What is wrong with the arguments is said in one
    line, and the script ends.
    """
    parser = HfArgumentParser(classes)

    def fail(message: str) -> None:
        print(f"{parser.prog}: error: {message}", file=sys.stderr)
        sys.exit(2)

    parser.error = fail
    try:
        words = with_recipe(sys.argv[1:] if arguments is None else list(arguments))
        *parsed, unknown = parser.parse_args_into_dataclasses(words, return_remaining_strings=True)
    except ValueError as error:
        fail(str(error))
    if unknown:
        options = [word for word in unknown if word.startswith("--")] or unknown
        name = options[0].partition("=")[0]
        fail(f"no such option: {name}{nearest(name, parser._option_string_actions)}")
    return tuple(parsed)
