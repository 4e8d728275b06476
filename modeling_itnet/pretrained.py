# SPDX-License-Identifier: Apache-2.0
"""What all models have in common: how they are loaded, saved and initialised, and change their integration mode."""

import inspect
import json
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import initialization as init
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import auto_docstring

from configuration_itnet import ITNetConfig, find_modality

from .integration.factors import ITNetFactor
from .layers import ITNetLayer, checkpointed
from .operator import ITNetFourierFeatures, ITNetKernel, check_parts, find_operators, reset_linear

# Names of weights in early checkpoints, where a classifier held its linear map as a part -> names here.
_EARLY_NAMES = {r"^classifier\.linear\.": "classifier."}


@auto_docstring
class ITNetPreTrainedModel(PreTrainedModel):
    config: ITNetConfig
    base_model_prefix = "itnet"
    main_input_name = "pixel_values"
    supports_gradient_checkpointing = True
    _no_split_modules = ("ITNetLayer",)
    _keep_in_fp32_modules_strict = ("fourier.frequencies",)
    _can_record_outputs = {"hidden_states": ITNetLayer}

    def __init__(self, config: ITNetConfig, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        parameters = inspect.signature(type(self).forward).parameters.values()
        self._argument_names = [p.name for p in parameters if p.name != "self" and p.kind != p.VAR_KEYWORD]
        self.register_forward_pre_hook(_main_input_first, with_kwargs=True)

    @property
    def input_modalities(self) -> tuple[str, ...]:
        """The parts of an input that the model reads, by Transformers' names."""
        return find_modality(self.config.modality).parts or (self.config.modality,)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, output_loading_info=False, **kwargs):
        """
        Does what the base class does, but reads safetensors files only: loading a pickle can run whatever code it
        holds. It is an error if the checkpoint lacks the parameters of an integration mode, and if a file cannot be
        read; the error names the file. Classifiers of early checkpoints are renamed.
        """
        if kwargs.setdefault("use_safetensors", True) is False:
            raise ValueError("`use_safetensors` (False) must be True: weights are loaded from safetensors files only")
        if kwargs.get("key_mapping") is None:
            kwargs["key_mapping"] = _EARLY_NAMES
        try:
            model, info = super().from_pretrained(
                pretrained_model_name_or_path, *model_args, output_loading_info=True, **kwargs
            )
        except SafetensorError as error:
            raise SafetensorError(
                f"{_broken_weights(pretrained_model_name_or_path)} cannot be read, it is truncated or damaged: {error}"
            ) from error
        check_parts(model.config, info["missing_keys"])
        return (model, info) if output_loading_info else model

    def save_pretrained(
        self, save_directory, is_main_process=True, *args, with_code: bool | None = None, processor=None, **kwargs
    ):
        """
        Does what the base class does, and on request adds all that the folder needs to load without this package.

        Args:
            with_code (`bool`, *optional*):
                Write what [`modeling_itnet.hub.export_to_hub_folder`] writes. By default, a model that was loaded from
                a folder with code is saved with code.
            processor (*optional*): Goes into the same folder, with its code. A processor, a tokenizer, or a list.
        """
        if with_code is None:
            with_code = any("--" not in name for name in (getattr(self.config, "auto_map", None) or {}).values())
        with_code = with_code and not self.is_remote_code()  # the base class saves code from the Hub
        hub = _package()[0] if with_code else None
        if hub is not None and kwargs.get("push_to_hub"):
            raise ValueError("`push_to_hub=True` does not go with code: call `model.push_to_hub(repo_id)` instead")
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)
        if not is_main_process:
            return
        for part in processor if isinstance(processor, (list, tuple)) else [processor]:
            if part is not None:
                part.save_pretrained(save_directory)
        if hub is not None:
            hub.add_code(self, Path(save_directory))
        elif getattr(self.config, "auto_map", None):
            _forget_missing_code(Path(save_directory))

    def push_to_hub(self, repo_id: str, *, with_code: bool = True, processor=None, **kwargs) -> str:
        """Does what the base class does, and adds the code that loads the model where this package is missing."""
        if not with_code or self.is_remote_code():
            return super().push_to_hub(repo_id, **kwargs)
        return _package()[0].push_with_code(self, repo_id, processor, **kwargs)

    def _set_gradient_checkpointing(self, enable: bool = True, gradient_checkpointing_func=checkpoint, **kwargs):
        super()._set_gradient_checkpointing(enable, partial(checkpointed, gradient_checkpointing_func), **kwargs)

    def to_low_rank(self, rank: int, calibration_data, **settings):
        """
        Switches a trained model from exact to low-rank integration, in place, and returns a [`FitReport`].

        [`modeling_itnet.integration.fit.fit_low_rank`] describes the arguments. `rank` is that of the kernel
        per head, from 1 to `config.head_dim`; `calibration_data` are one or more batches of forward arguments.
        """
        return self._fit_code("to_low_rank").fit_low_rank(self, rank, calibration_data, **settings)

    def to_near_far(self, calibration_data, *, near_size=None, near_radius=None, rank=None, **settings):
        """
        Switches a trained model from exact to near and far integration, in place, and returns a [`FitReport`].

        [`modeling_itnet.integration.fit.fit_near_far`] describes the arguments. `near_size` or `near_radius` is that
        of the neighbourhoods and `rank` that of the far field per head; by default, the configuration's.
        `calibration_data` are one or more batches of forward arguments.
        """
        neighbourhood = {"near_size": near_size, "near_radius": near_radius}
        fit = self._fit_code("to_near_far").fit_near_far
        return fit(self, calibration_data, **neighbourhood, rank=rank, **settings)

    def _fit_code(self, name: str):
        """Returns the module that fits one mode to another, for the method of this name."""
        if self.is_remote_code():
            raise ImportError(f"`{name}` needs the itnet package, and the model to be loaded by its classes")
        return _package()[1]

    def to_monte_carlo(self, num_samples: int | None = None) -> None:
        """
        Switches a model from exact to Monte Carlo integration, in place. Layers without a proposal get one that starts
        close to the measure and is trained along with the model, unless `config.proposal_epsilon` is 1.

        Args:
            num_samples (`int`, *optional*): Samples per query in training, anchors at evaluation. Kept if not given.
        """
        self.config.num_samples = self.config.num_samples if num_samples is None else num_samples
        self.config.validate_architecture()
        self.config.integration_mode = "monte_carlo"
        for operator in find_operators(self):
            operator.add_proposal()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Follows App. init of the paper; what is not named there keeps Transformers' N(0, initializer_range^2).

        Transformers skips modules of outside code that own no tensor themselves, so that a parent cannot initialise
        its linear layers: these carry the name of their scheme in an attribute ``initialization``.
        """
        super()._init_weights(module)
        if isinstance(module, (ITNetFourierFeatures, ITNetKernel, ITNetFactor)):
            module.reset_parameters()
        elif hasattr(module, "reset_own_parameters"):  # encoders, and low-rank kernels without their factors
            module.reset_own_parameters(self.config)
        elif isinstance(module, nn.Conv2d):
            init.trunc_normal_(module.weight, std=self.config.initializer_range)
        elif hasattr(module, "initialization"):
            reset_linear(module, self.config)


def _main_input_first(model: ITNetPreTrainedModel, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """Names the positional arguments of a call, before a forward whose signature begins with another input.

    They are `model.main_input_name`, then those of the signature, in its order, that the modality takes: a text model
    is called by ``model(input_ids, attention_mask)``, as any other of Transformers.
    """
    names = model._argument_names
    if not args or names[0] == model.main_input_name:
        return None
    if model is model.base_model:  # a head's signature has nothing but what its modality takes
        names = [name for name in names if name in model.encoder.required + model.encoder.optional]
    names = list(dict.fromkeys([model.main_input_name, *names]))
    if len(args) > len(names):
        raise TypeError(f"forward takes at most {len(names)} positional arguments, {names}, got {len(args)}")
    return (), dict(**dict(zip(names, args, strict=False)), **kwargs)  # an error if one is named too


def _broken_weights(name) -> str:
    """Returns the files of weights in the folder ``name`` that cannot be read; without a folder, ``name``."""
    broken = []
    for path in sorted(Path(name).glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError:
            broken.append(str(path))
    return ", ".join(broken) or f"a safetensors file of {str(name)!r}"


def _forget_missing_code(folder: Path) -> None:
    """Takes out of a saved configuration what names code that is neither in its folder nor in a repository."""
    path = folder / "config.json"
    values = json.loads(path.read_text(encoding="utf-8"))

    def is_there(reference: str) -> bool:
        return "--" in reference or (folder / f"{reference.split('.')[0]}.py").exists()

    values["auto_map"] = {name: reference for name, reference in values["auto_map"].items() if is_there(reference)}
    pipelines = values.get("custom_pipelines", {}).items()
    values["custom_pipelines"] = {task: entry for task, entry in pipelines if is_there(entry["impl"])}
    values = {name: value for name, value in values.items() if value or name not in ("auto_map", "custom_pipelines")}
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _package():
    """Returns the exporter and the fits, which work on models and are not exported with them."""
    try:
        from modeling_itnet.hub import export
        from modeling_itnet.integration import fit
    except ImportError as error:
        raise ImportError("Saving with code needs the itnet package itself, not only its exported code") from error
    return export, fit
