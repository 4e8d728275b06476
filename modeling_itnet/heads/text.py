# SPDX-License-Identifier: Apache-2.0
"""The heads of texts: classes of a text, masked tokens, answer spans and labels of tokens."""

from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_outputs import (
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, auto_docstring
from transformers.utils.generic import can_return_tuple

from configuration_itnet import ITNetConfig

from ..modeling_itnet import ITNetModel, ITNetPreTrainedModel
from .common import ITNetClassifier, batch_loss, check_labels, check_modality


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


@auto_docstring(
    custom_intro="""
    ITNet with a head for extractive question answering: every token is scored as the first and as the last of the
    answer.
    """
)
class ITNetForQuestionAnswering(ITNetPreTrainedModel):
    main_input_name = "input_ids"
    accepts_loss_kwargs = False  # the loss is a mean over the batch

    def __init__(self, config: ITNetConfig):
        super().__init__(config)
        check_modality(self, config, "text")
        self.itnet = ITNetModel(config)
        # No bias: a softmax over tokens does not feel a constant that all of them share.
        self.qa_outputs = nn.Linear(config.hidden_size, 2, bias=False)
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
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> QuestionAnsweringModelOutput:
        r"""
        start_positions (`torch.LongTensor` of shape `(batch_size,)`, *optional*):
            Index of the first token of the answer. One beyond the text is ignored.
        end_positions (`torch.LongTensor` of shape `(batch_size,)`, *optional*):
            Index of the last token of the answer; goes with `start_positions`.
        """
        outputs = self.itnet(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        start_logits, end_logits = self.qa_outputs(outputs.last_hidden_state).unbind(-1)  # [B, n] each
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(start_logits, end_logits, start_positions, end_positions)
        return QuestionAnsweringModelOutput(
            loss=loss, start_logits=start_logits, end_logits=end_logits, hidden_states=outputs.hidden_states
        )


@auto_docstring(
    custom_intro="""
    ITNet with a token classification head: a linear layer on every token.
    """
)
class ITNetForTokenClassification(ITNetPreTrainedModel):
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
    ) -> TokenClassifierOutput:
        r"""
        labels (`torch.LongTensor` of shape `(batch_size, sequence_length)`, *optional*):
            Class of every token, and -100 where there is none.
        """
        outputs = self.itnet(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        logits = self.classifier(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            check_labels(labels, logits, "single_label_classification")
            loss = self.loss_function(logits, labels, self.config, **kwargs)
        return TokenClassifierOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)


__all__ = [
    "ITNetForMaskedLM",
    "ITNetForQuestionAnswering",
    "ITNetForSequenceClassification",
    "ITNetForTokenClassification",
]
