# SPDX-License-Identifier: Apache-2.0
"""The head that classifies images."""

from torch import Tensor
from transformers.modeling_outputs import ImageClassifierOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, auto_docstring
from transformers.utils.generic import can_return_tuple

from ..modeling_itnet import INPUTS
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
    @auto_docstring(custom_args=INPUTS)
    def forward(
        self, pixel_values: Tensor | None = None, labels: Tensor | None = None, **kwargs: Unpack[TransformersKwargs]
    ) -> ImageClassifierOutput:
        outputs = self.itnet(pixel_values=pixel_values, **kwargs)
        logits = self.classifier(self.dropout(outputs.pooler_output))
        return self.output(outputs, {"logits": logits}, labels, **kwargs)
