# SPDX-License-Identifier: Apache-2.0
"""Transformers' outputs with one field more: the proposal loss of Monte Carlo integration."""

from dataclasses import dataclass
from functools import wraps

import torch
from torch import Tensor
from transformers.modeling_outputs import (
    BaseModelOutputWithPooling,
    CausalLMOutputWithPast,
    ImageClassifierOutput,
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils import ModelOutput, logging

logger = logging.get_logger(__name__)


@dataclass
class ITNetModelOutput(BaseModelOutputWithPooling):
    r"""
    proposal_loss (`torch.FloatTensor` of shape `(1,)`, *optional*, when training with Monte Carlo integration):
        What trains the proposal, averaged over the layers.
    """

    proposal_loss: Tensor | None = None


# The output class of a head -> the same with a field ``proposal_loss`` at its end.
_WITH_PROPOSAL_LOSS: dict[type[ModelOutput], type[ModelOutput]] = {}


def with_proposal_loss(output_class: type[ModelOutput]) -> type[ModelOutput]:
    """The output class of a head with a field ``proposal_loss`` at its end."""
    if output_class not in _WITH_PROPOSAL_LOSS:
        name = f"ITNet{output_class.__name__}"
        fields = {"proposal_loss": None, "__annotations__": {"proposal_loss": Tensor | None}, "__module__": __name__}
        made = globals()[name] = dataclass(type(name, (output_class,), fields))  # where pickle looks for it
        _WITH_PROPOSAL_LOSS[output_class] = made
    return _WITH_PROPOSAL_LOSS[output_class]


# Made on import, as a compiled model cannot make classes. That of a head with an output of its own is made beside it.
for _output_class in (
    CausalLMOutputWithPast,
    ImageClassifierOutput,
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
):
    with_proposal_loss(_output_class)


def batch_share(labels: Tensor | None, num_items_in_batch: Tensor | int | None) -> Tensor | float:
    """The factor that turns the mean over a batch into its part of the mean over all batches of an optimizer step.

    Trainer counts ``num_items_in_batch``, the labels other than -100 of all accumulated batches and all processes. A
    mean over the labels of one batch, times (labels here / labels of all), adds up to the mean over all of them. The
    factor is 1 where nobody counts, or where ``labels`` are not given.
    """
    if labels is None or num_items_in_batch is None:
        return 1.0
    return (labels != -100).sum() / num_items_in_batch


def adds_proposal_loss(forward):
    """Wraps the forward of a head: loss + lambda proposal_loss, and ``proposal_loss`` in the output.

    Only where a proposal is trained; everywhere else the wrapper is not there. Task losses that divide by Trainer's
    ``num_items_in_batch`` add up over the steps of an accumulation, and then so must this one.
    """

    @wraps(forward)
    def wrapper(self, *args, **kwargs):
        if not (self.training and self.config.has_proposal):
            return forward(self, *args, **kwargs)
        return_dict = kwargs.pop("return_dict", self.config.return_dict)
        output = forward(self, *args, **kwargs, return_dict=True)
        proposal_loss = self.base_model.take_proposal_loss()
        if proposal_loss is not None:
            if output.get("loss") is not None:
                share = 1.0
                if getattr(self, "accepts_loss_kwargs", True):
                    share = batch_share(kwargs.get("labels"), kwargs.get("num_items_in_batch"))
                output["loss"] = output["loss"] + self.config.proposal_loss_weight * share * proposal_loss
            elif not torch.compiler.is_compiling():
                logger.warning_once(
                    "The proposals of Monte Carlo integration are trained by a loss of their own, which the model "
                    "adds to its loss when it gets `labels`. A loss that is computed outside must add "
                    "`config.proposal_loss_weight * output.proposal_loss`; ITNetTrainer does, with label smoothing"
                )
            output = with_proposal_loss(type(output))(**output, proposal_loss=proposal_loss)
        return output if return_dict else output.to_tuple()

    return wrapper
