# SPDX-License-Identifier: Apache-2.0
"""What the operators of a model are called with, for whoever looks at kernels from outside."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from ..domain import Signal
from ..operator import find_operators


def forward_arguments(model: nn.Module, inputs: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """``inputs`` without labels, or an error that calls them ``name`` if they are no keyword arguments."""
    if not isinstance(inputs, Mapping):
        example = f"{{{getattr(model, 'main_input_name', 'inputs')!r}: ...}}"
        given = f"`{name}` ({type(inputs).__name__})"
        raise ValueError(f"{given} must hold keyword arguments of the model's forward, such as {example}")
    return {key: value for key, value in inputs.items() if key != "labels" and value is not None}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within this context the model is in evaluation mode."""
    was_training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        yield
    finally:
        for module in was_training:
            module.training = True


@torch.no_grad()
def operator_inputs(model: nn.Module, inputs: Mapping[str, Tensor], name: str = "inputs") -> list[Signal]:
    """Runs the model on ``inputs`` in evaluation mode; returns the LN(u) that each operator was called with."""
    inputs = forward_arguments(model, inputs, name)
    captured = []
    with evaluating(model), ExitStack() as hooks:
        for operator in find_operators(model):
            hook = operator.register_forward_pre_hook(lambda _, args: captured.append(Signal(*args[:2])))
            hooks.callback(hook.remove)
        model(**inputs)
    return captured
