# SPDX-License-Identifier: Apache-2.0
"""ITNetModel: encoder -> L layers -> final layer norm; and ITNetHead, the part that all heads share: the loss."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Cache
from transformers.processing_utils import Unpack
from transformers.utils import ModelOutput, TransformersKwargs, auto_docstring, logging
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from configuration_itnet import ITNetConfig, find_modality

from .checks import check_labels, check_tensor
from .generation.cache import ITNetCache
from .integration.anchors import ITNetAnchors
from .layers import ITNetLayer
from .modalities import find_encoder
from .operator import ITNetFourierFeatures
from .outputs import ITNetModelOutput, ITNetSequenceClassifierOutput
from .pretrained import ITNetPreTrainedModel

logger = logging.get_logger(__name__)

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
