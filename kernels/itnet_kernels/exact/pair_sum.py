"""The double sum over pairs as one opaque PyTorch operator, ``itnet::pair_sum``, for every backend.

    out_i[a] = sum_{k,c} W2[(k, c), a] sum_j GELU(q_i[k] + (W_uy[k] + W_had[k] * u_i) . u_j + P_ij[k]) omega_j u_j[c]

Compilers, autocast, sharding and checkpointing see a function with a shape rule and a derivative; its tiles, its
data-dependent choices and its Triton launches stay inside. It saves its inputs only: no tensor with a pair index or
a (position, k, c) index outlives a call.
"""

import torch
from torch import Tensor

from ..transforms import is_batched, is_transformed, operator_namespace
from .pair_inputs import DIFFERENTIABLE, POSITIONS, PairInputs
from .plain_pair_sum import plain_pair_sum
from .tiled import PairTiles

_NAMESPACE = operator_namespace(__name__)
_SCHEMA_TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?", list[Tensor]: "Tensor[]"}
_SCHEMA_TYPES |= {bool: "bool", torch.dtype: "ScalarType", str: "str"}
_ARGUMENTS = ", ".join(f"{_SCHEMA_TYPES[kind]} {name}" for name, kind in PairInputs.__annotations__.items())


def _evaluator(inputs: PairInputs, is_backward: bool = False) -> PairTiles:
    """What evaluates the sum: an object with ``forward()`` and ``backward(...)``."""
    if inputs.backend != "triton":
        return PairTiles(inputs)
    from .triton.device import has_fused_backward  # imports triton, which may not be installed
    from .triton.pairs import TritonPairs

    if is_backward and not has_fused_backward(inputs.keys.shape[-1], inputs.operand_dtype, inputs.keys.device):
        from .triton.chunked_backward import ChunkedBackward

        return ChunkedBackward(inputs)
    return TritonPairs(inputs)


def _with_gradient(inputs: PairInputs, needs_measure: bool, needs_positions: bool) -> list[str]:
    """Names of the arguments that the backward returns a gradient for, in their order."""

    def wanted(name: str) -> bool:
        if name == "measure":
            return needs_measure
        if name in POSITIONS:
            return needs_positions and inputs.has_position_bias
        return getattr(inputs, name) is not None

    return [name for name in DIFFERENTIABLE if wanted(name)]


@torch.library.custom_op(f"{_NAMESPACE}::pair_sum", mutates_args=(), schema=f"({_ARGUMENTS}) -> Tensor")
def pair_sum(*arguments):
    """The sum over pairs, [B, n_q, H, d_h] in the dtype of ``row``. Takes the fields of :class:`PairInputs`."""
    inputs = PairInputs(*arguments)
    return _evaluator(inputs).forward().contiguous()


@pair_sum.register_fake
def _(*arguments):
    inputs = PairInputs(*arguments)
    return inputs.row.new_empty(inputs.queries.shape)


@torch.library.custom_op(
    f"{_NAMESPACE}::pair_sum_backward",
    mutates_args=(),
    schema=f"(Tensor grad_out, bool needs_measure, bool needs_positions, {_ARGUMENTS}) -> Tensor[]",
)
def pair_sum_backward(grad_out, needs_measure, needs_positions, *arguments):
    """Gradients of the arguments that :func:`_with_gradient` names, in that order."""
    inputs = PairInputs(*arguments)
    names = _with_gradient(inputs, needs_measure, needs_positions)
    grads = _evaluator(inputs, is_backward=True).backward(grad_out, names)
    return [grads[name].contiguous() for name in names]


@pair_sum_backward.register_fake
def _(grad_out, needs_measure, needs_positions, *arguments):
    inputs = PairInputs(*arguments)
    names = _with_gradient(inputs, needs_measure, needs_positions)
    return [torch.empty_like(getattr(inputs, name), memory_format=torch.contiguous_format) for name in names]


def _setup_context(ctx, inputs, output):
    inputs = PairInputs(*inputs)
    tensors = {name: value for name, value in inputs._asdict().items() if isinstance(value, Tensor)}
    ctx.save_for_backward(*tensors.values())
    ctx.names, ctx.rest = list(tensors), inputs._replace(**dict.fromkeys(tensors))


def _backward(ctx, grad_out):
    inputs = ctx.rest._replace(**dict(zip(ctx.names, ctx.saved_tensors, strict=True)))
    needs = PairInputs(*ctx.needs_input_grad)
    # The gradient itself will be differentiated, or is one of many.
    if torch.is_grad_enabled() or is_transformed() or is_batched(grad_out):
        grads = _plain_gradients(inputs, [name for name in DIFFERENTIABLE if getattr(needs, name)], grad_out)
    else:
        flags = needs.measure, any(getattr(needs, name) for name in POSITIONS)
        names = _with_gradient(inputs, *flags)
        grads = dict(zip(names, pair_sum_backward(grad_out, *flags, *inputs), strict=True))
    lists = {name: [None] * len(value) for name, value in inputs._asdict().items() if isinstance(value, (list, tuple))}
    return tuple(lists.get(name, grads.get(name)) for name in PairInputs._fields)


def _plain_gradients(inputs: PairInputs, names: list[str], grad_out: Tensor) -> dict[str, Tensor | None]:
    """Gradients of the named arguments as functions that can be differentiated again."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views: partial derivatives are wanted, and the arguments depend on each other (row on queries).
        views = {name: getattr(inputs, name).view_as(getattr(inputs, name)) for name in names}
        out = plain_pair_sum(inputs._replace(**views))
        grads = torch.autograd.grad(out, list(views.values()), grad_out, create_graph=create_graph, allow_unused=True)
    return dict(zip(names, grads, strict=True))


pair_sum.register_autograd(_backward, setup_context=_setup_context)
