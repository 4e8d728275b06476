"""The parts of a low-rank sum that have a position in every term, as PyTorch operators with GPU kernels.

| operator | formula |
|---|---|
| ``itnet::feature_sum`` | S[r, c] = sum_j omega_j g_j[r] v_j[c], and as a last row sum_j omega_j v_j[c] |
| ``itnet::feature_apply`` | out_i[a] = sum_r f_i[r] T[r, a] + T[R, a] |
| ``itnet::running_sum`` | y_i = a_i y_(i-1) + x_i |
| ``itnet::factor_project`` | z_i[r] = sum_c Psi_i[r, c] u_i[c],   Psi_i[r, c] = sum_k W[r, c, k] h_i[k] + b[r, c] |
| ``itnet::factor_expand`` | out_i[a] = sum_r z_i[r] Phi_i[r, a] |
| ``itnet::within_blocks`` | out_i = sum_{j <= i} sum_r f_i[r] g_j[r] e^(-lambda_r (t_i - t_j)) M_r v_j per block |

Each is written beside it in ordinary operations, which is its definition.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..operators import KernelOperator
from ..products import float32_product


def _kernels():
    from .triton.launch import LAUNCHES  # imports triton, which may not be installed

    return LAUNCHES


class FeatureSum(NamedTuple):
    g: Tensor  # [B, n, H, R]
    values: Tensor  # v [B, n, H, C]
    measure: Tensor  # omega [B, n]
    operand_dtype: torch.dtype


def plain_feature_sum(inputs: FeatureSum) -> Tensor:
    """Returns the sum in ordinary operations: [B, H, R + 1, C]."""
    dtype = inputs.measure.dtype
    weighted = inputs.values.to(dtype) * inputs.measure[..., None, None]
    sums = torch.einsum("bnhr,bnhc->bhrc", inputs.g.to(dtype), weighted)
    return torch.cat([sums, weighted.sum(1).unsqueeze(2)], dim=2)


def _feature_sum_backward(inputs: FeatureSum, grad: Tensor, names: list[str]) -> dict[str, Tensor]:
    kernels, omega = _kernels(), inputs.measure[..., None, None]
    grads = {}
    if "g" in names:
        grads["g"] = kernels.apply_features(inputs.values, grad[:, :, :-1].mT, inputs.operand_dtype) * omega
    if "values" in names or "measure" in names:
        found = kernels.apply_features(inputs.g, grad, inputs.operand_dtype, has_constant=True)
        grads["values"], grads["measure"] = found * omega, (found * inputs.values).sum((2, 3))
    return grads


feature_sum = KernelOperator(
    __name__, "feature_sum", FeatureSum, ("g", "values", "measure"),
    forward=lambda inputs: _kernels().feature_sums(inputs.g, inputs.values, inputs.measure, inputs.operand_dtype),
    backward=_feature_sum_backward, plain=plain_feature_sum,
    shape=lambda inputs: (inputs.g.shape[0], inputs.g.shape[2], inputs.g.shape[3] + 1, inputs.values.shape[3]),
    flops=lambda shapes: 2 * shapes.g[0] * shapes.g[1] * shapes.g[2] * shapes.g[3] * shapes.values[3],
    backward_ratio=2,
)  # fmt: skip


class FeatureApply(NamedTuple):
    f: Tensor  # [B, n, H, R]
    table: Tensor  # T [B, H, R + 1, A]
    operand_dtype: torch.dtype


def plain_feature_apply(inputs: FeatureApply) -> Tensor:
    """Applies the table in ordinary operations: [B, n, H, A]."""
    table = inputs.table
    product = torch.einsum("bnhr,bhra->bnha", inputs.f.to(table.dtype), table[:, :, :-1])
    return product + table[:, None, :, -1]


def _feature_apply_backward(inputs: FeatureApply, grad: Tensor, names: list[str]) -> dict[str, Tensor]:
    kernels, grads = _kernels(), {}
    if "f" in names:
        grads["f"] = kernels.apply_features(grad, inputs.table[:, :, :-1].mT, inputs.operand_dtype)
    if "table" in names:
        ones = grad.new_ones(grad.shape[:2])
        grads["table"] = kernels.feature_sums(inputs.f, grad, ones, inputs.operand_dtype)
    return grads


feature_apply = KernelOperator(
    __name__, "feature_apply", FeatureApply, ("f", "table"),
    forward=lambda inputs: _kernels().apply_features(inputs.f, inputs.table, inputs.operand_dtype, has_constant=True),
    backward=_feature_apply_backward, plain=plain_feature_apply,
    shape=lambda inputs: (*inputs.f.shape[:3], inputs.table.shape[3]),
    flops=lambda shapes: 2 * shapes.f[0] * shapes.f[1] * shapes.f[2] * shapes.f[3] * shapes.table[3],
    backward_ratio=2,
)  # fmt: skip


class RunningSum(NamedTuple):
    new: Tensor  # x [B, n, ...]
    factors: Tensor | None  # a in the shape of x; None: 1


def plain_running_sum(inputs: RunningSum) -> Tensor:
    if inputs.factors is None:
        return inputs.new.cumsum(1)
    sums = [inputs.new[:, 0]]
    for k in range(1, inputs.new.shape[1]):
        sums.append(inputs.factors[:, k] * sums[-1] + inputs.new[:, k])
    return torch.stack(sums, dim=1)


def _running_sum_backward(inputs: RunningSum, grad: Tensor, names: list[str]) -> dict[str, Tensor]:
    kernels = _kernels()
    found = kernels.running_sums(grad, inputs.factors, is_reverse=True)
    grads = {"new": found}
    if "factors" in names:
        before = kernels.running_sums(inputs.new, inputs.factors)[:, :-1]
        grads["factors"] = torch.cat([torch.zeros_like(found[:, :1]), found[:, 1:] * before], dim=1)
    return grads


fused_running_sum = KernelOperator(
    __name__, "running_sum", RunningSum, ("new", "factors"),
    forward=lambda inputs: _kernels().running_sums(*inputs), backward=_running_sum_backward, plain=plain_running_sum,
    shape=lambda inputs: inputs.new.shape, flops=lambda shapes: 0, backward_ratio=1,
)  # fmt: skip


class FactorProject(NamedTuple):
    values: Tensor  # u [B, n, H, d_h]
    hidden: Tensor  # h [B, n, H, w]
    weight: Tensor  # [H, r, d_h, w]
    bias: Tensor  # [H, r, d_h]
    operand_dtype: torch.dtype


def plain_factor_project(inputs: FactorProject) -> Tensor:
    """Projects in ordinary operations: [B, n, H, r]."""
    values = inputs.values.to(inputs.bias.dtype)
    products = torch.einsum("bnhc,hrck->bnhrk", values, inputs.weight)
    constant = torch.einsum("bnhc,hrc->bnhr", values, inputs.bias)
    return (products @ inputs.hidden.to(values.dtype).unsqueeze(-1)).squeeze(-1) + constant


def _weight_gradient(left: Tensor, z: Tensor, hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns sum_i left_i[a] z_i[r] h_i[k]: [H, r, a, k], by one product per head."""
    products = (z.unsqueeze(-1) * hidden.unsqueeze(-2)).to(dtype).permute(2, 0, 1, 3, 4).flatten(1, 2).flatten(2)
    left = left.to(dtype).permute(2, 3, 0, 1).flatten(2)  # [H, a, B n]
    return float32_product(left, products).unflatten(2, (z.shape[-1], -1)).transpose(1, 2)


def _factor_gradients(
    inputs: "FactorProject | FactorExpand", values: Tensor, moments: Tensor, names: list[str]
) -> dict[str, Tensor]:
    """Returns the gradients of either operator.

    With F_i[r] = W[r] h_i + b[r], both are derivatives of sum_i sum_r z_i[r] F_i[r] . u_i: projecting is that in the
    ``moments`` z, expanding that in the ``values`` u, and the gradient of the output stands for what is missing.
    """
    kernels, dtype, grads = _kernels(), inputs.operand_dtype, {}
    if "values" in names:
        grads["values"] = kernels.expand(moments, inputs.hidden, inputs.weight, inputs.bias, dtype)
    if "moments" in names:
        grads["moments"] = kernels.project(values, inputs.hidden, inputs.weight, inputs.bias, dtype, is_hidden=False)
    if "hidden" in names:
        grads["hidden"] = kernels.project(values, moments, inputs.weight, inputs.bias, dtype, is_hidden=True)
    if "weight" in names:
        grads["weight"] = _weight_gradient(values, moments, inputs.hidden, dtype)
    if "bias" in names:
        common = torch.promote_types(values.dtype, moments.dtype)
        grads["bias"] = torch.einsum("bnhr,bnhc->hrc", moments.to(common), values.to(common))
    return grads


def _factor_flops(hidden: tuple[int, ...], weight: tuple[int, ...], is_projection: bool) -> int:
    """Counts 2 r d_h w for the weights, 2 r d_h for the bias and, where h is last, 2 r w, per position and head."""
    _, rank, dim, width = weight
    per_position = dim * (width + 1) + (width if is_projection else 0)
    return 2 * hidden[0] * hidden[1] * hidden[2] * rank * per_position


factor_project = KernelOperator(
    __name__, "factor_project", FactorProject, ("values", "hidden", "weight", "bias"),
    forward=lambda inputs: _kernels().project(*inputs, is_hidden=False),
    backward=lambda inputs, grad, names: _factor_gradients(inputs, inputs.values, grad, names),
    plain=plain_factor_project, shape=lambda inputs: (*inputs.values.shape[:3], inputs.weight.shape[1]),
    flops=lambda shapes: _factor_flops(shapes.hidden, shapes.weight, True), backward_ratio=3,
)  # fmt: skip


class FactorExpand(NamedTuple):
    moments: Tensor  # z [B, n, H, r]
    hidden: Tensor  # h [B, n, H, w]
    weight: Tensor  # [H, r, d_h, w]
    bias: Tensor  # [H, r, d_h]
    operand_dtype: torch.dtype


def plain_factor_expand(inputs: FactorExpand) -> Tensor:
    """Expands in ordinary operations: [B, n, H, d_h]."""
    moments = inputs.moments.to(inputs.bias.dtype)
    products = moments.unsqueeze(-1) * inputs.hidden.to(moments.dtype).unsqueeze(-2)  # [B, n, H, r, w]
    out = torch.einsum("bnhrk,hrak->bnha", products, inputs.weight)
    return out + torch.einsum("bnhr,hra->bnha", moments, inputs.bias)


factor_expand = KernelOperator(
    __name__, "factor_expand", FactorExpand, ("moments", "hidden", "weight", "bias"),
    forward=lambda inputs: _kernels().expand(*inputs),
    backward=lambda inputs, grad, names: _factor_gradients(inputs, grad, inputs.moments, names),
    plain=plain_factor_expand, shape=lambda inputs: (*inputs.hidden.shape[:3], inputs.weight.shape[2]),
    flops=lambda shapes: _factor_flops(shapes.hidden, shapes.weight, False), backward_ratio=3,
)  # fmt: skip


class WithinBlocks(NamedTuple):
    f: Tensor  # [N, C, H, r]: N blocks of C positions
    g: Tensor  # [N, C, H, r]
    values: Tensor  # v [N, C, H, d_h]
    matrices: Tensor  # M [H, r, d_out, d_h]
    rates: Tensor | None  # lambda [H, r]
    times: Tensor | None  # t [N, C], from the start of each block on
    operand_dtype: torch.dtype


def plain_within_blocks(inputs: WithinBlocks) -> Tensor:
    """Returns the sums within blocks in ordinary operations: [N, C, H, d_out]."""
    f, g, values, matrices, rates, times, _ = inputs
    weights = torch.ones(f.shape[1], f.shape[1], dtype=values.dtype, device=f.device).tril()[:, :, None, None]
    if times is not None:
        spans = (times.unsqueeze(2) - times.unsqueeze(1)).clamp(min=0)[..., None, None].to(values.dtype)
        weights = weights * torch.exp(-rates * spans)  # [N, C, C, H, r]
    products = f.unsqueeze(2).to(values.dtype) * g.unsqueeze(1).to(values.dtype) * weights
    moments = torch.einsum("nijhr,njhc->nihrc", products, values)
    return torch.einsum("nihrc,hrac->niha", moments, matrices.to(values.dtype))


def _within_flops(shapes: WithinBlocks) -> int:
    """Counts, for every rank, a product with the block's values and one with M."""
    blocks, size, heads, rank = shapes.f
    rows, columns = shapes.matrices[2:]
    return 2 * blocks * size * heads * rank * columns * (size + rows)


within_blocks = KernelOperator(
    __name__, "within_blocks", WithinBlocks, ("f", "g", "values", "matrices", "rates", "times"),
    forward=lambda inputs: _kernels().within_forward(inputs),
    backward=lambda inputs, grad, names: _kernels().within_backward(inputs, grad, names),
    plain=plain_within_blocks, shape=lambda inputs: (*inputs.f.shape[:3], inputs.matrices.shape[2]),
    flops=_within_flops, backward_ratio=3,
)  # fmt: skip
