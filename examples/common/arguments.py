"""Arguments of the run_*.py scripts: options, a recipe (a YAML or JSON file) before them, or both.

python examples/run_image_classification.py configuration/recipes/fashion_mnist-cpu.yaml --seed 1 --model_type vit
"""

import dataclasses
import difflib
import sys
from argparse import SUPPRESS, Action, ArgumentTypeError
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser, TrainingArguments

from modeling_itnet import ITNetConfig
from modeling_itnet.training.recipes import find_recipe, read_recipe

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
    config_overrides: list[str] = field(  # what `parse` makes of the list is a mapping, as recipes have it
        default_factory=dict,
        metadata={"help": "Any settings of ITNetConfig, as in: --config_overrides fourier_scale=1.0 patch_size=4"},
    )

    def __post_init__(self):
        if self.model_name_or_path is not None and self.preset is not None:
            raise ValueError(
                f"`preset` ({self.preset!r}) is the size of a new model, but the checkpoint "
                f"{self.model_name_or_path!r} has its own"
            )
        known = [setting.name for setting in dataclasses.fields(ITNetConfig)] + ["num_labels"]
        for name in self.config_overrides:
            if name not in known:
                raise ValueError(f"`config_overrides`: ITNetConfig has no setting {name!r}{nearest(name, known)}")

    @property
    def overrides(self) -> dict[str, Any]:
        """Settings of ITNetConfig that the options name, by --config_overrides and --integration_mode."""
        mode = {} if self.integration_mode is None else {"integration_mode": self.integration_mode}
        return {**self.config_overrides, **mode}

    def config(self, modality: str, **task: Any) -> ITNetConfig:
        """Returns the configuration: of the preset or the checkpoint, then what the task demands, then the overrides.

        A checkpoint keeps its sizes. If they cannot hold what the task needs, that is an error.
        """
        if self.model_name_or_path is None or self.model_type != "itnet":
            preset = self.preset or "itnet-tiny"
            return ITNetConfig.from_preset(preset, **{**task, **self.overrides, "modality": modality})
        free = ("id2label", "label2id", "num_labels", "problem_type", "signal_loss")
        labels = {name: task.pop(name) for name in free if name in task}
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
            setattr(config, name, self.overrides.get(name, value))
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
    script: str = field(init=False, default="")  # no option: the name of the script that runs


def nearest(name: str, known) -> str:
    """Returns the end of an error message: the known name that is most like a wrong one, if any is."""
    found = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f", did you mean {found[0]!r}?" if found else ""


def parse(*classes: type, recipe: dict[str, Any] | None = None, options: list[str] | None = None) -> tuple:
    """Returns one instance per dataclass, of a recipe, as `read_recipe` returns it, and of options, which win.

    Without a recipe both come from the command line, where the first word may be the file of one. What is wrong with
    them is then said in one line, and the script ends.
    """
    if recipe is not None:
        return _instances(classes, recipe, options or [])
    try:
        recipe, options = {}, sys.argv[1:]
        if options and options[0].endswith((".yaml", ".yml", ".json")):
            recipe = read_recipe(find_recipe(options.pop(0)))
        return _instances(classes, {**recipe, "script": Path(sys.argv[0]).stem}, options)
    except ValueError as error:
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
        sys.exit(2)


def _instances(classes: Sequence[type], recipe: dict[str, Any], options: list[str]) -> tuple:
    parser = HfArgumentParser(classes)
    known = {action.dest: action for action in reversed(parser._actions) if action.type}  # no --no_x, no --help
    required = [name for name, action in known.items() if action.required]
    recipe = dict(recipe)
    script, source = recipe.pop("script"), recipe.pop("recipe", None)
    for name in recipe.keys() - known.keys():
        raise ValueError(f"no such option: {name}, in {source}{nearest(name, known)}{_names(classes, script, source)}")
    recipe = {name: _typed(known[name], value, source) for name, value in recipe.items()}
    given, unknown = _given(parser, options)
    if unknown:
        name = next((word for word in unknown if word.startswith("--")), unknown[0]).partition("=")[0]
        like = nearest(name, parser._option_string_actions)
        raise ValueError(f"no such option: {name}{like}{_names(classes, script, source)}")
    values = with_options(recipe, given)
    missing = [f"--{name}" for name in required if name not in values]
    if missing:
        raise ValueError(f"the following arguments are required: {', '.join(missing)}")
    instances = parser.parse_dict(values)
    for arguments in instances:
        if isinstance(arguments, ExampleTrainingArguments):
            arguments.script = script
    return instances


def _given(parser: HfArgumentParser, options: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Returns the options that a user gave, without any default, and the words that are none."""

    def fail(message: str) -> None:
        raise ValueError(message)

    parser.error = fail
    if not {"-h", "--help"} & set(options):  # which prints the defaults
        for action in parser._actions:
            action.default, action.required = SUPPRESS, False
    given, unknown = parser.parse_known_args(options)
    return vars(given), unknown


def _names(classes: Sequence[type], script: str, source: str | None) -> str:
    """Returns the end of an error message: which options there are."""
    general = {each.name for each in dataclasses.fields(TrainingArguments)}
    own = dict.fromkeys(each.name for cls in classes for each in dataclasses.fields(cls) if each.init)
    whose = f"{script}, the script of {source}," if source else script
    return f"; {whose} has {', '.join(name for name in own if name not in general)} and those of TrainingArguments"


def _typed(action: Action, value: Any, source: str) -> Any:
    """Returns a value of a recipe as the command line would read it: 3e-3 is text for YAML, but a number for a
    learning rate."""
    if value is None or (isinstance(value, dict) and action.type is str):  # a string or, in files, a mapping
        return value
    try:
        if action.nargs == "+":
            return [action.type(str(each)) for each in (value if isinstance(value, list) else [value])]
        typed = action.type(str(value))
    except (ValueError, ArgumentTypeError):
        typed = None
    if typed is None or isinstance(value, list) or (action.choices and typed not in action.choices):
        kinds = {"int": "a whole number", "float": "a number", "str": "a text", "string_to_bool": "true or false"}
        wanted = kinds.get(action.type.__name__, f"one of {', '.join(map(str, action.choices or ()))}")
        raise ValueError(f"`{action.dest}` ({value!r}) of {source} must be {wanted}")
    return typed


def with_options(recipe: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Returns a recipe with the options that a user gave in place of its own.

    Settings in --config_overrides join those of the recipe one by one. Where the user names a checkpoint, the model
    that the recipe describes is not built: of its settings only the measure of image and text stays.
    """
    recipe, given = dict(recipe), dict(given)
    settings = recipe.get("config_overrides", {})
    if given.keys() & CHECKPOINTS:
        recipe = {name: value for name, value in recipe.items() if name not in NEW_MODEL}
        keeps_measure = "measure" in settings and "model_name_or_path" not in given
        settings = {"measure": settings["measure"]} if keeps_measure else {}
    for word in given.pop("config_overrides", ()):
        name, sign, value = word.partition("=")
        if not sign:
            raise ValueError(f"`config_overrides` ({word!r}) must have the form name=value")
        try:
            settings = {**settings, name: yaml.safe_load(value)}
        except yaml.YAMLError as error:
            raise ValueError(f"`config_overrides` ({word!r}) must have a value that is valid YAML") from error
    return {**recipe, **given, **({"config_overrides": settings} if settings else {})}
