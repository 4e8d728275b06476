"""The double sum over pairs as one opaque PyTorch operator, ``itnet::pair_sum``, for every backend.

    out_i[a] = sum_{k,c} W2[(k, c), a] sum_j GELU(q_i[k] + (W_uy[k] + W_had[k] * u_i) . u_j + P_ij[k]) omega_j u_j[c]

Compilers, autocast, sharding and checkpointing see a function with a shape rule and a derivative; its tiles, its
data-dependent choices and its Triton launches stay inside. It saves its inputs only: no tensor with a pair index or
a (position, k, c) index outlives a call.
"""

import zlib

import torch
from torch import Tensor

from ..transforms import is_batched, is_transformed
from .pair_inputs import PairInputs
from .plain_pair_sum import plain_pair_sum
from .reference import uniform_measure
from .tiled import PairTiles

# A copy of this package under another name (a Hub kernel, a checkpoint's own code) registers operators of its own.
_NAMESPACE = "itnet" if __name__ == "itnet_kernels.exact.pair_sum" else f"itnet_{zlib.crc32(__name__.encode()):08x}"
_POSITIONS = ("query_positions", "key_positions", "query_features", "key_features")
_TENSORS = PairInputs._fields[:17]
_OPTIONAL = {"measure", "w_y", "w_relative", "w_distance", "w_key", "w_product", "w_mid", "b_mid"}
_ARGUMENTS = ", ".join(
    [f"Tensor{'?' if name in _OPTIONAL else ''} {name}" for name in _TENSORS]
    + ["bool is_causal", "ScalarType operand_dtype", "str backend"]
)


def _differentiable(inputs: PairInputs, needs_measure: bool, needs_positions: bool) -> list[str]:
    """Names of the arguments that the backward returns a gradient for, in their order."""

    def wanted(name: str) -> bool:
        if name == "measure":
            return needs_measure
        if name in _POSITIONS:
            return needs_positions and inputs.has_position_bias
        return getattr(inputs, name) is not None

    return [name for name in _TENSORS if name != "frequencies" and wanted(name)]


@torch.library.custom_op(f"{_NAMESPACE}::pair_sum", mutates_args=(), schema=f"({_ARGUMENTS}) -> Tensor")
def pair_sum(*arguments):
    """The sum over pairs, [B, n_q, H, d_h] in the dtype of ``row``.

    Takes the fields of :class:`PairInputs`, then ``operand_dtype`` (of the matrix products in the triton backend;
    they accumulate in float32) and ``backend``, "tiled" or "triton".
    """
    *inputs, operand_dtype, backend = arguments
    return _evaluator(PairInputs(*inputs), operand_dtype, backend).forward().contiguous()


@pair_sum.register_fake
def _(*arguments):
    inputs = PairInputs(*arguments[:-2])
    return inputs.row.new_empty(inputs.queries.shape)


@torch.library.custom_op(
    f"{_NAMESPACE}::pair_sum_backward",
    mutates_args=(),
    schema=f"(Tensor grad_out, bool needs_measure, bool needs_positions, {_ARGUMENTS}) -> Tensor[]",
)
def pair_sum_backward(grad_out, needs_measure, needs_positions, *arguments):
    """Gradients of the arguments that :func:`_differentiable` names, in that order."""
    *inputs, operand_dtype, backend = arguments
    inputs = PairInputs(*inputs)
    grads = _evaluator(inputs, operand_dtype, backend, needs_measure).backward(grad_out, needs_positions)
    by_name = dict(zip(_TENSORS, grads, strict=False))
    return [by_name[name].contiguous() for name in _differentiable(inputs, needs_measure, needs_positions)]


@pair_sum_backward.register_fake
def _(grad_out, needs_measure, needs_positions, *arguments):
    inputs = PairInputs(*arguments[:-2])
    names = _differentiable(inputs, needs_measure, needs_positions)
    return [torch.empty_like(getattr(inputs, name), memory_format=torch.contiguous_format) for name in names]


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:17])
    ctx.rest = inputs[17:]


def _backward(ctx, grad_out):
    arguments = (*ctx.saved_tensors, *ctx.rest)
    needs = dict(zip(_TENSORS, ctx.needs_input_grad, strict=False))
    # The gradient itself will be differentiated, or is one of many.
    if torch.is_grad_enabled() or is_transformed() or is_batched(grad_out):
        by_name = _plain_gradients(PairInputs(*arguments[:-2]), [name for name in _TENSORS if needs[name]], grad_out)
        return *(by_name.get(name) for name in _TENSORS), None, None, None
    needs_measure, needs_positions = needs["measure"], any(needs[name] for name in _POSITIONS)
    grads = pair_sum_backward(grad_out, needs_measure, needs_positions, *arguments)
    names = _differentiable(PairInputs(*arguments[:-2]), needs_measure, needs_positions)
    by_name = dict(zip(names, grads, strict=True))
    return *(by_name.get(name) for name in _TENSORS), None, None, None


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


def _evaluator(inputs: PairInputs, operand_dtype: torch.dtype, backend: str, needs_measure: bool = False):
    """What evaluates the sum: an object with ``forward()`` and ``backward(grad_out, needs_positions)``."""
    if backend == "triton":
        from .triton_pairs import TritonPairs  # imports triton, which may not be installed

        return TritonPairs(inputs, operand_dtype, needs_measure)
    if inputs.measure is None:
        inputs = inputs._replace(measure=uniform_measure(inputs.keys))
    return PairTiles(*inputs)
