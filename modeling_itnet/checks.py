# SPDX-License-Identifier: Apache-2.0
"""Checks of what is given to a model. An error names the argument, what it is, and what it should have been."""

from typing import Any

import torch
from torch import Tensor, nn

from itnet_kernels.transforms import may_look_at
from itnet_kernels.validation import is_one_of


def check_tensor(value: Any, name: str) -> Tensor:
    """Returns the value if it is a tensor; says what a list, array or number in its place should have been."""
    if not isinstance(value, Tensor):
        raise ValueError(
            f"`{name}` ({type(value).__name__}) must be a torch.Tensor: a processor or tokenizer makes tensors with "
            '`return_tensors="pt"`, and torch.as_tensor makes one of an array or a list'
        )
    return value


def check_shape(
    value: Tensor | None, name: str, *shapes: list[int | str], note: str = "", may_be_empty: bool = False
) -> Tensor:
    """Returns a tensor of one of the ``shapes``, where a word is an axis of any length. A ``note`` ends the error."""
    given = None if value is None else list(check_tensor(value, name).shape)
    for shape in shapes if given is not None else ():
        # One by one: sizes may be the symbols of a compiled graph, which `in` cannot compare.
        if len(given) == len(shape) and all(
            (isinstance(axis, str) or size == axis) and (may_be_empty or size > 0)
            for size, axis in zip(given, shape, strict=True)
        ):
            return value
    expected = " or ".join(f"[{', '.join(map(str, shape))}]" for shape in shapes)
    raise ValueError(f"`{name}` {given} must be {expected}{note}")


def check_mask(
    mask: Tensor | None, batch: int, count: int, name: str = "attention_mask", may_be_empty: bool = False
) -> Tensor | None:
    """Returns a padding mask as float32 zeros and ones [B, n], or None; says what is wrong with one that does not fit.

    A piece of a text ``may_be_empty``, all of it padding; a whole text may not.
    """
    if mask is None:
        return None
    check_shape(mask, name, [batch, count], note=": 1 for each real position, 0 for padding")
    real = mask != 0
    if may_look_at(mask):
        strange = mask[real & (mask != 1)]
        if strange.numel():
            raise ValueError(
                f"`{name}` holds {strange[0].item()}, but must hold 1 for each real position and 0 for padding; masks "
                "that are added to scores, with 0 for real positions, mean the opposite"
            )
        if not may_be_empty and not bool(real.any(1).all()):
            empty = (~real.any(1)).nonzero().flatten().tolist()
            raise ValueError(f"`{name}` removes every position of sample(s) {empty}; at least one must remain")
    return real.float()


def check_ids(ids: Tensor, count: int, name: str, limit: str) -> Tensor:
    """Returns the indices of an embedding of ``count`` rows; says which are out of range, and what sets it."""
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"`{name}` ({ids.dtype}) must be integers, from 0 to {count - 1}")
    if may_look_at(ids) and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < count:
        worst = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        raise ValueError(f"`{name}` hold {worst}, but `{limit}` is {count}: they must be from 0 to {count - 1}")
    return ids


def check_labels(labels: Tensor, logits: Tensor, problem_type: str) -> None:
    """Says what is wrong with the labels of ``logits`` [..., C]; `ITNetHead.output` says how they should be."""
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


def input_dtype(layer: nn.Module) -> torch.dtype:
    """Returns the dtype that a layer takes: that of its weight, or of its bias where the weight is quantised.

    Quantised layers hold integers, or a method that unpacks them, and then take the default dtype at worst.
    """
    for tensor in (layer.weight, layer.bias):
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            return tensor.dtype
    return torch.get_default_dtype()
