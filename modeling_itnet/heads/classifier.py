# SPDX-License-Identifier: Apache-2.0
"""A linear classifier on the pooled features of a sample: the head of point clouds and of graphs."""

from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPooling, SequenceClassifierOutput

from configuration_itnet import ITNetConfig

from ..modeling_itnet import ITNetModel, ITNetPreTrainedModel
from .common import ITNetClassifier, batch_loss, check_modality


class ITNetPooledClassifier(ITNetPreTrainedModel):
    """What the classifiers of point clouds and graphs share; they differ in the inputs they name."""

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
