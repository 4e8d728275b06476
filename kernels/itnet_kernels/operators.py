"""PyTorch operators of GPU kernels: a shape rule, a first derivative by hand, all others by ordinary operations."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .transforms import is_transformed, needs_graph, operator_namespace

_TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?", bool: "bool", int: "int", torch.dtype: "ScalarType"}


def without_derivative(operator: Any, instead: str) -> None:
    """Makes a backward through ``operator`` an error that says what to call ``instead``."""

    def refuse(ctx, *grads):
        raise NotImplementedError(f"{operator._qualname} has no derivative: {instead}")

    operator.register_autograd(refuse)


class KernelOperator:
    """An operator ``itnet::name`` of the fields of a named tuple, and ``itnet::name_backward`` with its derivative.

    Compilers, autocast and checkpointing see one opaque function, which saves its arguments and nothing else. A first
    derivative in reverse mode is ``backward``. All others (torch.func, forward mode, derivatives of derivatives,
    vmap) go through ``plain``, the same function in ordinary PyTorch operations.

    Args:
        module: the name of the module that defines it.
        name: that of the operator.
        kind: the named tuple of its arguments, all of them tensors, None, numbers or dtypes.
        differentiable: the arguments that it has a derivative in.
        forward: arguments -> the result, contiguous.
        backward: arguments, the result's gradient, names of arguments -> gradients of these, by name.
        plain: arguments -> the result.
        shape: arguments -> the result's shape; it has the dtype of ``like`` (an argument's name), or float32.
        flops: arguments by their shapes -> FLOPs of the matrix products of the forward.
        backward_ratio: FLOPs of the backward, in those of the forward.
    """

    def __init__(
        self, module: str, name: str, kind: type, differentiable: tuple[str, ...], *,
        forward: Callable[[Any], Tensor], backward: Callable[[Any, Tensor, list[str]], dict[str, Tensor]],
        plain: Callable[[Any], Tensor], shape: Callable[[Any], tuple[int, ...]], flops: Callable[[Any], int],
        backward_ratio: int,
    ):  # fmt: skip
        self.kind, self.differentiable, self.plain = kind, differentiable, plain
        arguments = ", ".join(f"{_TYPES[type_]} {name}" for name, type_ in kind.__annotations__.items())
        full_name = f"{operator_namespace(module)}::{name}"
        define = torch.library.custom_op

        @define(full_name, mutates_args=(), schema=f"({arguments}) -> Tensor")
        def function(*given):
            return forward(kind(*given))

        @function.register_fake
        def _(*given):
            inputs = kind(*given)
            return inputs[0].new_empty(shape(inputs), dtype=torch.float32)

        schema = f"(Tensor grad_out, bool[] wanted, {arguments}) -> Tensor[]"

        @define(f"{full_name}_backward", mutates_args=(), schema=schema)
        def derivative(grad_out, wanted, *given):
            inputs, names = kind(*given), self._names(wanted)
            grads = backward(inputs, grad_out, names)
            return [grads[name].to(getattr(inputs, name).dtype).contiguous() for name in names]

        @derivative.register_fake
        def _(grad_out, wanted, *given):
            inputs = kind(*given)
            like = (getattr(inputs, name) for name in self._names(wanted))
            return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in like]

        self.function, self.derivative = function, derivative
        function.register_autograd(self._backward, setup_context=save_arguments)
        self.flops = {function: flops, derivative: lambda inputs: backward_ratio * flops(inputs)}
        self.flops_are_registered = False
        if "torch.utils.flop_counter" in sys.modules:
            self.register_flops()

    def register_flops(self) -> None:
        """Tells PyTorch's FlopCounterMode the FLOPs of both operators, once.

        That module imports Triton, so that this waits for somebody else to import it, or for the first call: counters
        that are made later know them.
        """
        if self.flops_are_registered:
            return
        from torch.utils.flop_counter import register_flop_formula

        self.flops_are_registered = True
        for operator, count in self.flops.items():
            packet = operator._opoverload.overloadpacket
            number = len(operator._opoverload._schema.arguments) - len(self.kind._fields)  # before its fields

            def formula(*shapes, count=count, number=number, **_):
                return count(self.kind(*shapes[number:]))

            register_flop_formula([packet])(formula)

    def __call__(self, inputs: Any) -> Tensor:
        """Returns the result in float32, by ordinary operations where a transform is at work."""
        if is_transformed():
            return self.plain(inputs)
        if not torch.compiler.is_compiling():
            self.register_flops()
        return self.function(*inputs)

    def _names(self, wanted: list[bool]) -> list[str]:
        return [name for name, flag in zip(self.differentiable, wanted, strict=True) if flag]

    def _backward(self, ctx, grad_out):
        inputs, needs = self.kind(*saved_arguments(ctx)), self.kind(*ctx.needs_input_grad)
        wanted = [getattr(needs, name) for name in self.differentiable]
        names = self._names(wanted)
        if needs_graph(grad_out):
            grads = plain_gradients(self.plain, inputs, names, grad_out)
        else:
            grads = dict(zip(names, self.derivative(grad_out, wanted, *inputs), strict=True))
        return tuple(grads.get(name) for name in self.kind._fields)


def save_arguments(ctx, inputs: tuple, output: Tensor) -> None:
    """Keeps the arguments of an operator, and nothing else, for its backward."""
    numbers = [number for number, value in enumerate(inputs) if isinstance(value, Tensor)]
    ctx.save_for_backward(*(inputs[number] for number in numbers))
    ctx.numbers = numbers
    ctx.rest = [None if isinstance(value, Tensor) else value for value in inputs]


def saved_arguments(ctx) -> list:
    """Returns what :func:`save_arguments` has kept."""
    values = list(ctx.rest)
    for number, tensor in zip(ctx.numbers, ctx.saved_tensors, strict=True):
        values[number] = tensor
    return values


def plain_gradients(
    plain: Callable[[Any], Tensor], inputs: Any, names: list[str], grad_out: Tensor
) -> dict[str, Tensor | None]:
    """Returns the gradients of the named arguments of ``plain`` as functions that can be differentiated again."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views: partial derivatives are wanted, and the arguments may depend on each other.
        views = {name: getattr(inputs, name).view_as(getattr(inputs, name)) for name in names}
        out = plain(inputs._replace(**views))
        grads = torch.autograd.grad(out, list(views.values()), grad_out, create_graph=create_graph, allow_unused=True)
    return dict(zip(names, grads, strict=True))
