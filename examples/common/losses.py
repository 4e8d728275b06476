"""Losses that scripts bring along instead of the model's own."""

from collections.abc import Callable

from torch import Tensor

from modeling_itnet.heads.common import batch_share


def step_loss(mean_loss: Callable[..., Tensor], proposal_weight: float = 0.0) -> Callable:
    """A `compute_loss_func` for the Trainer from ``mean_loss(outputs, labels)``, a mean over the labels of a batch.

    The Trainer expects the batch's part of the mean over all batches of an optimizer step, on all processes: a plain
    mean would be multiplied by the number of processes and of accumulated batches. Monte Carlo models return the loss
    of their proposal too; it joins with its weight.
    """

    def loss(outputs, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        value = mean_loss(outputs, labels)
        proposal = outputs.get("proposal_loss")
        if proposal is not None:
            value = value + proposal_weight * proposal
        return value * batch_share(labels, num_items_in_batch)

    return loss
