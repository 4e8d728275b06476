# SPDX-License-Identifier: Apache-2.0
"""The head of images."""

from torch import Tensor
from transformers.modeling_outputs import ImageClassifierOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, auto_docstring
from transformers.utils.generic import can_return_tuple

from configuration_itnet import ITNetConfig

from ..modeling_itnet import ITNetModel, ITNetPreTrainedModel
from .common import ITNetClassifier, batch_loss, check_modality


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


__all__ = ["ITNetForImageClassification"]
