"""Matrix products that the kernels of all modes leave to libraries."""

import torch
from torch import Tensor


def float32_product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns left @ right of [H, m, k] and [H, k, n], accumulated and returned in float32 whatever their dtype."""
    has_out_dtype = "dtype" in torch.ops.aten.bmm.overloads()  # torch >= 2.8
    if left.dtype != torch.float32 and left.is_cuda and torch.version.hip is None and has_out_dtype:
        return torch.bmm(left, right, out_dtype=torch.float32, out=out)
    return torch.bmm(left.float(), right.float(), out=out)
