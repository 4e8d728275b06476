# SPDX-License-Identifier: Apache-2.0
"""What the sub-commands share."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from configuration_itnet import ITNetConfig

from ..modalities import find_heads
from ..modeling_itnet import ITNetModel, ITNetPreTrainedModel

#: The sub-commands that have been loaded. The application is `itnet_command.app`.
commands = typer.Typer(callback=lambda: None)  # with a callback it stays a group, even of one


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


def check_new_folder(folder: Path, overwrite: bool, source: Path | None = None) -> None:
    """Refuses to write a checkpoint over its source, and to a folder with other files unless the user says so."""
    if source is not None and source.resolve() == folder.resolve():
        raise ValueError(f"what is made of {source} needs another folder than {folder}")
    if folder.is_file():
        raise ValueError(f"{folder} is a file, not a folder")
    if overwrite or not folder.is_dir() or all(path.name.startswith(".") for path in folder.iterdir()):
        return
    held = "a checkpoint" if (folder / "config.json").exists() else "files"
    raise ValueError(f"{folder} holds {held} already; choose another folder, delete it or add --overwrite")


def print_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], texts: Sequence[str] = ()) -> None:
    """Prints rows under their headings; the columns ``texts`` begin on the left, those of numbers end on the right."""
    grid = Table(title=title, title_justify="left")
    for heading in headings:
        grid.add_column(heading, justify="left" if heading in texts else "right")
    for row in rows:
        grid.add_row(*row)
    Console().print(grid)


def print_json(values) -> None:
    typer.echo(json.dumps(values))
