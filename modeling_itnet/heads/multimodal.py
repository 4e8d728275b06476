# SPDX-License-Identifier: Apache-2.0
"""Heads for image and text: answers to a question about an image, and statements about two images."""

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, auto_docstring
from transformers.utils.generic import can_return_tuple

from configuration_itnet import ITNetConfig

from ..domain import check_tensor
from ..modeling_itnet import ITNetModel, ITNetPreTrainedModel
from ..outputs import batch_share
from .common import ITNetClassifier, batch_loss, check_labels, check_modality

#: Answers of VQA v2 that models choose from: those that occur at least nine times.
VQA_V2_ANSWERS = 3129


@auto_docstring(
    custom_intro="""
    ITNet with a visual question answering head: a linear layer on [CLS] that scores every answer of a fixed list. A
    configuration whose labels were neither counted (`num_labels`) nor named (`id2label`) gets the 3,129 answers of
    VQA v2.
    """
)
class ITNetForVisualQuestionAnswering(ITNetPreTrainedModel):
    def __init__(self, config: ITNetConfig):
        super().__init__(config)
        check_modality(self, config, "multimodal")
        if config.labels_are_default:
            config.num_labels = VQA_V2_ANSWERS
        self.num_labels = config.num_labels
        self.itnet = ITNetModel(config)
        self.classifier = ITNetClassifier(config)
        self.post_init()

    @can_return_tuple
    @auto_docstring
    def forward(
        self,
        pixel_values: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SequenceClassifierOutput:
        r"""
        pixel_values (`torch.FloatTensor` of shape `(batch_size, num_channels, height, width)`, *optional*):
            Images, as [`ITNetProcessor`] makes them.
        labels (`torch.Tensor` of shape `(batch_size, num_labels)` or `(batch_size,)`, *optional*):
            Soft targets in [0, 1], the share of people who gave an answer (see `vqa_soft_targets`), or the index of
            the one right answer. The loss is binary cross entropy, summed over answers, averaged over the batch.
        """
        outputs = self.itnet(
            pixel_values=pixel_values,
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        logits = self.classifier(outputs.pooler_output)
        loss = None
        if labels is not None:
            share = batch_share(labels, kwargs.get("num_items_in_batch"))
            is_index = check_tensor(labels, "labels").dim() == 1
            check_labels(labels, logits, "single_label_classification" if is_index else "multi_label_classification")
            if is_index:
                labels = F.one_hot(labels, self.num_labels)
            targets = labels.to(logits.device, torch.float32)
            loss = F.binary_cross_entropy_with_logits(logits.float(), targets, reduction="sum") / logits.shape[0]
            loss = loss * share
        return SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)


@auto_docstring(
    custom_intro="""
    ITNet for a statement about two images (NLVR2): each image goes through the model with the text, and a linear layer
    reads the two [CLS] features side by side.
    """
)
class ITNetForImagesAndTextClassification(ITNetPreTrainedModel):
    num_images = 2

    def __init__(self, config: ITNetConfig):
        super().__init__(config)
        check_modality(self, config, "multimodal")
        self.num_labels = config.num_labels
        self.loss_type = "ForSequenceClassification"  # Transformers knows no loss for this class name
        self.itnet = ITNetModel(config)
        self.classifier = ITNetClassifier(config, num_inputs=self.num_images)
        self.post_init()

    @can_return_tuple
    @auto_docstring
    def forward(
        self,
        pixel_values: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SequenceClassifierOutput:
        r"""
        pixel_values (`torch.FloatTensor` of shape `(batch_size, 2, num_channels, height, width)`, *optional*):
            Two images for each text.
        labels (`torch.LongTensor` of shape `(batch_size,)`, *optional*):
            Class indices.
        """
        if (
            pixel_values is None
            or check_tensor(pixel_values, "pixel_values").dim() != 5
            or pixel_values.shape[1] != self.num_images
        ):
            given = None if pixel_values is None else list(pixel_values.shape)
            raise ValueError(
                f"`pixel_values` {given} must be [batch, {self.num_images}, channels, height, width]: "
                f"{self.num_images} images for each text"
            )
        text = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
        }
        # One pass over all pairs of an image and a text: [B * 2, ...], the two of a sample beside each other.
        pairs = {
            name: value
            if value is None or check_tensor(value, name).dim() == 1
            else value.repeat_interleave(self.num_images, dim=0)
            for name, value in text.items()
        }
        outputs = self.itnet(pixel_values=pixel_values.flatten(0, 1), **pairs, **kwargs)
        logits = self.classifier(outputs.pooler_output.unflatten(0, (-1, self.num_images)).flatten(1))
        loss = batch_loss(self, labels, logits, **kwargs) if labels is not None else None
        return SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)


def vqa_soft_targets(answers: list[list[str]], label2id: dict[str, int]) -> Tensor:
    """Score of every answer by what people said (VQA v2): [B, num_labels] in [0, 1].

    ``answers`` holds what each of the N people asked said, for each question. An answer is right to the degree
    min(number of people who gave it / 3, 1), averaged over all N ways to leave one of them out.
    """
    if isinstance(answers, str) or any(isinstance(given, str) for given in answers):
        raise ValueError(
            "`answers` must hold a list of answers for each question, such as [['red', 'red', 'blue'], ['two']], not "
            "plain strings"
        )
    targets = torch.zeros(len(answers), len(label2id))
    for row, given in enumerate(answers):
        total = len(given)
        for answer in set(given) & set(label2id):
            count = given.count(answer)
            if total == 1:
                score = 1.0  # a single voice has nobody to be compared with
            else:
                score = (count * min((count - 1) / 3, 1) + (total - count) * min(count / 3, 1)) / total
            targets[row, label2id[answer]] = score
    return targets


def vqa_accuracy(logits: Tensor, targets: Tensor) -> float:
    """VQA accuracy: the soft target of the answer with the highest score, averaged: [B, num_labels] each -> [0, 1].

    With ``targets`` of class indices [B] it is plain accuracy.
    """
    best = logits.argmax(-1)
    if targets.dim() == 1:
        return (best == targets).float().mean().item()
    return targets.gather(1, best.unsqueeze(1)).mean().item()


__all__ = [
    "ITNetForImagesAndTextClassification",
    "ITNetForVisualQuestionAnswering",
    "vqa_accuracy",
    "vqa_soft_targets",
]
