# SPDX-License-Identifier: Apache-2.0
"""Captures what the operators of a model are called with, for whoever looks at kernels from outside."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from ..domain import Signal
from ..operator import find_operators


def forward_arguments(model: nn.Module, inputs: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Returns ``inputs`` without labels, or raises an error that calls them ``name`` if they are no keywords."""
    if not isinstance(inputs, Mapping):
        example = f"{{{getattr(model, 'main_input_name', 'inputs')!r}: ...}}"
        given = f"`{name}` ({type(inputs).__name__})"
        raise ValueError(f"{given} must hold keyword arguments of the model's forward, such as {example}")
    return {key: value for key, value in inputs.items() if key != "labels" and value is not None}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Keeps the model in evaluation mode within the context."""
    was_training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        yield
    finally:
        for module in was_training:
            module.training = True


def operator_inputs(model: nn.Module, inputs: Mapping[str, Tensor], name: str = "inputs") -> list[Signal]:
    """Runs the model on ``inputs`` in evaluation mode; returns the LN(u) that each operator was called with."""
    calls = module_inputs(model, find_operators(model), forward_arguments(model, inputs, name))
    return [Signal(*arguments[:2]) for arguments in calls]


@torch.no_grad()
def module_inputs(model: nn.Module, modules: list[nn.Module], inputs: Mapping[str, Tensor]) -> list[tuple]:
    """Runs the model on ``inputs`` in evaluation mode; returns what some of its modules were called with."""
    captured = []
    with evaluating(model), ExitStack() as hooks:
        for module in modules:
            hooks.enter_context(module.register_forward_pre_hook(lambda _, arguments: captured.append(arguments)))
        model(**inputs)
    return captured


def module_output(model: nn.Module, module: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """Runs the model on ``inputs`` in evaluation mode; returns what one of its modules gave, with its graph."""
    captured = []
    with evaluating(model), module.register_forward_hook(lambda _, arguments, output: captured.append(output)):
        model(**inputs)
    return captured[-1]
