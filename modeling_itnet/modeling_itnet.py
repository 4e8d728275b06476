# SPDX-License-Identifier: Apache-2.0
"""ITNetModel: encoder -> L layers -> final layer norm; and ITNetHead, the part that all heads share: the loss."""

import inspect
import json
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import Cache
from transformers import initialization as init
from transformers.modeling_utils import PreTrainedModel
from transformers.processing_utils import Unpack
from transformers.utils import ModelOutput, TransformersKwargs, auto_docstring, logging
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from configuration_itnet import ITNetConfig, find_modality

from .checks import check_labels, check_tensor
from .generation.cache import ITNetCache
from .integration.anchors import ITNetAnchors
from .integration.factors import ITNetFactor
from .layers import ITNetLayer, checkpointed
from .modalities import find_encoder
from .operator import ITNetFourierFeatures, ITNetKernel, check_parts, find_operators, reset_linear
from .outputs import ITNetModelOutput, ITNetSequenceClassifierOutput

logger = logging.get_logger(__name__)

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


#: What the arguments of forwards are, for the documentation of the model and of its heads.
INPUTS = r"""
pixel_values (`torch.FloatTensor` of shape `(batch_size, num_channels, height, width)`, *optional*):
    Images, as a processor makes them. Height and width are multiples of every patch size. For
    [`ITNetForImagesAndTextClassification`], two for each text: `(batch_size, 2, num_channels, height, width)`.
attention_mask (`torch.Tensor` of shape `(batch_size, num_positions)`, *optional*):
    1 (or `True`) for each real token, point, node or position of a signal, 0 for padding, which changes nothing.
position_ids (`torch.LongTensor` of shape `(batch_size, sequence_length)`, *optional*):
    Number of every token in its text, from 0. By default, real tokens are counted. In a causal model and without an
    `attention_mask`, a number that is not larger than the one before it starts another document of the same row, which
    sees nothing of those before. The keywords `seq_idx` and `cu_seq_lens_q` of [`DataCollatorWithFlattening`] say the
    same.
past_key_values (`ITNetCache`, *optional*):
    What a causal model keeps of the tokens before these, as an earlier call returned it. It is continued in place.
use_cache (`bool`, *optional*):
    Whether a causal model returns `past_key_values`. By default, what `config.use_cache` says at evaluation.
shift_labels (`torch.LongTensor` of shape `(batch_size, sequence_length)`, *optional*):
    The token after each one, or -100 where it does not count, in place of `labels`, which are shifted to that.
logits_to_keep (`int` or `torch.Tensor`, *optional*, defaults to 0):
    How many of the last tokens get logits, or the indices of those that do; 0 for all.
positions (`torch.FloatTensor` of shape `(batch_size, num_positions, position_dim)`, *optional*):
    Coordinates of a signal's values, or Laplacian positions of a graph's nodes. Those of a signal may come without
    the first axis: then the batch shares them.
measure (`torch.FloatTensor` of shape `(batch_size, num_positions)`, *optional*):
    Quadrature weights of the positions of a signal; normalised to sum to 1. Uniform if not given.
signal_values (`torch.FloatTensor` of shape `(batch_size, num_positions, signal_feature_size)`, *optional*):
    Values of a signal at its `positions`, in place of `inputs_embeds`.
points (`torch.FloatTensor` of shape `(batch_size, num_points, 3)`, *optional*):
    Coordinates of point clouds. Shorter clouds are padded, and `attention_mask` says where.
point_features (`torch.FloatTensor` of shape `(batch_size, num_points, point_feature_size)`, *optional*):
    What points carry beside their coordinates, such as normals.
node_features (`torch.FloatTensor` of shape `(batch_size, num_nodes, node_feature_size)`, *optional*):
    Features of the nodes of graphs.
node_types (`torch.LongTensor` of shape `(batch_size, num_nodes)`, *optional*):
    Labels of the nodes, in place of `node_features`, if `num_node_types` is positive.
neighbors (`torch.LongTensor` of shape `(batch_size, num_nodes, max_degree)`, *optional*):
    Edges: the indices of the nodes next to each node, and -1 where it has fewer.
query_positions (`torch.FloatTensor` of shape `(batch_size, num_queries, position_dim)`, *optional*):
    Where the output function is wanted, with or without the first axis. By default at `positions`; a causal model has
    no other choice, as it sees the past by the order of `positions`.
query_mask (`torch.Tensor` of shape `(batch_size, num_queries)`, *optional*):
    1 for each query position that counts in the loss, 0 for padding. Every sample counts alike, however many positions
    it has.
labels (`torch.Tensor` of shape `(batch_size,)` or `(batch_size, num_labels)`, *optional*):
    Class indices, or floats for regression (`num_labels == 1`) and multi-label targets. With
    `config.problem_type="single_label_classification"`, floats are shares of the classes, as MixUp and CutMix make
    them. The keyword `label_smoothing` (0.0) spreads that share of every label evenly over all classes;
    [`ITNetTrainer`] passes its `label_smoothing_factor` in training. For heads of tokens, of shape
    `(batch_size, sequence_length)`: the class of every token, or the id of every masked one, and -100 where there is
    none. For [`ITNetForSignalRegression`], of shape `(batch_size, num_queries, num_labels)`: the values of the output
    function at the query positions, from which `config.signal_loss` tells the error of the predictions.
"""


@auto_docstring(
    custom_intro="""
    The bare ITNet: a stack of learnable integral operators on the signal that the encoder of `config.modality` makes.
    """
)
class ITNetModel(ITNetPreTrainedModel):
    def __init__(self, config: ITNetConfig):
        super().__init__(config)
        self.fourier = ITNetFourierFeatures(config)
        self.encoder = find_encoder(config)(config, self.fourier.size)
        self.layers = nn.ModuleList(ITNetLayer(config, index + 1) for index in range(config.num_hidden_layers))
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.anchors = ITNetAnchors()
        self.main_input_name = self.encoder.main_input_name
        self._no_split_modules = (*self._no_split_modules, type(self.encoder).__name__)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.encoder.input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        encoder = getattr(self.encoder, "text", self.encoder)  # the text part, where there are several
        if not hasattr(encoder, "word_embeddings"):
            raise ValueError(
                f"`modality` ({self.config.modality!r}) has no token embeddings to set; only 'text' and 'multimodal' "
                "have"
            )
        encoder.word_embeddings = value

    @merge_with_config_defaults
    @capture_outputs
    @auto_docstring(custom_args=INPUTS)
    def forward(
        self,
        pixel_values: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        positions: Tensor | None = None,
        measure: Tensor | None = None,
        signal_values: Tensor | None = None,
        points: Tensor | None = None,
        point_features: Tensor | None = None,
        node_features: Tensor | None = None,
        node_types: Tensor | None = None,
        neighbors: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> ITNetModelOutput:
        given = {
            "pixel_values": pixel_values,
            "input_ids": input_ids,
            "inputs_embeds": inputs_embeds,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            "positions": positions,
            "measure": measure,
            "signal_values": signal_values,
            "points": points,
            "point_features": point_features,
            "node_features": node_features,
            "node_types": node_types,
            "neighbors": neighbors,
            **{name: kwargs.pop(name) for name in self.encoder.required + self.encoder.optional if name in kwargs},
        }
        given = {name: value for name, value in given.items() if value is not None}
        self._check_inputs(given)
        cache = self._find_cache(past_key_values, use_cache, given)
        hidden_states, domain = self.encoder(self.fourier, **given, **({} if cache is None else {"cache": cache}))
        if domain.documents is not None:  # they have no common future
            if past_key_values is not None:
                raise ValueError("`past_key_values` do not go with several documents in a row: they cannot continue")
            cache = None
        domain.resolve(self.config, self.training, self.anchors)
        proposal_losses = []
        for index, layer in enumerate(self.layers):
            kept = () if cache is None else (cache.layers[index],)
            hidden_states, proposal_loss = layer(hidden_states, domain, *kept)
            if proposal_loss is not None:
                proposal_losses.append(proposal_loss)
        hidden_states, measure = self.layernorm(hidden_states), domain.measure
        if domain.past is not None:
            pooled = None  # it is that of all tokens, or none
        elif self.config.pooling == "cls":  # the first position that is not padding, the first of equals
            samples = torch.arange(hidden_states.shape[0], device=hidden_states.device)
            pooled = hidden_states[samples, (measure > 0).int().argmax(1)]
        elif self.config.pooling == "max":  # of each feature, over positions that are not padding
            lowest = torch.finfo(hidden_states.dtype).min
            pooled = hidden_states.masked_fill(measure.unsqueeze(-1) == 0, lowest).amax(1)
        else:  # the integral against the measure, over its total; 0 if all of a piece of a text is padding
            total = measure.sum(1, keepdim=True).clamp(min=torch.finfo(measure.dtype).tiny)
            pooled = torch.einsum("bn,bnd->bd", (measure / total).to(hidden_states.dtype), hidden_states)
        return ITNetModelOutput(
            last_hidden_state=hidden_states,  # [B, n, d]
            pooler_output=pooled,  # [B, d]
            past_key_values=cache,
            proposal_loss=torch.stack(proposal_losses).mean() if proposal_losses else None,
        )

    def _find_cache(self, given: Cache | None, is_wanted: bool | None, inputs: dict[str, Tensor]) -> ITNetCache | None:
        """Returns the cache that is given, or a new one if there should be one: for causal models of texts, but
        neither in training nor in an exported graph, whose outputs are tensors."""
        if given is None:
            may_have_one = self.config.is_causal and find_modality(self.config.modality).has_tokens
            may_have_one = may_have_one and not (self.training or torch.compiler.is_exporting())
            return ITNetCache(self.config) if is_wanted and may_have_one else None
        if not isinstance(given, ITNetCache):
            raise ValueError(
                f"`past_key_values` ({type(given).__name__}) must be an ITNetCache, or None for a new one"
            )
        if self.training and self.is_gradient_checkpointing:
            raise ValueError("`past_key_values` do not go with gradient checkpointing: it would read tokens twice")
        given.check(self.config, next(inputs[name] for name in self.encoder.required if name in inputs))
        return given

    def _check_inputs(self, given: dict[str, Tensor]) -> None:
        """Checks for exactly one of the encoder's required inputs, nothing that it does not know, and tensors only."""
        encoder, modality = self.encoder, self.config.modality
        extra = [name for name in given if name not in encoder.required + encoder.optional]
        if extra:
            allowed = [*encoder.required, *encoder.optional]
            raise ValueError(f"`modality` {modality!r} takes {allowed}, but {extra} was given too")
        main = [name for name in encoder.required if name in given]
        if len(main) != 1:
            needs = " or ".join(f"`{name}`" for name in encoder.required)
            raise ValueError(f"`modality` {modality!r} needs exactly one of {needs}, got {main or 'none'}")
        for name, value in given.items():
            check_tensor(value, name)
        if given[main[0]].dim() and given[main[0]].shape[0] == 0:
            raise ValueError(
                f"`{main[0]}` {list(given[main[0]].shape)} is an empty batch; at least one sample is needed"
            )


class ITNetHead(ITNetPreTrainedModel):
    """An ITNetModel with a read-out. The forward of a head has three steps: `self.itnet`, the predictions that it
    reads out of what that returns, and `output`, which adds the loss.
    """

    modality: str
    output_class: type[ModelOutput] = ITNetSequenceClassifierOutput
    problem_type: str | None = None  # of heads for which `config.problem_type` is no choice
    takes_label_smoothing = True  # as the keyword `label_smoothing` of a call

    def __init__(self, config: ITNetConfig):
        super().__init__(config)
        if config.modality != self.modality:
            raise ValueError(
                f"{type(self).__name__} needs `modality` in {[self.modality]}, but the config has {config.modality!r}"
            )
        self.num_labels = config.num_labels
        self.itnet = ITNetModel(config)
        self.main_input_name = self.itnet.main_input_name

    def output(
        self,
        outputs: ITNetModelOutput,
        predictions: dict[str, Tensor],
        labels: Tensor | None = None,
        loss: Tensor | None = None,
        *,
        label_smoothing: float = 0.0,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs,
    ) -> ModelOutput:
        """Makes what the head returns: its ``predictions``, and (loss + lambda proposal_loss) share as its loss.

        ``loss`` is the mean over the ``labels`` of the batch. If it is not given, it is that of the "logits" [..., C]
        by `config.problem_type`:

        - "single_label_classification": -sum_c t_c log softmax(logits)_c. The labels are class indices [...] from 0 to
          C - 1, or -100 for none, or shares t_c of the classes [..., C], as MixUp makes them. ``label_smoothing`` s
          puts (1 - s) t_c + s / C in place of t_c.
        - "multi_label_classification", "regression": binary cross entropy or squared error. There is a label for each
          of the logits.

        If the config does not say, it follows from C and the dtype of the labels, as in Transformers' losses. These
        note it in the config, too, where pipelines look which function goes with the logits.

        Trainer counts ``num_items_in_batch``, the labels other than -100 of all accumulated batches and all processes.
        The share is (labels here / labels of all), by which the losses of the batches add up to the mean over all
        labels, or 1 where nobody counts.
        """
        if labels is not None and loss is None:
            logits = predictions["logits"]
            is_index = check_tensor(labels, "labels").dtype in (torch.int32, torch.int64)
            kind = self.problem_type or self.config.problem_type
            if kind is None:
                kind = "single_label_classification" if is_index else "multi_label_classification"
                kind = self.config.problem_type = "regression" if logits.shape[-1] == 1 else kind
            check_labels(labels, logits, kind)
            logits = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
            if kind == "single_label_classification":
                has_shares = labels.is_floating_point()
                targets = labels.to(logits).view_as(logits) if has_shares else labels.to(logits.device).flatten()
                # A part of a batch may have no label.
                count = len(logits) if has_shares else (targets != -100).sum().clamp(min=1)
                loss = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=label_smoothing) / count
            elif label_smoothing:
                raise ValueError(f"`label_smoothing` ({label_smoothing}) is for classes, not for {kind!r}")
            else:
                mean_loss = F.mse_loss if kind == "regression" else F.binary_cross_entropy_with_logits
                loss = mean_loss(logits, labels.to(logits).view_as(logits))
        proposal_loss = outputs.proposal_loss
        if loss is not None and proposal_loss is not None:
            loss = loss + self.config.proposal_loss_weight * proposal_loss
        elif proposal_loss is not None and not torch.compiler.is_compiling():
            logger.warning_once(
                "The proposals of Monte Carlo integration are trained by a loss of their own, which the model adds to "
                "its loss when it gets `labels`. A loss that is computed outside must add "
                "`config.proposal_loss_weight * output.proposal_loss`. Label smoothing needs no loss outside: "
                "ITNetTrainer hands it to the model"
            )
        if labels is not None and num_items_in_batch is not None:
            loss = loss * (labels != -100).sum() / num_items_in_batch
        hidden_states = outputs.hidden_states
        return self.output_class(loss=loss, **predictions, hidden_states=hidden_states, proposal_loss=proposal_loss)


__all__ = ["ITNetModel", "ITNetPreTrainedModel"]
