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
"""Heads that read every token of a text: answer spans and token labels."""

from torch import Tensor, nn
from transformers.modeling_outputs import QuestionAnsweringModelOutput, TokenClassifierOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, auto_docstring
from transformers.utils.generic import can_return_tuple

from configuration_itnet import ITNetConfig

from .heads import ITNetClassifier, check_labels, check_modality
from .modeling_itnet import ITNetModel, ITNetPreTrainedModel


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


__all__ = ["ITNetForQuestionAnswering", "ITNetForTokenClassification"]
