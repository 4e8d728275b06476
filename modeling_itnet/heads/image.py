# SPDX-License-Identifier: Apache-2.0
"""The head of images."""

from torch import Tensor
from transformers.modeling_outputs import ImageClassifierOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, auto_docstring
from transformers.utils.generic import can_return_tuple

from ..outputs import ITNetImageClassifierOutput
from .common import ITNetPooledClassifier


@auto_docstring(
    custom_intro="""
    ITNet with an image classification head: a linear layer on the [CLS] position, or on the mean over all positions
    with `config.pooling="mean"`.
    """
)
class ITNetForImageClassification(ITNetPooledClassifier):
    modality = "image"
    output_class = ITNetImageClassifierOutput

    @can_return_tuple
    @auto_docstring
    def forward(
        self, pixel_values: Tensor | None = None, labels: Tensor | None = None, **kwargs: Unpack[TransformersKwargs]
    ) -> ImageClassifierOutput:
        r"""
        pixel_values (`torch.FloatTensor` of shape `(batch_size, num_channels, height, width)`, *optional*):
            Images, as [`ITNetImageProcessor`] makes them.
        labels (`torch.Tensor` of shape `(batch_size,)` or `(batch_size, num_labels)`, *optional*):
            Class indices, or floats for regression (`num_labels == 1`) and multi-label targets. With
            `config.problem_type="single_label_classification"`, floats are shares of the classes, as MixUp and CutMix
            make them. The keyword `label_smoothing` (0.0) spreads that share of every label evenly over all classes;
            [`ITNetTrainer`] passes its `label_smoothing_factor` in training.
        """
        outputs = self.itnet(pixel_values=pixel_values, **kwargs)
        logits = self.classifier(self.dropout(outputs.pooler_output))
        loss = None if labels is None else self.task_loss(logits, labels, **kwargs)
        return self.output(outputs, loss, labels, kwargs.get("num_items_in_batch"), logits=logits)
