"""One query per sample in one launch: ``itnet::list_step``, for decoding on a GPU with the keys that a cache holds."""

import math

import torch
from torch import Tensor

from ..backends import matmul_dtype
from ..operators import without_derivative
from ..positions import Coordinates
from ..transforms import is_transformed, operator_namespace
from ..weights import KERNEL_INPUTS, KernelWeights, kernel_group_sizes

_UNITS = 16  # hidden units of a program: a token has few queries, and the weights are what takes time to read
_KEYS = 64  # of a tile; half as many for heads larger than 64, which would spill
_TENSORS = ("query", "keys", "gamma_x", "gamma_y", "differences", "coefficients", "w1", "b1", "w2", "b2")
_SCHEMA = ", ".join(f"Tensor {name}" for name in _TENSORS)


@torch.library.custom_op(
    f"{operator_namespace(__name__)}::list_step",
    mutates_args=(),
    schema=f"({_SCHEMA}, Tensor? indices, int[] columns, bool has_frequencies, ScalarType operand_dtype) -> Tensor",
)
def _step(*given):
    # These import triton, which may not be installed.
    from ..exact.triton.device import TRITON_TYPES, dot_precision, gelu_form, on_device
    from .triton.configs import power_of_two
    from .triton.step import list_step_kernel

    *tensors, indices, columns, has_frequencies, dtype = given
    own = {name: tensor.contiguous() for name, tensor in zip(_TENSORS, tensors, strict=True)}
    batch, heads, head_dim = own["query"].shape
    (width, num_columns), features = own["w1"].shape, own["gamma_x"].shape[-1]
    frequencies = features // 2 if has_frequencies else 0
    tiles = math.ceil(width / _UNITS)
    out = own["query"].new_empty(batch, heads, tiles, head_dim, dtype=torch.float32)
    names = ("AT_X", "AT_Y", "AT_RELATIVE", "AT_DISTANCE", "AT_UX", "AT_UY", "AT_PRODUCT")
    device = out.device
    with on_device(device):
        list_step_kernel[(batch * heads, tiles)](
            **{f"p_{name}": tensor for name, tensor in own.items()},
            p_indices=own["b1"] if indices is None else indices.to(torch.int32).contiguous(), p_out=out,
            heads=heads, num_keys=own["keys"].shape[1], length=own["coefficients"].shape[1],
            x_stride=0 if len(own["gamma_x"]) == 1 else features,
            y_stride=0 if len(own["gamma_y"]) == 1 else own["keys"].shape[1],
            list_stride=0 if indices is None or len(indices) == 1 else indices.shape[1],
            w2_stride=0 if len(own["w2"]) == 1 else head_dim**2,
            W=width, COLUMNS=num_columns, D=head_dim, D_PADDED=power_of_two(head_dim), F=features, L=frequencies,
            L_PADDED=power_of_two(max(frequencies, 1)), DIM=own["differences"].shape[2],
            **dict(zip(names, columns, strict=True)), LISTED=indices is not None, KC=_UNITS,
            BK=_KEYS if head_dim <= 64 else _KEYS // 2,
            GELU=gelu_form(dtype, device), DTYPE=TRITON_TYPES[dtype], PRECISION=dot_precision(device), num_warps=4,
            enable_fp_fusion=True,
        )  # fmt: skip
    return out.sum(2)


@_step.register_fake
def _(*given):
    return given[0].new_empty(given[0].shape, dtype=torch.float32)


without_derivative(_step, "call integral_transform where gradients are enabled, which takes itnet::list_sum")


def is_list_step(queries: Tensor, keys: Tensor, weights: KernelWeights, *tensors: Tensor | None) -> bool:
    """Says whether a call has one query per sample and no gradients."""
    if queries.shape[1] != 1 or is_transformed():
        return False
    needed = (queries, keys, *weights, *tensors)
    return not (torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in needed))


def list_step(
    queries: Tensor,
    keys: Tensor,
    x: Coordinates,
    y: Coordinates,
    weights: KernelWeights,
    coefficients: Tensor,
    indices: Tensor | None = None,
) -> Tensor:
    """Returns sum_m c_m K_j u_j for one query per sample, [B, 1, H, d_h] in float32.

    ``coefficients`` [B, M] go with the keys ``indices`` [B or 1, M], or with all keys. Weights are taken as they are.
    """
    head_dim, dtype = keys.shape[3], torch.float32
    sizes, columns, first = kernel_group_sizes(*weights.fourier.shape, head_dim), [], 0
    for name in KERNEL_INPUTS:
        columns.append(first if name in weights.inputs else -1)
        first += sizes[name] if name in weights.inputs else 0
    differences = (x.exact - y.exact).float()  # [B or 1, n, s]
    features = x.features_in(dtype)[:, 0], y.features_in(dtype)
    sets = max(len(differences), len(features[1]))
    where = (part.expand(sets, *part.shape[1:]) for part in (features[1], differences))
    given = queries[:, 0], keys, features[0], *where, coefficients.float(), *weights[:4], indices, columns
    return _step(*given, len(weights.fourier) > 0, matmul_dtype(queries)).unsqueeze(1)
