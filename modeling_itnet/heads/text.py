# SPDX-License-Identifier: Apache-2.0
"""The heads of texts, which predict classes of a text, masked tokens, answer spans or labels of tokens."""

from collections import OrderedDict

from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_outputs import QuestionAnsweringModelOutput
from transformers.processing_utils import Unpack
from transformers.utils import ModelOutput, TransformersKwargs, auto_docstring
from transformers.utils.generic import can_return_tuple

from configuration_itnet import ITNetConfig

from ..modeling_itnet import INPUTS, ITNetHead
from ..outputs import (
    ITNetMaskedLMOutput,
    ITNetModelOutput,
    ITNetQuestionAnsweringModelOutput,
    ITNetTokenClassifierOutput,
)
from .common import ITNetPooledClassifier


class ITNetTextInputs:
    """Holds the forward of heads that read a text and have `labels`. A head defines its `scores`, the logits."""

    modality = "text"
    main_input_name = "input_ids"

    @can_return_tuple
    @auto_docstring(custom_args=INPUTS)
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> ModelOutput:
        r"""
        Returns:
            [`SequenceClassifierOutput`], [`MaskedLMOutput`] or [`TokenClassifierOutput`]: the `loss` if there are
            `labels`, `logits` of every text or token, `hidden_states` if asked for, and a `proposal_loss` in training
            with Monte Carlo integration. With `return_dict=False`, a tuple of these.
        """
        kwargs.setdefault("use_cache", False)  # there is no place for one in what a head returns
        outputs = self.itnet(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **kwargs)
        logits = self.scores(outputs)
        return self.output(outputs, {"logits": logits}, labels, **kwargs)


@auto_docstring(
    custom_intro="""
    ITNet with a sentence-level head on the pooled features: classification, multi-label classification or regression,
    as `config.problem_type` says or as `num_labels` and the dtype of the labels imply.
    """
)
class ITNetForSequenceClassification(ITNetTextInputs, ITNetPooledClassifier):
    def scores(self, outputs: ITNetModelOutput) -> Tensor:
        return self.classifier(self.dropout(outputs.pooler_output))


@auto_docstring(
    custom_intro="""
    ITNet with a masked language modeling head, its output weights tied to the token embeddings.
    """
)
class ITNetForMaskedLM(ITNetTextInputs, ITNetHead):
    output_class = ITNetMaskedLMOutput
    problem_type = "single_label_classification"  # of every token that has a label
    _tied_weights_keys = {"lm_head.decoder.weight": "itnet.encoder.word_embeddings.weight"}

    def __init__(self, config: ITNetConfig):
        super().__init__(config)
        parts = {
            "dense": nn.Linear(config.hidden_size, config.hidden_size),
            "activation": ACT2FN[config.hidden_act],
            "layernorm": nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps),
            "decoder": nn.Linear(config.hidden_size, config.vocab_size),
        }
        self.lm_head = nn.Sequential(OrderedDict(parts))  # [B, n, d] -> [B, n, V], as in BERT
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head.decoder

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.lm_head.decoder = new_embeddings

    def scores(self, outputs: ITNetModelOutput) -> Tensor:
        return self.lm_head(outputs.last_hidden_state)


@auto_docstring(custom_intro="ITNet with a token classification head: a linear layer on every token.")
class ITNetForTokenClassification(ITNetTextInputs, ITNetPooledClassifier):
    output_class = ITNetTokenClassifierOutput
    problem_type = "single_label_classification"  # of every token that has a label

    def scores(self, outputs: ITNetModelOutput) -> Tensor:
        return self.classifier(self.dropout(outputs.last_hidden_state))


@auto_docstring(
    custom_intro="""
    ITNet with a head for extractive question answering: every token is scored as the first and as the last of the
    answer.
    """
)
class ITNetForQuestionAnswering(ITNetHead):
    modality = "text"
    main_input_name = "input_ids"
    output_class = ITNetQuestionAnsweringModelOutput
    accepts_loss_kwargs = False  # the loss is a mean over the batch
    takes_label_smoothing = False

    def __init__(self, config: ITNetConfig):
        super().__init__(config)
        # No bias: a softmax over tokens does not feel a constant that all of them share.
        self.qa_outputs = nn.Linear(config.hidden_size, 2, bias=False)
        self.post_init()

    @can_return_tuple
    @auto_docstring(custom_args=INPUTS)
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
        kwargs.setdefault("use_cache", False)  # there is no place for one in what a head returns
        outputs = self.itnet(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **kwargs)
        start_logits, end_logits = self.qa_outputs(outputs.last_hidden_state).unbind(-1)  # [B, n] each
        loss = self.loss_function(start_logits, end_logits, start_positions, end_positions)  # None without positions
        return self.output(outputs, {"start_logits": start_logits, "end_logits": end_logits}, loss=loss)
