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
"""Task heads: a linear read-out of ITNetModel and the task's loss."""

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_outputs import ImageClassifierOutput, MaskedLMOutput, SequenceClassifierOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, auto_docstring
from transformers.utils.generic import can_return_tuple

from configuration_itnet import ITNetConfig

from .domain import can_read_values, check_tensor
from .modeling_itnet import ITNetModel, ITNetPreTrainedModel
from .outputs import batch_share


def check_modality(model: nn.Module, config: ITNetConfig, *allowed: str) -> None:
    """A head that reads one kind of input says so before any weight is made."""
    if config.modality not in allowed:
        raise ValueError(
            f"{type(model).__name__} needs `modality` in {list(allowed)}, but the config has {config.modality!r}"
        )


def check_labels(labels: Tensor, logits: Tensor, problem_type: str | None = None) -> None:
    """Says what is wrong with the labels of ``logits`` [..., C].

    Class indices [...] from 0 to C - 1, or -100 for none; else numbers, one for each of the logits. Which of the two
    ``problem_type`` says, or, as in Transformers' losses, C and the dtype of the labels.
    """
    check_tensor(labels, "labels")
    samples, classes = list(logits.shape[:-1]), logits.shape[-1]
    if problem_type is None:
        problem_type = "regression"
        if classes > 1 and labels.dtype in (torch.int32, torch.int64):
            problem_type = "single_label_classification"
    are_indices = problem_type == "single_label_classification"
    expected, what = samples, "class indices" if are_indices else "one number for each"
    if not are_indices and classes > 1:
        expected, what = [*samples, classes], "a number for each of `num_labels`"
    if list(labels.shape) not in (expected, [*samples, 1] if expected is samples else expected):
        raise ValueError(
            f"`labels` {list(labels.shape)} must be {expected}: {what}, as `logits` are {[*samples, classes]}"
        )
    if not are_indices:
        return
    if labels.is_floating_point():
        raise ValueError(f"`labels` ({labels.dtype}) must be integers: {what} from 0 to {classes - 1}")
    if can_read_values(labels):
        strange = labels[(labels != -100) & ((labels < 0) | (labels >= classes))]
        if strange.numel():
            raise ValueError(
                f"`labels` hold {strange[0].item()}, but there are {classes} classes: they must be from 0 to "
                f"{classes - 1}, or -100 where there is none"
            )


def batch_loss(model: nn.Module, labels: Tensor, logits: Tensor, num_items_in_batch=None, **kwargs) -> Tensor:
    """The loss of one label or one row of labels per sample: labels [B] or [B, C], logits [B, C] -> scalar.

    Cross entropy, squared error or binary cross entropy, as Transformers chooses by ``config.problem_type``: the mean
    over the batch, or with Trainer's ``num_items_in_batch`` the batch's part of the mean over the optimizer step,
    which Transformers itself computes for cross entropy only.
    """
    check_labels(labels, logits, model.config.problem_type)
    return model.loss_function(labels, logits, model.config) * batch_share(labels, num_items_in_batch)


class ITNetClassifier(nn.Linear):
    """Dropout and a linear map on features: [..., d] -> [..., num_labels]; ``num_inputs`` d in place of d."""

    def __init__(self, config: ITNetConfig, num_inputs: int = 1):
        super().__init__(num_inputs * config.hidden_size, config.num_labels)
        rate = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
        self.dropout = nn.Dropout(rate)

    def forward(self, pooled: Tensor) -> Tensor:
        return super().forward(self.dropout(pooled))

    def _load_from_state_dict(self, state_dict, prefix, *args):
        """Takes, where the linear map was a part of this module."""
        for name in ("weight", "bias"):
            if f"{prefix}linear.{name}" in state_dict:
                state_dict[f"{prefix}{name}"] = state_dict.pop(f"{prefix}linear.{name}")
        super()._load_from_state_dict(state_dict, prefix, *args)


@auto_docstring(
    custom_intro="""
    ITNet with an image classification head: a linear layer on the [CLS] position, or on the mean over all positions
    with `config.pooling="mean"`.
    """
)
class ITNetForImageClassification(ITNetPreTrainedModel):
    def __init__(self, config: ITNetConfig):
        super().__init__(config)
        check_modality(self, config, "image")
        self.num_labels = config.num_labels
        self.itnet = ITNetModel(config)
        self.classifier = ITNetClassifier(config)
        self.post_init()

    @can_return_tuple
    @auto_docstring
    def forward(
        self,
        pixel_values: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> ImageClassifierOutput:
        r"""
        pixel_values (`torch.FloatTensor` of shape `(batch_size, num_channels, height, width)`, *optional*):
            Images, as [`ITNetImageProcessor`] makes them.
        labels (`torch.Tensor` of shape `(batch_size,)` or `(batch_size, num_labels)`, *optional*):
            Class indices, or floats for regression (`num_labels == 1`) and multi-label targets.
        """
        outputs = self.itnet(pixel_values=pixel_values, **kwargs)
        logits = self.classifier(outputs.pooler_output)
        loss = batch_loss(self, labels, logits, **kwargs) if labels is not None else None
        return ImageClassifierOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)


@auto_docstring(
    custom_intro="""
    ITNet with a sentence-level head on the pooled features: classification, multi-label classification or regression,
    as `config.problem_type` says or as `num_labels` and the dtype of the labels imply.
    """
)
class ITNetForSequenceClassification(ITNetPreTrainedModel):
    main_input_name = "input_ids"

    def __init__(self, config: ITNetConfig):
        super().__init__(config)
        check_modality(self, config, "text")
        self.num_labels = config.num_labels
        self.itnet = ITNetModel(config)
        self.classifier = ITNetClassifier(config)
        self.post_init()

    @can_return_tuple
    @auto_docstring
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SequenceClassifierOutput:
        r"""
        labels (`torch.Tensor` of shape `(batch_size,)` or `(batch_size, num_labels)`, *optional*):
            Class indices, or floats for regression (`num_labels == 1`) and multi-label targets.
        """
        outputs = self.itnet(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        logits = self.classifier(outputs.pooler_output)
        loss = batch_loss(self, labels, logits, **kwargs) if labels is not None else None
        return SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)


class ITNetLMHead(nn.Module):
    """Linear -> activation -> layer norm -> token scores; [B, n, d] -> [B, n, V], as in BERT."""

    def __init__(self, config: ITNetConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACT2FN[config.hidden_act]
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.decoder(self.layernorm(self.activation(self.dense(hidden_states))))


@auto_docstring(
    custom_intro="""
    ITNet with a masked language modeling head, its output weights tied to the token embeddings.
    """
)
class ITNetForMaskedLM(ITNetPreTrainedModel):
    main_input_name = "input_ids"
    _tied_weights_keys = {"lm_head.decoder.weight": "itnet.encoder.word_embeddings.weight"}

    def __init__(self, config: ITNetConfig):
        super().__init__(config)
        check_modality(self, config, "text")
        self.itnet = ITNetModel(config)
        self.lm_head = ITNetLMHead(config)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head.decoder

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.lm_head.decoder = new_embeddings

    @can_return_tuple
    @auto_docstring
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MaskedLMOutput:
        r"""
        labels (`torch.LongTensor` of shape `(batch_size, sequence_length)`, *optional*):
            Token ids at the masked positions and -100 elsewhere.
        """
        outputs = self.itnet(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        logits = self.lm_head(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            check_labels(labels, logits, "single_label_classification")
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return MaskedLMOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)


__all__ = ["ITNetForImageClassification", "ITNetForMaskedLM", "ITNetForSequenceClassification"]
