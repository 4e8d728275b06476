# SPDX-License-Identifier: Apache-2.0
"""A Trainer that leaves losses to the heads, and logs what trains the proposals of Monte Carlo integration."""

import torch
from transformers import Trainer


class ITNetTrainer(Trainer):
    """
    Trains as Transformers' `Trainer` does, with two differences:

    - `label_smoothing_factor` is handed to an ITNet head in training, as the keyword `label_smoothing` of its call.
      Transformers' own smoothing takes the labels away from the model, which then cannot add the loss of its
      proposal, and knows no soft labels. It remains in use for other models.
    - `proposal_loss` is logged when a model trains a proposal: the mean over the steps since the last entry, before
      the factor `config.proposal_loss_weight` with which `loss` contains it.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._proposal_losses: list[torch.Tensor] = []
        model, factor = self.accelerator.unwrap_model(self.model), self.args.label_smoothing_factor
        takes_smoothing = getattr(model, "takes_label_smoothing", None)  # None for other models than ours
        if factor and takes_smoothing is False:
            name = type(model).__name__
            raise ValueError(f"`label_smoothing_factor` ({factor}) must be 0: the loss of {name} has no classes")
        self._head_smoothing = factor if takes_smoothing else 0.0
        if takes_smoothing:
            self.label_smoother = None

    def compute_loss(self, model, inputs, return_outputs: bool = False, **kwargs):
        if self._head_smoothing and model.training:
            inputs = {**inputs, "label_smoothing": self._head_smoothing}
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        proposal_loss = outputs.get("proposal_loss") if hasattr(outputs, "get") else None
        if proposal_loss is not None:
            self._proposal_losses.append(proposal_loss.detach())
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        if self._proposal_losses and "loss" in logs:
            mean = torch.stack(self._proposal_losses).mean()
            logs["proposal_loss"] = self.accelerator.gather(mean).mean().item()
            self._proposal_losses.clear()
        super().log(logs, *args, **kwargs)
