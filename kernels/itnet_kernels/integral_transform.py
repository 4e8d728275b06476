"""The public operator, reassociated for the tiled and the triton backend alike.

Because the kernel MLP's last layer is linear, K_ij need never be formed. Per head,

    pre_ij[k] = q_i[k] + Q_i[k] . u_j + P_ij[k]           Q_i[k] = W_uy[k] + W_had[k] * u_i   (virtual queries)
    A_i[k, c] = sum_j GELU(pre_ij[k]) omega_j u_j[c]
    out_i[a]  = sum_{k,c} W2[(a, c), k] A_i[k, c] + (b2 ubar)[a],     ubar = sum_j omega_j u_j

which costs w d_h instead of w d_h^2 multiply-adds per pair. Terms that do not depend on a pair (q, b2, the causal
normalisation) are left to autograd.

The sum over pairs is one opaque PyTorch operator for both backends, ``itnet::pair_sum``. Compilers, autocast, sharding
and checkpointing see a function with a shape rule and a derivative; its tiles, its data-dependent choices and its
Triton launches stay inside. It saves its inputs only: no tensor with a pair index or a (position, k, c) index outlives
a call. README.md derives the backward.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .backends import Backend, matmul_dtype, resolve_backend
from .directions import along_directions
from .exact.pair_inputs import DIFFERENTIABLE, POSITIONS, PairInputs
from .exact.plain_pair_sum import plain_pair_sum
from .exact.reference import reference_transform
from .exact.tiled import PairTiles
from .exact.tiled_backward import TiledBackward
from .first_layer import position_row
from .measure import over_mass, uniform_measure, visible_sum
from .near.blocks import Blocks, check_blocks
from .near.windows import WindowInputs, window_sum
from .operators import plain_gradients, save_arguments, saved_arguments
from .per_head import by_head
from .positions import Coordinates
from .sampled.list_step import is_list_step, list_step
from .sampled.list_sum import block_sum, one_list
from .sampled.sampled import SampledPairs
from .transforms import is_transformed, needs_graph, operator_namespace, recomputed
from .validation import batched, check_causal, check_measure, check_operands
from .weights import KernelWeights, split_input_weights

_NAMESPACE = operator_namespace(__name__)
_SCHEMA_TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?", list[Tensor]: "Tensor[]"}
_SCHEMA_TYPES |= {bool: "bool", torch.dtype: "ScalarType", str: "str"}
_ARGUMENTS = ", ".join(f"{_SCHEMA_TYPES[kind]} {name}" for name, kind in PairInputs.__annotations__.items())


def integral_transform(
    u: Tensor,
    positions: Tensor | Coordinates,
    weights: KernelWeights,
    *,
    measure: Tensor | None = None,
    is_causal: bool = False,
    queries: Tensor | None = None,
    query_positions: Tensor | Coordinates | None = None,
    blocks: Blocks | Sequence[Blocks] | None = None,
    window: int | None = None,
    backend: Backend = "auto",
) -> Tensor:
    r"""Applies the multi-head integral operator with a learned, matrix-valued kernel (the integral of Eq. multihead).

        out_i^(h) = sum_j omega_j K_ij^(h) u_j^(h),     K_ij^(h) = reshape(W2^(h) GELU(W1 z_ij + b1) + b2^(h))

    with z_ij of Eq. kernel_input (see :class:`KernelWeights`). W^O and W_theta are not part of it. Differentiable in
    ``u``, ``queries``, the positions, ``measure`` and all weights but ``weights.fourier``: in reverse and in forward
    mode, to any order, and under the transforms of torch.func. Whatever is not a first derivative in reverse mode is
    slower and may need the memory of all pairs (exact/plain_pair_sum.py).

    Args:
        u: key features ``[B, n, H, d_h]``; also the query features unless ``queries`` is given. float32, float64,
            float16 or bfloat16; half precision is accumulated in float32. Must be finite where ``measure`` is 0.
        positions: coordinates of ``u``, ``[n, s]`` (shared by the batch) or ``[B, n, s]``, in float32. Calls
            that share their positions, as the layers of a model do, save work with :class:`Coordinates` of them.
        weights: the kernel MLP.
        measure: quadrature weights omega ``[B, n]``, not negative; None is uniform, 1/n. A key of measure 0 (padding)
            contributes nothing.
        is_causal: query i sees keys j <= i + n_k - n_q only, and omega is normalised over them.
        queries: features ``[B, n_q, H, d_h]`` of a query domain other than the key domain.
        query_positions: ``[n_q, s]``, ``[B, n_q, s]`` or :class:`Coordinates`; goes with ``queries``.
        blocks: takes the sum over the pairs that one or several :class:`Blocks` list, and over no others; omega is
            not normalised over them.
        window: says that the pairs of ``blocks`` are those of every query with the last ``window`` keys, itself the
            last of them. Where positions are evenly spaced, they are summed faster (near/windows.py).
        backend: "reference" forms every K_ij; "tiled" is the reassociated form in PyTorch; "triton" the fused GPU
            kernel; "auto" takes triton for tensors on a GPU where it is installed and tiled otherwise.

    Returns:
        ``[B, n_q, H, d_h]`` in the dtype of the queries.
    """
    settings = {"measure": measure, "is_causal": is_causal, "blocks": blocks, "window": window, "backend": backend}
    if weights.has_own_hidden:
        parts = by_head(integral_transform, u, positions, weights, queries, query_positions, **settings)
        return torch.cat(parts, dim=2)
    if weights.w2_directions is not None and backend != "reference":
        return along_directions(integral_transform, u, positions, weights, queries, query_positions, **settings)
    queries, x, y = check_operands(u, positions, weights, queries, query_positions)
    batch, num_keys, num_heads, head_dim = u.shape
    num_queries, dtype = queries.shape[1], torch.promote_types(queries.dtype, torch.float32)
    if is_causal:
        check_causal(num_queries, num_keys)
    if measure is not None:
        check_measure(measure, batch, num_keys)
    if blocks is not None:
        blocks = check_blocks(blocks, batch)
        if is_causal:
            raise ValueError("`blocks` does not go with `is_causal`, which the blocks say")
    elif window is not None:
        raise ValueError(f"`window` ({window}) goes with `blocks`, whose pairs it describes, and none were given")
    backend, operand_dtype = resolve_backend(backend, u, weights), matmul_dtype(queries)
    if backend == "reference":
        listed = None if blocks is None else sum(part.dense(num_queries, num_keys).int() for part in blocks)
        return reference_transform(queries, u, batched(x), batched(y), weights, measure, is_causal, listed)
    omega = uniform_measure(u) if measure is None else measure.to(dtype)
    if backend == "triton" and is_list_step(queries, u, weights, measure, x.positions, y.positions):
        listed = None if blocks is None else one_list(blocks, omega)
        if blocks is None or listed is not None:
            out = list_step(queries, u, x, y, weights, *((omega,) if listed is None else listed))
            mass = omega.sum(1)[:, None, None, None] if is_causal else None
            return (out if mass is None else over_mass(out, mass)).to(queries.dtype)
    if backend == "triton" and blocks is not None:
        with torch.autocast(u.device.type, enabled=False):
            inputs = SampledPairs(queries, u, x, y, weights, backend).list_inputs()
            return block_sum(inputs._replace(operand_dtype=operand_dtype), omega, blocks).to(queries.dtype)
    with torch.autocast(u.device.type, enabled=False):
        if window is not None and queries is u and weights.w_mid is None:
            steps = x.steps(dtype, window)
            if steps is not None:
                return _window_transform(u, x, steps, weights.to(dtype), measure)
        weights = weights.to(dtype) if blocks is None else weights.to(dtype).with_constant_unit()
        columns = split_input_weights(weights, head_dim)
        gamma_x, gamma_y = x.features_in(dtype), y.features_in(dtype)
        row = position_row(weights.b1, columns["x"], gamma_x)
        if backend == "tiled":
            if columns["u_x"] is not None:
                row = row + queries.to(dtype) @ columns["u_x"].T
            row = row.expand(batch, num_queries, num_heads, -1)
        # The triton backend needs no lattice: finding one waits for the device.
        has_displacements = columns["x-y"] is not None or columns["distance"] is not None
        wants_lattice = backend == "tiled" and has_displacements and not is_transformed()
        displacements, index = y.lattice(dtype, x) if wants_lattice else (None, None)
        block_queries, block_keys, block_pairs = ([part[k] for part in blocks or ()] for k in range(3))
        inputs = PairInputs(
            # The triton backend keeps features as they are given, and nothing that grows with n beside them.
            queries=queries if backend == "triton" else queries.to(dtype),
            keys=u if backend == "triton" else u.to(dtype),
            row=row,
            measure=None if measure is None else measure.to(dtype),
            query_positions=x.exact,
            key_positions=y.exact,
            query_features=gamma_x,
            key_features=gamma_y,
            w_y=columns["y"],
            w_relative=columns["x-y"],
            w_distance=columns["distance"],
            w_query=columns["u_x"] if backend == "triton" else None,
            w_key=columns["u_y"],
            w_product=columns["u_x*u_y"],
            w_mid=weights.w_mid,
            b_mid=weights.b_mid,
            w2=weights.output_weight(head_dim).expand(num_heads, -1, -1),
            frequencies=weights.fourier.detach(),
            displacements=displacements,
            displacement_index=index,
            block_queries=block_queries,
            block_keys=block_keys,
            block_pairs=block_pairs,
            is_causal=is_causal,
            operand_dtype=operand_dtype,
            backend=backend,
        )
        out = plain_pair_sum(inputs) if is_transformed() else pair_sum(*inputs)
        if blocks is not None:
            return out.to(queries.dtype)
        b2 = weights.output_bias(head_dim).expand(num_heads, -1, -1)  # [H, c, a]

        def constant(keys: Tensor, omega: Tensor, b2: Tensor) -> Tensor:
            values = keys * omega[..., None, None]
            mean = visible_sum(values, num_queries) if is_causal else values.sum(1, keepdim=True)  # ubar
            return torch.einsum("hca,bihc->biha", b2, mean)

        # On a GPU, neither copies of the keys in float32 nor the means of a causal sum wait for the backward.
        evaluate = recomputed if backend == "triton" else lambda function, *given: function(*given)
        out = out + evaluate(constant, inputs.keys, omega, b2)
        if is_causal:
            out = over_mass(out, visible_sum(omega, num_queries)[..., None, None])
        return out.to(queries.dtype)


def _window_transform(
    u: Tensor, x: Coordinates, steps: Tensor, weights: KernelWeights, measure: Tensor | None
) -> Tensor:
    """Sums over the last s keys of every query, with gamma(v) and |v| of their displacements, [s, F + 1]."""
    (batch, count, num_heads, head_dim), dtype = u.shape, steps.dtype
    columns, gamma, heads = split_input_weights(weights, head_dim), x.features_in(dtype), u.to(dtype)
    table = steps.new_zeros(len(steps), len(weights.b1))
    for name, part in (("x-y", steps[:, :-1]), ("distance", steps[:, -1:])):
        table = table if columns[name] is None else table + part @ columns[name].T
    terms = []
    for place, content, bias in (("x", "u_x", weights.b1), ("y", "u_y", torch.zeros_like(weights.b1))):
        term = position_row(bias, columns[place], gamma)
        term = term if columns[content] is None else term + heads @ columns[content].T
        terms.append(term.expand(batch, count, num_heads, -1))
    omega = uniform_measure(heads) if measure is None else measure.to(dtype)
    w2, b2 = (
        part.expand(num_heads, -1, -1) for part in (weights.output_weight(head_dim), weights.output_bias(head_dim))
    )
    values = heads * omega[..., None, None]
    return window_sum(WindowInputs(heads, *terms, values, table, columns["u_x*u_y"], w2, b2)).to(u.dtype)


def _given_gradients(given: PairInputs, grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns gradients of the given arguments from those of its ``with_rows()``, in the dtypes of the arguments."""
    grads, grad_row = dict(grads), grads["row"]
    if given.w_query is not None:
        rows = grad_row.flatten(0, 2)
        grads["w_query"] = rows.T @ given.queries.reshape(len(rows), -1).to(rows.dtype)
        grads["queries"] = grads["queries"] + grad_row @ given.w_query
    grads["row"] = grad_row.sum_to_size(given.row.shape)
    return {name: grad.to(getattr(given, name).dtype) for name, grad in grads.items()}


def _triton_pairs(inputs: PairInputs, gradients: list[str] | None = None) -> Any:
    """Returns what does the same as :class:`PairTiles` in Triton: for the forward, or a backward to ``gradients``."""
    from .exact.triton.device import has_fused_backward  # imports triton, which may not be installed
    from .exact.triton.pairs import TritonPairs, stores_bias_gradient

    if gradients is not None:
        settings = inputs.keys.shape[-1], inputs.operand_dtype, inputs.keys.device
        if not has_fused_backward(*settings, stores_bias_gradient(inputs, gradients)):
            from .exact.triton.chunked_backward import ChunkedBackward

            return ChunkedBackward(inputs.with_rows())
    return TritonPairs(inputs.with_rows())


def _with_gradient(inputs: PairInputs, needs_measure: bool, needs_positions: bool) -> list[str]:
    """Returns the names of the arguments that the backward returns a gradient for, in their order."""

    def wanted(name: str) -> bool:
        if name == "measure":
            return needs_measure
        if name in POSITIONS:
            return needs_positions and inputs.has_position_bias
        return getattr(inputs, name) is not None

    return [name for name in DIFFERENTIABLE if wanted(name)]


@torch.library.custom_op(f"{_NAMESPACE}::pair_sum", mutates_args=(), schema=f"({_ARGUMENTS}) -> Tensor")
def pair_sum(*arguments):
    """Returns the sum over pairs, [B, n_q, H, d_h] in the dtype of ``row``, of the fields of :class:`PairInputs`."""
    inputs = PairInputs(*arguments)
    pairs = _triton_pairs(inputs) if inputs.backend == "triton" else PairTiles(inputs)
    return pairs.forward().contiguous()


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
    """Returns the gradients of the arguments that :func:`_with_gradient` names, in that order."""
    given = PairInputs(*arguments)
    names = _with_gradient(given, needs_measure, needs_positions)
    pairs = _triton_pairs(given, names) if given.backend == "triton" else TiledBackward(given)
    grads = _given_gradients(given, pairs.backward(grad_out, [name for name in names if name != "w_query"]))
    return [grads[name].contiguous() for name in names]


@pair_sum_backward.register_fake
def _(grad_out, needs_measure, needs_positions, *arguments):
    inputs = PairInputs(*arguments)
    names = _with_gradient(inputs, needs_measure, needs_positions)
    return [torch.empty_like(getattr(inputs, name), memory_format=torch.contiguous_format) for name in names]


def _backward(ctx, grad_out):
    inputs, needs = PairInputs(*saved_arguments(ctx)), PairInputs(*ctx.needs_input_grad)
    if needs_graph(grad_out):
        names = [name for name in DIFFERENTIABLE if getattr(needs, name)]
        grads = plain_gradients(plain_pair_sum, inputs, names, grad_out)
    else:
        flags = needs.measure, any(getattr(needs, name) for name in POSITIONS)
        names = _with_gradient(inputs, *flags)
        grads = dict(zip(names, pair_sum_backward(grad_out, *flags, *inputs), strict=True))
    lists = {name: [None] * len(value) for name, value in inputs._asdict().items() if isinstance(value, (list, tuple))}
    return tuple(lists.get(name, grads.get(name)) for name in PairInputs._fields)


pair_sum.register_autograd(_backward, setup_context=save_arguments)
