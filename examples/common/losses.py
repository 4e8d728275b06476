"""The loss of the peers, whose own heads take no soft labels, or have losses that do not add up over a step."""

from collections.abc import Callable

import torch
from torch import Tensor

from modeling_itnet.heads.common import batch_share, label_loss


def peer_loss(label_smoothing: float = 0.0) -> Callable:
    """A `compute_loss_func` for the Trainer: cross entropy with classes [...] or soft labels [..., C].

    Labels are smoothed in training. The Trainer expects the batch's part of the mean over all batches of an optimizer
    step, on all processes: a plain mean would be multiplied by the number of processes and of accumulated batches.
    """

    def loss(outputs, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        smoothing = label_smoothing if torch.is_grad_enabled() else 0.0
        mean = label_loss(outputs["logits"], labels, "single_label_classification", smoothing)
        return mean * batch_share(labels, num_items_in_batch)

    return loss
