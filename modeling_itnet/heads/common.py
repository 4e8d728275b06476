# SPDX-License-Identifier: Apache-2.0
"""What the heads share: the classifier, and the checks and losses of labels."""

import torch
from torch import Tensor, nn

from configuration_itnet import ITNetConfig

from ..domain import can_read_values, check_tensor
from ..outputs import batch_share


def check_modality(model: nn.Module, config: ITNetConfig, *allowed: str) -> None:
    """A head that reads one kind of input says so before any weight is made."""
    if config.modality not in allowed:
        raise ValueError(
            f"{type(model).__name__} needs `modality` in {list(allowed)}, but the config has {config.modality!r}"
        )


def check_labels(labels: Tensor, logits: Tensor, problem_type: str | None = None) -> None:
    """Says what is wrong with the labels of ``logits`` [..., C].

    Class indices [...] from 0 to C - 1, or -100 for none; else numbers, one for each of the logits. Which of the two
    ``problem_type`` says, or, as in Transformers' losses, C and the dtype of the labels.
    """
    check_tensor(labels, "labels")
    samples, classes = list(logits.shape[:-1]), logits.shape[-1]
    if problem_type is None:
        problem_type = "regression"
        if classes > 1 and labels.dtype in (torch.int32, torch.int64):
            problem_type = "single_label_classification"
    are_indices = problem_type == "single_label_classification"
    expected, what = samples, "class indices" if are_indices else "one number for each"
    if not are_indices and classes > 1:
        expected, what = [*samples, classes], "a number for each of `num_labels`"
    if list(labels.shape) not in (expected, [*samples, 1] if expected is samples else expected):
        raise ValueError(
            f"`labels` {list(labels.shape)} must be {expected}: {what}, as `logits` are {[*samples, classes]}"
        )
    if not are_indices:
        return
    if labels.is_floating_point():
        raise ValueError(f"`labels` ({labels.dtype}) must be integers: {what} from 0 to {classes - 1}")
    if can_read_values(labels):
        strange = labels[(labels != -100) & ((labels < 0) | (labels >= classes))]
        if strange.numel():
            raise ValueError(
                f"`labels` hold {strange[0].item()}, but there are {classes} classes: they must be from 0 to "
                f"{classes - 1}, or -100 where there is none"
            )


def batch_loss(model: nn.Module, labels: Tensor, logits: Tensor, num_items_in_batch=None, **kwargs) -> Tensor:
    """The loss of one label or one row of labels per sample: labels [B] or [B, C], logits [B, C] -> scalar.

    Cross entropy, squared error or binary cross entropy, as Transformers chooses by ``config.problem_type``: the mean
    over the batch, or with Trainer's ``num_items_in_batch`` the batch's part of the mean over the optimizer step,
    which Transformers itself computes for cross entropy only.
    """
    check_labels(labels, logits, model.config.problem_type)
    return model.loss_function(labels, logits, model.config) * batch_share(labels, num_items_in_batch)


class ITNetClassifier(nn.Linear):
    """Dropout and a linear map on features: [..., d] -> [..., num_labels]; ``num_inputs`` d in place of d."""

    def __init__(self, config: ITNetConfig, num_inputs: int = 1):
        super().__init__(num_inputs * config.hidden_size, config.num_labels)
        rate = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
        self.dropout = nn.Dropout(rate)

    def forward(self, pooled: Tensor) -> Tensor:
        return super().forward(self.dropout(pooled))

    def _load_from_state_dict(self, state_dict, prefix, *args):
        """Takes, where the linear map was a part of this module."""
        for name in ("weight", "bias"):
            if f"{prefix}linear.{name}" in state_dict:
                state_dict[f"{prefix}{name}"] = state_dict.pop(f"{prefix}linear.{name}")
        super()._load_from_state_dict(state_dict, prefix, *args)
