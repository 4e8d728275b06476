# SPDX-License-Identifier: Apache-2.0
"""The head of graphs."""

from torch import Tensor
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, auto_docstring
from transformers.utils.generic import can_return_tuple

from ..modeling_itnet import main_input_first
from .common import ITNetPooledClassifier


@auto_docstring(
    custom_intro="""
    ITNet with a graph classification head: a linear layer on the mean over all nodes.
    """
)
class ITNetForGraphClassification(ITNetPooledClassifier):
    modality = "graph"
    main_input_name = "node_features"

    @main_input_first
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
            As in [`ITNetForImageClassification`].
        """
        inputs = {"node_features": node_features, "node_types": node_types, "neighbors": neighbors}
        outputs = self.itnet(positions=positions, attention_mask=attention_mask, **inputs, **kwargs)
        logits = self.classifier(self.dropout(outputs.pooler_output))
        loss = None if labels is None else self.task_loss(logits, labels, **kwargs)
        return self.output(outputs, loss, labels, kwargs.get("num_items_in_batch"), logits=logits)
