# SPDX-License-Identifier: Apache-2.0
"""A Trainer that also logs what trains the proposals of Monte Carlo integration."""

import torch
from transformers import Trainer

from ..outputs import batch_share


class ITNetTrainer(Trainer):
    """
    As Transformers' `Trainer`, with `proposal_loss` in its logs when a model trains a proposal: the mean over the
    steps since the last entry, before the factor `config.proposal_loss_weight` with which `loss` contains it. Where
    the trainer computes the loss instead of the model (`label_smoothing_factor`), it adds this part itself.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._proposal_losses: list[torch.Tensor] = []

    def compute_loss(self, model, inputs, return_outputs: bool = False, **kwargs):
        labels = inputs.get("labels")
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        proposal_loss = outputs.get("proposal_loss") if hasattr(outputs, "get") else None
        if proposal_loss is not None:
            self._proposal_losses.append(proposal_loss.detach())
            if outputs.get("loss") is None and self.label_smoother is not None and self.compute_loss_func is None:
                items = kwargs.get("num_items_in_batch")
                share = batch_share(labels, items)
                if items is not None and self.args.average_tokens_across_devices:
                    share = share * self.accelerator.num_processes  # as Trainer does with the rest of the loss
                weight = self.accelerator.unwrap_model(model).config.proposal_loss_weight
                loss = loss + weight * share * proposal_loss
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        if self._proposal_losses and "loss" in logs:
            mean = torch.stack(self._proposal_losses).mean()
            logs["proposal_loss"] = self.accelerator.gather(mean).mean().item()
            self._proposal_losses.clear()
        super().log(logs, *args, **kwargs)


__all__ = ["ITNetTrainer"]
