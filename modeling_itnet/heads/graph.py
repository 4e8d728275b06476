# SPDX-License-Identifier: Apache-2.0
"""The head that classifies graphs."""

from torch import Tensor
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, auto_docstring
from transformers.utils.generic import can_return_tuple

from ..modeling_itnet import INPUTS
from .common import ITNetPooledClassifier


@auto_docstring(custom_intro="ITNet with a graph classification head: a linear layer on the mean over all nodes.")
class ITNetForGraphClassification(ITNetPooledClassifier):
    modality = "graph"
    main_input_name = "node_features"

    @can_return_tuple
    @auto_docstring(custom_args=INPUTS)
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
        inputs = {"node_features": node_features, "node_types": node_types, "neighbors": neighbors}
        outputs = self.itnet(positions=positions, attention_mask=attention_mask, **inputs, **kwargs)
        logits = self.classifier(self.dropout(outputs.pooler_output))
        return self.output(outputs, {"logits": logits}, labels, **kwargs)
