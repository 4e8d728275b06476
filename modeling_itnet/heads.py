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

from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_outputs import ImageClassifierOutput, MaskedLMOutput, SequenceClassifierOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, auto_docstring
from transformers.utils.generic import can_return_tuple

from configuration_itnet import ITNetConfig

from .modeling_itnet import ITNetModel, ITNetPreTrainedModel
from .outputs import batch_share


def check_modality(model: nn.Module, config: ITNetConfig, *allowed: str) -> None:
    """A head that reads one kind of input says so before any weight is made."""
    if config.modality not in allowed:
        raise ValueError(
            f"{type(model).__name__} needs `modality` in {list(allowed)}, but the config has {config.modality!r}"
        )


def batch_loss(model: nn.Module, labels: Tensor, logits: Tensor, num_items_in_batch=None, **kwargs) -> Tensor:
    """The loss of one label or one row of labels per sample: labels [B] or [B, C], logits [B, C] -> scalar.

    Cross entropy, squared error or binary cross entropy, as Transformers chooses by ``config.problem_type``: the mean
    over the batch, or with Trainer's ``num_items_in_batch`` the batch's part of the mean over the optimizer step,
    which Transformers itself computes for cross entropy only.
    """
    return model.loss_function(labels, logits, model.config) * batch_share(labels, num_items_in_batch)


class ITNetClassifier(nn.Module):
    """Dropout and a linear map on features: [..., d] -> [..., num_labels]; ``num_inputs`` d in place of d."""

    def __init__(self, config: ITNetConfig, num_inputs: int = 1):
        super().__init__()
        rate = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
        self.dropout = nn.Dropout(rate)
        self.linear = nn.Linear(num_inputs * config.hidden_size, config.num_labels)

    def forward(self, pooled: Tensor) -> Tensor:
        return self.linear(self.dropout(pooled))


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
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return MaskedLMOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)


__all__ = ["ITNetForImageClassification", "ITNetForMaskedLM", "ITNetForSequenceClassification"]
