# Copyright 2026 The ITNet Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""The application that the sub-commands join, and what they share."""

import json
from pathlib import Path

import typer
from huggingface_hub.errors import StrictDataclassError
from transformers.utils import logging
from typer.core import TyperGroup

from configuration_itnet import ITNetConfig

from ..auto import AUTO_MODELS
from ..modeling_itnet import ITNetPreTrainedModel


class OneLineErrors(TyperGroup):
    """A mistake of the user is one line on stderr and exit code 2, as for a wrong option; not a traceback."""

    def invoke(self, ctx):
        try:
            return super().invoke(ctx)
        except (ValueError, OSError, ImportError, StrictDataclassError) as error:
            message = " ".join(str(error).split())
            typer.echo(f"itnet: {message}", err=True)
            raise typer.Exit(code=2) from None


app = typer.Typer(
    cls=OneLineErrors,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Tools around ITNet, the integral transform network. Start with: itnet create itnet-tiny my-model",
)


@app.callback()
def callback() -> None:
    logging.disable_progress_bar()


def load_config(name: str, **overrides) -> ITNetConfig:
    """A preset by name, or the configuration of a checkpoint folder."""
    if not Path(name).is_dir():
        return ITNetConfig.from_preset(name, **overrides)
    if overrides:
        raise ValueError(
            f"{', '.join(overrides)} cannot be changed: {name} is a checkpoint with its own configuration"
        )
    return ITNetConfig.from_pretrained(name)


def model_class(config: ITNetConfig) -> type[ITNetPreTrainedModel]:
    """The class that a model was saved in; the bare model for a preset."""
    classes = {cls.__name__: cls for by_modality in AUTO_MODELS.values() for cls in by_modality.values()}
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
