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
"""Heads for point clouds and graphs: a linear classifier on the mean over all points or nodes."""

from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPooling, SequenceClassifierOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, auto_docstring
from transformers.utils.generic import can_return_tuple

from configuration_itnet import ITNetConfig

from .heads import ITNetClassifier, batch_loss, check_modality
from .modeling_itnet import ITNetModel, ITNetPreTrainedModel


class ITNetPooledClassifier(ITNetPreTrainedModel):
    """What the classifiers of this file share; they differ in the inputs they name."""

    modality: str

    def __init__(self, config: ITNetConfig):
        super().__init__(config)
        check_modality(self, config, self.modality)
        self.num_labels = config.num_labels
        self.loss_type = "ForSequenceClassification"  # Transformers knows no loss for these class names
        self.itnet = ITNetModel(config)
        self.classifier = ITNetClassifier(config)
        self.main_input_name = self.itnet.main_input_name
        self.post_init()

    def _classify(
        self, outputs: BaseModelOutputWithPooling, labels: Tensor | None, num_items_in_batch=None, **kwargs
    ) -> SequenceClassifierOutput:
        logits = self.classifier(outputs.pooler_output)
        loss = batch_loss(self, labels, logits, num_items_in_batch) if labels is not None else None
        return SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)


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
            Class indices, or floats for regression (`num_labels == 1`) and multi-label targets.
        """
        outputs = self.itnet(points=points, point_features=point_features, attention_mask=attention_mask, **kwargs)
        return self._classify(outputs, labels, **kwargs)


@auto_docstring(
    custom_intro="""
    ITNet with a graph classification head: a linear layer on the mean over all nodes.
    """
)
class ITNetForGraphClassification(ITNetPooledClassifier):
    modality = "graph"
    main_input_name = "node_features"

    @can_return_tuple
    @auto_docstring
    def forward(
        self,
        node_features: Tensor | None = None,
        node_types: Tensor | None = None,
        positions: Tensor | None = None,
        neighbors: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SequenceClassifierOutput:
        r"""
        node_features (`torch.FloatTensor` of shape `(batch_size, num_nodes, node_feature_size)`, *optional*):
            Features of the nodes.
        node_types (`torch.LongTensor` of shape `(batch_size, num_nodes)`, *optional*):
            Labels of the nodes, in place of `node_features`, if `num_node_types` is positive.
        positions (`torch.FloatTensor` of shape `(batch_size, num_nodes, position_dim)`, *optional*):
            Laplacian positions of the nodes.
        neighbors (`torch.LongTensor` of shape `(batch_size, num_nodes, max_degree)`, *optional*):
            Indices of the nodes next to each node, and -1 where it has fewer.
        labels (`torch.Tensor` of shape `(batch_size,)` or `(batch_size, num_labels)`, *optional*):
            Class indices, or floats for regression (`num_labels == 1`) and multi-label targets.
        """
        outputs = self.itnet(
            node_features=node_features,
            node_types=node_types,
            positions=positions,
            neighbors=neighbors,
            attention_mask=attention_mask,
            **kwargs,
        )
        return self._classify(outputs, labels, **kwargs)


__all__ = ["ITNetForGraphClassification", "ITNetForPointCloudClassification"]
