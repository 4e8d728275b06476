"""The loss of the peers, whose own heads take no soft labels, or have losses that do not add up over a step."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F


def peer_loss(label_smoothing: float = 0.0) -> Callable:
    """Returns a `compute_loss_func` for the Trainer: cross entropy with classes [...] or soft labels [..., C].

    Labels are smoothed in training. The Trainer expects the batch's part of the mean over all batches of an optimizer
    step, on all processes: a plain mean would be multiplied by the number of processes and of accumulated batches.
    """

    def loss(outputs, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        logits, soft = outputs["logits"].flatten(0, -2).float(), labels.is_floating_point()
        smoothing = label_smoothing if torch.is_grad_enabled() else 0.0
        total = F.cross_entropy(
            logits, labels if soft else labels.flatten(), reduction="sum", label_smoothing=smoothing
        )
        items = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
        return total * (labels.shape[-1] if soft else 1) / items  # the Trainer counts all numbers of soft labels

    return loss


def next_token_loss(label_smoothing: float = 0.0) -> Callable:
    """Does the same for labels [B, n] that are the tokens themselves: each is predicted from those before it."""
    loss = peer_loss(label_smoothing)

    def shifted(outputs, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        return loss({"logits": outputs["logits"][:, :-1]}, labels[:, 1:], num_items_in_batch)

    return shifted
