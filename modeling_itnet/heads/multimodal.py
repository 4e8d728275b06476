# SPDX-License-Identifier: Apache-2.0
"""The heads of image and text, which answer a question about an image or judge a statement about two images."""

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, auto_docstring
from transformers.utils.generic import can_return_tuple

from configuration_itnet import ITNetConfig

from ..checks import check_labels, check_shape, check_tensor
from ..modeling_itnet import INPUTS
from ..outputs import ITNetModelOutput
from .common import ITNetPooledClassifier

#: Answers of VQA v2 that models choose from: those that occur at least nine times.
VQA_V2_ANSWERS = 3129


class ITNetImageTextInputs:
    """Holds the forward of heads that read images with a text. Each text comes with one image, or several."""

    modality = "multimodal"

    @can_return_tuple
    @auto_docstring(custom_args=INPUTS)
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
        texts = [input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds]
        count = self.num_inputs
        if count > 1:  # all pairs of an image and a text, those of a sample beside each other: [k B, ...]
            expected, note = ["batch", count, "channels", "height", "width"], f": {count} images for each text"
            check_shape(pixel_values, "pixel_values", expected, note=note, may_be_empty=True)
            pixel_values = pixel_values.flatten(0, 1)
            for index, text in enumerate(texts):
                if isinstance(text, Tensor) and text.dim() > 1:
                    texts[index] = text.repeat_interleave(count, dim=0)
        outputs = self.itnet(pixel_values, *texts, **kwargs)
        features = outputs.pooler_output.unflatten(0, (-1, count)).flatten(1)  # side by side: [B, k d]
        logits = self.classifier(self.dropout(features))
        return self.output(outputs, {"logits": logits}, labels, **kwargs)


@auto_docstring(
    custom_intro="""
    ITNet with a visual question answering head: a linear layer on [CLS] that scores every answer of a fixed list. A
    configuration whose labels were neither counted (`num_labels`) nor named (`id2label`) gets the 3,129 answers of
    VQA v2.

    Its `labels` are soft targets in [0, 1], the share of people who gave an answer (see `vqa_soft_targets`), or the
    index of the one right answer. The loss is binary cross entropy, summed over answers, averaged over the batch.
    """
)
class ITNetForVisualQuestionAnswering(ITNetImageTextInputs, ITNetPooledClassifier):
    takes_label_smoothing = False

    def __init__(self, config: ITNetConfig):
        if config.modality == self.modality and config.labels_are_default:
            config.num_labels = VQA_V2_ANSWERS
        super().__init__(config)

    def output(self, outputs: ITNetModelOutput, predictions: dict, labels: Tensor | None = None, **kwargs):
        loss, logits = None, predictions["logits"]
        if labels is not None:
            is_index = check_tensor(labels, "labels").dim() == 1
            check_labels(labels, logits, "single_label_classification" if is_index else "multi_label_classification")
            targets = F.one_hot(labels, self.num_labels) if is_index else labels
            targets = targets.to(logits.device, torch.float32)
            loss = F.binary_cross_entropy_with_logits(logits.float(), targets, reduction="sum") / len(logits)
        return super().output(outputs, predictions, labels, loss, **kwargs)


@auto_docstring(
    custom_intro="""
    ITNet for a statement about two images (NLVR2): each image goes through the model with the text, and a linear layer
    reads the two [CLS] features side by side.

    Its `labels` are as in [`ITNetForImageClassification`].
    """
)
class ITNetForImagesAndTextClassification(ITNetImageTextInputs, ITNetPooledClassifier):
    num_images = num_inputs = 2


def vqa_soft_targets(answers: list[list[str]], label2id: dict[str, int]) -> Tensor:
    """Returns the score of every answer by what people said (VQA v2): [B, num_labels] in [0, 1].

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
    """Returns the VQA accuracy: the mean soft target of the answer with the highest score, [B, num_labels] each.

    With ``targets`` of class indices [B] it is plain accuracy.
    """
    best = logits.argmax(-1)
    if targets.dim() == 1:
        return (best == targets).float().mean().item()
    return targets.gather(1, best.unsqueeze(1)).mean().item()
