# SPDX-License-Identifier: Apache-2.0
"""What the heads share: the losses of labels, the part of the proposal loss, and the classifier of pooled features.

A head adds the loss of the proposal to its own in one line, `loss = self.total_loss(...)`. It takes `label_smoothing`
as a keyword of the call where its labels are classes.
"""

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


def check_labels(labels: Tensor, logits: Tensor, problem_type: str | None = None) -> str:
    """The kind of problem that ``labels`` are for, given ``logits`` [..., C]; says what is wrong with them.

    "single_label_classification": class indices [...] from 0 to C - 1, or -100 for none, or the share of each class
    [..., C], as MixUp makes them. Else numbers, one for each of the logits. Without ``problem_type`` it follows from C
    and the dtype of the labels, as in Transformers' losses.
    """
    shape, per_class = list(check_tensor(labels, "labels").shape), list(logits.shape)
    *samples, classes = per_class
    if problem_type is None:
        is_index = labels.dtype in (torch.int32, torch.int64)
        problem_type = "single_label_classification" if is_index else "multi_label_classification"
        problem_type = "regression" if classes == 1 else problem_type
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
        return problem_type
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
    return problem_type


def label_loss(logits: Tensor, labels: Tensor, problem_type: str, label_smoothing: float = 0.0, **kwargs) -> Tensor:
    """The mean loss of ``logits`` [..., C] over checked ``labels``: squared error, binary or plain cross entropy.

    Cross entropy is -sum_c t_c log softmax(logits)_c. t_c is the share of class c, which is 1 or 0 for class indices;
    with ``label_smoothing`` s it is (1 - s) t_c + s / C.
    """
    logits = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
    if problem_type != "single_label_classification":
        if label_smoothing:
            raise ValueError(f"`label_smoothing` ({label_smoothing}) is for classes, not for {problem_type!r}")
        loss = F.mse_loss if problem_type == "regression" else F.binary_cross_entropy_with_logits
        return loss(logits, labels.to(logits).view_as(logits))
    labels, count = labels.to(logits.device).view(len(logits), -1), len(logits)
    if labels.is_floating_point():
        labels = labels.to(logits.dtype)
    else:
        labels = labels.squeeze(-1)
        count = (labels != -100).sum().clamp(min=1)  # a part of a batch may have no label
    return F.cross_entropy(logits, labels, reduction="sum", label_smoothing=label_smoothing) / count


def batch_share(labels: Tensor | None, num_items_in_batch: Tensor | int | None) -> Tensor | float:
    """The factor that turns the mean over a batch into its part of the mean over all batches of an optimizer step.

    Trainer counts ``num_items_in_batch``, the labels other than -100 of all accumulated batches and all processes. A
    mean over the labels of one batch, times (labels here / labels of all), adds up to the mean over all of them. The
    factor is 1 where nobody counts, or where ``labels`` are not given.
    """
    if labels is None or num_items_in_batch is None:
        return 1.0
    return (labels != -100).sum() / num_items_in_batch


class ITNetHead(ITNetPreTrainedModel):
    """An ITNetModel with a read-out and a loss. A head names its ``modality`` and has an explicit forward, which calls
    `self.itnet` and then `read_out`; it defines `scores`, from features to logits, and `task_loss`.
    """

    modality: str
    output_class: type[ModelOutput] = ITNetSequenceClassifierOutput
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

    def read_out(self, outputs: ITNetModelOutput, labels: Tensor | None, **kwargs) -> ModelOutput:
        logits = self.scores(outputs)
        loss = None if labels is None else self.task_loss(logits, labels, **kwargs)
        loss = self.total_loss(loss, outputs.proposal_loss, labels, **kwargs)
        return self.output_class(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, proposal_loss=outputs.proposal_loss
        )

    def task_loss(self, logits: Tensor, labels: Tensor, **kwargs) -> Tensor:
        """The mean over all labels of a batch."""
        # Noted in the config, as Transformers' losses do: pipelines look there which function goes with the logits.
        self.config.problem_type = check_labels(labels, logits, self.config.problem_type)
        return label_loss(logits, labels, self.config.problem_type, **kwargs)

    def total_loss(
        self, loss: Tensor | None, proposal_loss: Tensor | None, labels: Tensor | None, num_items_in_batch=None, **_
    ) -> Tensor | None:
        """(loss + lambda proposal_loss) share, with lambda = `config.proposal_loss_weight`.

        ``loss`` is the mean over the ``labels`` of the batch, and None if there are none; `batch_share` explains the
        share, by which batches that are accumulated add up.
        """
        if proposal_loss is not None and loss is not None:
            loss = loss + self.config.proposal_loss_weight * proposal_loss
        elif proposal_loss is not None and not torch.compiler.is_compiling():
            logger.warning_once(
                "The proposals of Monte Carlo integration are trained by a loss of their own, which the model adds to "
                "its loss when it gets `labels`. A loss that is computed outside must add "
                "`config.proposal_loss_weight * output.proposal_loss`. Label smoothing needs no loss outside: "
                "ITNetTrainer hands it to the model"
            )
        return None if loss is None else loss * batch_share(labels, num_items_in_batch)


class ITNetClassifier(nn.Linear):
    """Dropout and a linear map on features: [..., d] -> [..., num_labels].

    With ``num_inputs`` k > 1 it reads k inputs of a sample side by side: [k B, d] -> [B, num_labels].
    """

    def __init__(self, config: ITNetConfig, num_inputs: int = 1):
        super().__init__(num_inputs * config.hidden_size, config.num_labels)
        rate = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
        self.num_inputs, self.dropout = num_inputs, nn.Dropout(rate)

    def forward(self, features: Tensor) -> Tensor:
        if self.num_inputs > 1:
            features = features.unflatten(0, (-1, self.num_inputs)).flatten(1)
        return super().forward(self.dropout(features))

    def _load_from_state_dict(self, state_dict, prefix, *args):
        """Takes early checkpoints too, where the linear map was a part of this module."""
        for name in ("weight", "bias"):
            if f"{prefix}linear.{name}" in state_dict:
                state_dict[f"{prefix}{name}"] = state_dict.pop(f"{prefix}linear.{name}")
        super()._load_from_state_dict(state_dict, prefix, *args)


class ITNetPooledClassifier(ITNetHead):
    """Classes, several labels or numbers of a whole sample, by a linear map of its pooled features."""

    num_inputs = 1  # of which a sample consists

    def __init__(self, config: ITNetConfig):
        super().__init__(config)
        self.classifier = ITNetClassifier(config, self.num_inputs)
        self.post_init()

    def scores(self, outputs: ITNetModelOutput) -> Tensor:
        return self.classifier(outputs.pooler_output)
