# SPDX-License-Identifier: Apache-2.0
"""The classifier of pooled features, which most heads derive from."""

from torch import nn

from configuration_itnet import ITNetConfig

from ..modeling_itnet import ITNetHead


class ITNetPooledClassifier(ITNetHead):
    """Predicts classes, labels or numbers by dropout and a linear map on features that are pooled, or of every
    position.

    A sample may consist of ``num_inputs`` k > 1, whose features it reads side by side.
    """

    num_inputs = 1

    def __init__(self, config: ITNetConfig):
        super().__init__(config)
        rate = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
        self.dropout = nn.Dropout(rate)
        self.classifier = nn.Linear(self.num_inputs * config.hidden_size, config.num_labels)
        self.post_init()

    def _load_from_state_dict(self, state_dict, prefix, *args):
        """Takes early checkpoints too, where the linear map was a part of the classifier."""
        for name in ("weight", "bias"):
            if f"{prefix}classifier.linear.{name}" in state_dict:
                state_dict[f"{prefix}classifier.{name}"] = state_dict.pop(f"{prefix}classifier.linear.{name}")
        super()._load_from_state_dict(state_dict, prefix, *args)
