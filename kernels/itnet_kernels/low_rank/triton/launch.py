"""Launches of the low-rank kernels: tensors in the layout [B, n, H, .] in, float32 out."""

import math
from types import SimpleNamespace

import torch
from torch import Tensor

from ...exact.triton.device import TRITON_TYPES, dot_precision, on_device
from ...sampled.triton.configs import power_of_two
from .factors import expand_kernel, project_kernel
from .features import feature_apply_kernel, feature_sum_kernel
from .scan import scan_kernel
from .within import within_bwd_kernel, within_fwd_kernel

_POSITIONS = 64  # of a tile
_SPAN = 512  # positions that one program sums over, at least
_MOST_SPLITS = 64


def _products(tensor: Tensor, dtype: torch.dtype) -> dict:
    """Returns what kernels with matrix products take."""
    return {"DTYPE": TRITON_TYPES[dtype], "PRECISION": dot_precision(tensor.device), "enable_fp_fusion": True}


def feature_sums(g: Tensor, v: Tensor, measure: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns sum_j omega_j g_j[r] v_j[c], and as a last row sum_j omega_j v_j[c]: [B, H, R + 1, C]."""
    (batch, count, heads, rank), size = g.shape, v.shape[3]
    largest = measure.float().abs().amax(1)
    scale = largest.where(largest > 0, 1)  # [B]: values keep their range in float16
    span = max(_SPAN, _POSITIONS * math.ceil(count / (_MOST_SPLITS * _POSITIONS)))
    splits = math.ceil(count / span)
    sums = g.new_empty(splits, batch, heads, rank + 1, size, dtype=torch.float32)
    with on_device(g.device):
        feature_sum_kernel[(batch * heads, splits)](
            g.contiguous(), v.contiguous(), (measure.float() / scale[:, None]).contiguous(), scale, sums, count,
            heads, span, R=rank, R_PADDED=power_of_two(rank + 1), C=size, C_PADDED=power_of_two(size),
            BN=min(_POSITIONS, power_of_two(count)), num_warps=4, **_products(g, dtype),
        )  # fmt: skip
    return sums[0] if splits == 1 else sums.sum(0)


def apply_features(f: Tensor, table: Tensor, dtype: torch.dtype, has_constant: bool = False) -> Tensor:
    """Returns sum_r f_i[r] T[r, a], plus the last row of T if that is one more than f has: [B, n, H, A]."""
    (batch, count, heads, rank), size = f.shape, table.shape[3]
    out = f.new_empty(batch, count, heads, size, dtype=torch.float32)
    block = min(_POSITIONS, power_of_two(count))
    with on_device(f.device):
        feature_apply_kernel[(batch * heads, math.ceil(count / block))](
            f.contiguous(), table.float().contiguous(), out, count, heads, R=rank, R_PADDED=power_of_two(rank),
            A=size, A_PADDED=power_of_two(size), ONE=int(has_constant), BN=block, num_warps=4,
            **_products(f, dtype),
        )  # fmt: skip
    return out


def running_sums(x: Tensor, factors: Tensor | None, is_reverse: bool = False) -> Tensor:
    """Computes y_i = a_i y_(i-1) + x_i, or from the other end y_i = a_(i+1) y_(i+1) + x_i: [B, n, ...]."""
    batch, count = x.shape[:2]
    columns = x[0, 0].numel()
    y = torch.empty_like(x, dtype=torch.float32, memory_format=torch.contiguous_format)
    block = min(32, power_of_two(columns))
    with on_device(x.device):
        scan_kernel[(batch, math.ceil(columns / block))](
            x.contiguous(), x if factors is None else factors.contiguous(), y, count, columns,
            BN=min(_POSITIONS, power_of_two(count)), BC=block, HAS_FACTORS=factors is not None, REVERSE=is_reverse,
            num_warps=4,
        )  # fmt: skip
    return y


def _factor_sizes(weight: Tensor) -> dict:
    _, rank, size, width = weight.shape
    return {"R": rank, "D": size, "D_PADDED": power_of_two(size), "K": width, "K_PADDED": power_of_two(width)}


def project(u: Tensor, other: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype, is_hidden: bool) -> Tensor:
    """Returns z [B, n, H, R] from u and h, or the hidden units' sum [B, n, H, K] from u and z."""
    batch, count, heads, _ = u.shape
    sizes = _factor_sizes(weight)
    out = u.new_empty(batch, count, heads, sizes["K" if is_hidden else "R"], dtype=torch.float32)
    block = min(_POSITIONS, power_of_two(batch * count))
    with on_device(u.device):
        project_kernel[(math.ceil(batch * count / block), heads)](
            u.contiguous(), other.contiguous(), weight.contiguous(), bias.contiguous(), out, batch * count, heads,
            **sizes, BN=block, IS_HIDDEN=is_hidden, num_warps=4, **_products(u, dtype),
        )  # fmt: skip
    return out


def expand(z: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns sum_r z_i[r] Phi_i[r]: [B, n, H, D]."""
    batch, count, heads, _ = hidden.shape
    sizes = _factor_sizes(weight)
    out = hidden.new_empty(batch, count, heads, sizes["D"], dtype=torch.float32)
    block = min(_POSITIONS, power_of_two(batch * count))
    with on_device(z.device):
        expand_kernel[(math.ceil(batch * count / block), heads)](
            z.contiguous(), hidden.contiguous(), weight.contiguous(), bias.contiguous(), out, batch * count, heads,
            **sizes, BN=block, num_warps=4, **_products(z, dtype),
        )  # fmt: skip
    return out


def within_warps(head_dim: int) -> int:
    """Warps of a program for a block: with fewer, it spills (``kernels/benchmarks/inspect_modes.py --check``)."""
    return 8 if head_dim > 64 else 4


def _within_arguments(inputs) -> tuple[tuple[int, int], dict]:
    blocks, size, heads, rank = inputs.f.shape
    rows, columns = inputs.matrices.shape[2:]
    has_decay = inputs.rates is not None
    none = inputs.values.new_zeros(1, dtype=torch.float32)
    arguments = {
        "p_f": inputs.f.contiguous(),
        "p_g": inputs.g.contiguous(),
        "p_v": inputs.values.contiguous(),
        "p_matrices": inputs.matrices.contiguous(),
        "p_rates": inputs.rates.float().contiguous() if has_decay else none,
        "p_times": inputs.times.float().contiguous() if has_decay else none,
        "heads": heads,
        "BLOCK": size,
        "C": power_of_two(size),
        "R": rank,
        "D": columns,
        "D_PADDED": power_of_two(columns),
        "A": rows,
        "A_PADDED": power_of_two(rows),
        "DECAYS": has_decay,
        **_products(inputs.f, inputs.operand_dtype),
    }
    return (blocks, heads), arguments


def within_forward(inputs) -> Tensor:
    """Returns the sums within blocks, [N, C, H, A]."""
    grid, arguments = _within_arguments(inputs)
    out = inputs.f.new_empty(*inputs.f.shape[:3], arguments["A"], dtype=torch.float32)
    with on_device(out.device):
        within_fwd_kernel[grid](p_out=out, **arguments, num_warps=within_warps(arguments["D"]))
    return out


def within_backward(inputs, grad_out: Tensor, names: list[str]) -> dict[str, Tensor]:
    (blocks, heads), arguments = _within_arguments(inputs)
    size, rank = inputs.f.shape[1], inputs.f.shape[3]
    new = inputs.values.new_empty
    grads = {name: new(getattr(inputs, name).shape, dtype=torch.float32) for name in ("f", "g", "values")}
    grad_out = grad_out.float().contiguous()
    x = new(heads, blocks * size, rank * arguments["D"], dtype=inputs.operand_dtype)
    has_decay = inputs.rates is not None
    rates, times = (new(shape if has_decay else (1,), dtype=torch.float32) for shape in
                    ((blocks, heads, rank), (blocks, heads, size)))  # fmt: skip
    with on_device(x.device):
        within_bwd_kernel[blocks, heads](
            p_dout=grad_out, p_df=grads["f"], p_dg=grads["g"], p_dv=grads["values"], p_x=x, p_drates=rates,
            p_dtimes=times, **arguments, num_warps=within_warps(arguments["D"]),
        )  # fmt: skip
    if "matrices" in names:  # [H, A, R D]
        upstream = grad_out.permute(2, 3, 0, 1).flatten(2)  # [H, A, N C]
        product = upstream @ x.float()
        grads["matrices"] = product.unflatten(2, (rank, -1)).transpose(1, 2)
    if has_decay:
        grads |= {"rates": rates.sum(0), "times": times.sum(1)}
    return {name: grads[name] for name in names}


#: What ``fused.py`` calls, by name.
LAUNCHES = SimpleNamespace(
    feature_sums=feature_sums,
    apply_features=apply_features,
    running_sums=running_sums,
    project=project,
    expand=expand,
    within_forward=within_forward,
    within_backward=within_backward,
)
