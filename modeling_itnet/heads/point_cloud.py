# SPDX-License-Identifier: Apache-2.0
"""The head that classifies point clouds."""

from torch import Tensor
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, auto_docstring
from transformers.utils.generic import can_return_tuple

from ..modeling_itnet import INPUTS
from .common import ITNetPooledClassifier


@auto_docstring(
    custom_intro="""
    ITNet with a point cloud classification head: a linear layer on the mean over all points. The order of the points
    does not matter.
    """
)
class ITNetForPointCloudClassification(ITNetPooledClassifier):
    modality = "point_cloud"
    main_input_name = "points"

    @can_return_tuple
    @auto_docstring(custom_args=INPUTS)
    def forward(
        self,
        points: Tensor | None = None,
        point_features: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SequenceClassifierOutput:
        outputs = self.itnet(points=points, point_features=point_features, attention_mask=attention_mask, **kwargs)
        logits = self.classifier(self.dropout(outputs.pooler_output))
        return self.output(outputs, {"logits": logits}, labels, **kwargs)
