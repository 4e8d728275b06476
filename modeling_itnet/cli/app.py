# SPDX-License-Identifier: Apache-2.0
"""What the sub-commands share."""

import json
from pathlib import Path

import typer

from configuration_itnet import ITNetConfig

from ..modalities import find_heads
from ..modeling_itnet import ITNetModel, ITNetPreTrainedModel

#: The sub-commands that have been loaded. The application is `itnet_command.app`.
commands = typer.Typer(callback=lambda: None)  # with a callback it stays a group, even of one


def given(**options) -> dict:
    """The options that the user has given."""
    return {name: value for name, value in options.items() if value is not None}


def load_config(name: str, **overrides) -> ITNetConfig:
    """A preset by name, or the configuration of a checkpoint folder."""
    if not Path(name).is_dir():
        return ITNetConfig.from_preset(name, **overrides)
    if not (Path(name) / "config.json").is_file():
        raise ValueError(f"{name} is no checkpoint: it has no config.json")
    if overrides:
        raise ValueError(
            f"{', '.join(overrides)} cannot be changed: {name} is a checkpoint with its own configuration"
        )
    return ITNetConfig.from_pretrained(name)


def model_class(config: ITNetConfig) -> type[ITNetPreTrainedModel]:
    """The class that a model was saved in; the bare model for a preset."""
    classes = {cls.__name__: cls for cls in (ITNetModel, *(cls for cls, _, _ in find_heads()))}
    name = (config.architectures or ["ITNetModel"])[0]
    if name not in classes:
        raise ValueError(f"the checkpoint was saved as {name}, which is none of {', '.join(classes)}")
    return classes[name]


def load_model(folder: Path) -> ITNetPreTrainedModel:
    """The model of a checkpoint folder, in the class that it was saved in."""
    if not folder.is_dir():
        raise ValueError(f"no such checkpoint folder: {folder}")
    return model_class(load_config(str(folder))).from_pretrained(folder).eval()


def print_json(values) -> None:
    typer.echo(json.dumps(values))
