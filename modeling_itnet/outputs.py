# SPDX-License-Identifier: Apache-2.0
"""What the models return: Transformers' outputs with one field more, the proposal loss of Monte Carlo integration."""

from dataclasses import dataclass

from torch import Tensor
from transformers import Cache
from transformers.modeling_outputs import (
    BaseModelOutputWithPooling,
    CausalLMOutputWithPast,
    ImageClassifierOutput,
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils import ModelOutput


@dataclass
class ITNetModelOutput(BaseModelOutputWithPooling):
    r"""
    past_key_values (`ITNetCache`, *optional*, returned by causal models when `use_cache=True`):
        What a causal model keeps of the tokens so far, to continue with later ones.
    proposal_loss (`torch.FloatTensor` of shape `(1,)`, *optional*, when training with Monte Carlo integration):
        What trains the proposal, averaged over the layers. A head adds it to its loss, with the factor
        `config.proposal_loss_weight`, and returns it beside that.
    """

    past_key_values: Cache | None = None
    proposal_loss: Tensor | None = None


@dataclass
class ITNetCausalLMOutput(CausalLMOutputWithPast):
    proposal_loss: Tensor | None = None


@dataclass
class ITNetImageClassifierOutput(ImageClassifierOutput):
    proposal_loss: Tensor | None = None


@dataclass
class ITNetMaskedLMOutput(MaskedLMOutput):
    proposal_loss: Tensor | None = None


@dataclass
class ITNetQuestionAnsweringModelOutput(QuestionAnsweringModelOutput):
    proposal_loss: Tensor | None = None


@dataclass
class ITNetSequenceClassifierOutput(SequenceClassifierOutput):
    proposal_loss: Tensor | None = None


@dataclass
class ITNetTokenClassifierOutput(TokenClassifierOutput):
    proposal_loss: Tensor | None = None


@dataclass
class SignalRegressionOutput(ModelOutput):
    """
    Args:
        loss (`torch.FloatTensor` of shape `(1,)`, *optional*, returned when `labels` is provided):
            The error that `config.signal_loss` names, averaged over samples.
        predictions (`torch.FloatTensor` of shape `(batch_size, num_queries, num_labels)`):
            Values of the output function at the query positions.
        hidden_states (`tuple(torch.FloatTensor)`, *optional*, returned when `output_hidden_states=True` is passed):
            Features of the encoder and of every layer, at the input positions.
        proposal_loss (`torch.FloatTensor` of shape `(1,)`, *optional*, when training with Monte Carlo integration):
            What trains the proposal, averaged over the layers.
    """

    loss: Tensor | None = None
    predictions: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    proposal_loss: Tensor | None = None
