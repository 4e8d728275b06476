# SPDX-License-Identifier: Apache-2.0
"""What the heads share: labels and their loss, the proposal loss beside it, and the classifier of pooled features."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.utils import ModelOutput, logging

from configuration_itnet import ITNetConfig
from itnet_kernels.transforms import may_look_at
from itnet_kernels.validation import is_one_of

from ..domain import check_tensor
from ..modeling_itnet import ITNetModel, ITNetPreTrainedModel
from ..outputs import ITNetModelOutput, ITNetSequenceClassifierOutput

logger = logging.get_logger(__name__)


def check_labels(labels: Tensor, logits: Tensor, problem_type: str) -> None:
    """Says what is wrong with the labels of ``logits`` [..., C]; `ITNetHead.task_loss` says how they should be."""
    shape, per_class = list(labels.shape), list(logits.shape)
    *samples, classes = per_class
    are_classes = problem_type == "single_label_classification"
    are_shares = are_classes and labels.is_floating_point() and shape == per_class
    expected, what = samples, "class indices" if are_classes else "one number for each"
    if not are_classes and classes > 1:
        expected, what = per_class, "a number for each of `num_labels`"
    allowed = (expected, per_class if are_shares else [*expected, 1] if expected is samples else expected)
    if not is_one_of(shape, *allowed):
        raise ValueError(f"`labels` {shape} must be {expected}: {what}, as `logits` are {per_class}")
    if are_classes and not are_shares and labels.is_floating_point():
        raise ValueError(f"`labels` ({labels.dtype}) must be integers: {what} from 0 to {classes - 1}")
    if not are_classes or not may_look_at(labels):
        return
    if are_shares and not ((labels >= 0).all() and ((labels.float().sum(-1) - 1).abs() < 0.01).all()):
        raise ValueError(
            f"`labels` {shape} must be shares of the classes, which are not negative and sum to 1; for several "
            'classes at once, set `config.problem_type="multi_label_classification"`'
        )
    strange = labels[(labels != -100) & ((labels < 0) | (labels >= classes))]
    if not are_shares and strange.numel():
        raise ValueError(
            f"`labels` hold {strange[0].item()}, but there are {classes} classes: they must be from 0 to "
            f"{classes - 1}, or -100 where there is none"
        )


class ITNetHead(ITNetPreTrainedModel):
    """An ITNetModel with a read-out and a loss. The forward of a head has four steps: `self.itnet`, from the output of
    which it makes its logits, of which `task_loss` is the mean loss, from all of which `output` makes what it returns.
    """

    modality: str
    output_class: type[ModelOutput] = ITNetSequenceClassifierOutput
    problem_type: str | None = None  # of heads for which `config.problem_type` is no choice
    takes_label_smoothing = True  # as the keyword `label_smoothing` of a call

    def __init__(self, config: ITNetConfig):
        super().__init__(config)
        if config.modality != self.modality:
            raise ValueError(
                f"{type(self).__name__} needs `modality` in {[self.modality]}, but the config has {config.modality!r}"
            )
        self.num_labels = config.num_labels
        self.itnet = ITNetModel(config)
        self.main_input_name = self.itnet.main_input_name

    def task_loss(self, logits: Tensor, labels: Tensor, label_smoothing: float = 0.0, **kwargs) -> Tensor:
        """The mean loss of ``logits`` [..., C] over all ``labels`` of a batch, by `config.problem_type`.

        - "single_label_classification": -sum_c t_c log softmax(logits)_c. The labels are class indices [...] from 0 to
          C - 1, or -100 for none, or shares t_c of the classes [..., C], as MixUp makes them. ``label_smoothing`` s
          puts (1 - s) t_c + s / C in place of t_c.
        - "multi_label_classification", "regression": binary cross entropy or squared error. There is a label for each
          of the logits.

        If the config does not say, it follows from C and the dtype of the labels, as in Transformers' losses. These
        note it in the config, too, where pipelines look which function goes with the logits.
        """
        is_index = check_tensor(labels, "labels").dtype in (torch.int32, torch.int64)
        kind = self.problem_type or self.config.problem_type
        if kind is None:
            kind = "single_label_classification" if is_index else "multi_label_classification"
            kind = self.config.problem_type = "regression" if logits.shape[-1] == 1 else kind
        check_labels(labels, logits, kind)
        logits = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
        if kind != "single_label_classification":
            if label_smoothing:
                raise ValueError(f"`label_smoothing` ({label_smoothing}) is for classes, not for {kind!r}")
            loss = F.mse_loss if kind == "regression" else F.binary_cross_entropy_with_logits
            return loss(logits, labels.to(logits).view_as(logits))
        if labels.is_floating_point():
            labels, count = labels.to(logits).view_as(logits), len(logits)
        else:
            labels = labels.to(logits.device).flatten()
            count = (labels != -100).sum().clamp(min=1)  # a part of a batch may have no label
        return F.cross_entropy(logits, labels, reduction="sum", label_smoothing=label_smoothing) / count

    def output(
        self,
        outputs: ITNetModelOutput,
        loss: Tensor | None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **predictions: Tensor,
    ) -> ModelOutput:
        """What the head returns, with (loss + lambda proposal_loss) share as its loss.

        ``loss`` is the mean over the ``labels`` of a batch, or None. Trainer counts ``num_items_in_batch``, the labels
        other than -100 of all accumulated batches and all processes. The share is (labels here / labels of all), by
        which the losses of the batches add up to the mean over all labels, or 1 where nobody counts.
        """
        if loss is not None and outputs.proposal_loss is not None:
            loss = loss + self.config.proposal_loss_weight * outputs.proposal_loss
        elif outputs.proposal_loss is not None and not torch.compiler.is_compiling():
            logger.warning_once(
                "The proposals of Monte Carlo integration are trained by a loss of their own, which the model adds to "
                "its loss when it gets `labels`. A loss that is computed outside must add "
                "`config.proposal_loss_weight * output.proposal_loss`. Label smoothing needs no loss outside: "
                "ITNetTrainer hands it to the model"
            )
        if loss is not None and labels is not None and num_items_in_batch is not None:
            loss = loss * ((labels != -100).sum() / num_items_in_batch)
        proposal_loss, hidden_states = outputs.proposal_loss, outputs.hidden_states
        return self.output_class(loss=loss, **predictions, hidden_states=hidden_states, proposal_loss=proposal_loss)


class ITNetPooledClassifier(ITNetHead):
    """Classes, several labels or numbers, by dropout and a linear map on pooled features, or those of every position.

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
