# SPDX-License-Identifier: Apache-2.0
"""The head of point clouds."""

from torch import Tensor
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, auto_docstring
from transformers.utils.generic import can_return_tuple

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
    @auto_docstring
    def forward(
        self,
        points: Tensor | None = None,
        point_features: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SequenceClassifierOutput:
        r"""
        points (`torch.FloatTensor` of shape `(batch_size, num_points, 3)`, *optional*):
            Coordinates. Shorter clouds are padded, and `attention_mask` says where.
        point_features (`torch.FloatTensor` of shape `(batch_size, num_points, point_feature_size)`, *optional*):
            What points carry beside their coordinates, such as normals.
        labels (`torch.Tensor` of shape `(batch_size,)` or `(batch_size, num_labels)`, *optional*):
            As in [`ITNetForImageClassification`].
        """
        outputs = self.itnet(points=points, point_features=point_features, attention_mask=attention_mask, **kwargs)
        logits = self.classifier(self.dropout(outputs.pooler_output))
        loss = None if labels is None else self.task_loss(logits, labels, **kwargs)
        return self.output(outputs, loss, labels, kwargs.get("num_items_in_batch"), logits=logits)
