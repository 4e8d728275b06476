"""The public operator: checks its arguments, chooses a backend and calls it."""

import importlib.util
import logging
import os
from typing import Literal

import torch
from torch import Tensor

from .exact.pair_sum import pair_sum
from .exact.plain_pair_sum import plain_pair_sum
from .exact.reassociated import finish, matmul_dtype, prepare
from .exact.reference import reference_transform
from .exact.triton.sizes import TRITON_HEAD_DIMS, TRITON_WIDTHS
from .positions import Coordinates
from .transforms import is_transformed
from .validation import batched, check_causal, check_measure, check_operands
from .weights import KernelWeights

logger = logging.getLogger(__name__)

Backend = Literal["auto", "reference", "tiled", "triton"]
BACKENDS = ("auto", "reference", "tiled", "triton")

#: What the Triton kernels are written for.
TRITON_DEVICES = ("cuda", "xpu")  # ROCm tensors call themselves cuda
TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# Looked up once and without importing it: a traced function can do neither.
_TRITON_INSTALLED = importlib.util.find_spec("triton") is not None
_announced: set[str] = set()


def integral_transform(
    u: Tensor,
    positions: Tensor | Coordinates,
    weights: KernelWeights,
    *,
    measure: Tensor | None = None,
    is_causal: bool = False,
    queries: Tensor | None = None,
    query_positions: Tensor | Coordinates | None = None,
    backend: Backend = "auto",
) -> Tensor:
    r"""The multi-head integral operator with a learned, matrix-valued kernel (the integral of Eq. multihead).

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
        backend: "reference" forms every K_ij; "tiled" is the reassociated form in PyTorch; "triton" the fused GPU
            kernel; "auto" takes triton for tensors on a GPU where it is installed and tiled otherwise.

    Returns:
        ``[B, n_q, H, d_h]`` in the dtype of the queries.
    """
    queries, x, y = check_operands(u, positions, weights, queries, query_positions)
    batch, num_keys = u.shape[:2]
    if is_causal:
        check_causal(queries.shape[1], num_keys)
    if measure is not None:
        check_measure(measure, batch, num_keys)
    chosen, operand_dtype = resolve_backend(backend, u, weights), matmul_dtype(queries)
    if chosen == "reference":
        return reference_transform(queries, u, batched(x), batched(y), weights, measure, is_causal)
    with torch.autocast(u.device.type, enabled=False):
        inputs = prepare(queries, u, x, y, weights, measure, is_causal, operand_dtype, chosen)
        out = plain_pair_sum(inputs) if is_transformed() else pair_sum(*inputs)
        return finish(out, inputs, weights).to(queries.dtype)


def resolve_backend(backend: str, u: Tensor, weights: KernelWeights) -> str:
    """The backend that will run on these tensors: "auto" is settled, and a choice that cannot run raises.

    "auto" is "triton" for tensors on a GPU if it can run there and "tiled" otherwise. Which one is logged once, as a
    warning where a GPU has to do without its kernels.
    """
    if backend not in BACKENDS:
        raise ValueError(f"`backend` ({backend!r}) must be one of {list(BACKENDS)}")
    if backend == "auto":
        on_gpu = u.device.type in TRITON_DEVICES
        obstacle = triton_obstacle(u, weights) if on_gpu else f"the tensors are on {u.device.type}"
        chosen = "triton" if obstacle is None else "tiled"
        if on_gpu and obstacle is not None:
            message = f'`backend` ("auto") uses "tiled" on {u.device.type}, which is many times slower than "triton"'
            _announce(f"{message}: {obstacle}", logging.WARNING)
        else:
            _announce(f'`backend` ("auto") uses "{chosen}"' + ("" if obstacle is None else f": {obstacle}"))
        return chosen
    if backend == "triton":
        obstacle = triton_obstacle(u, weights)
        if obstacle is not None:
            raise ValueError(f'`backend` ("triton") cannot run: {obstacle}')
    return backend


def triton_obstacle(u: Tensor, weights: KernelWeights) -> str | None:
    """Why the Triton kernels cannot run on these tensors; None if they can."""
    head_dim, width, dtype = u.shape[-1], weights.w1.shape[0], matmul_dtype(u)
    if not _TRITON_INSTALLED:
        return "the triton package is not installed: pip install triton"
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if u.device.type not in TRITON_DEVICES and not is_interpreted:
        return (
            f"it needs tensors on {' or '.join(TRITON_DEVICES)}, `u` is on {u.device.type}; use 'tiled' there, "
            "or set TRITON_INTERPRET=1 before the start of Python to run the kernels in Triton's slow interpreter"
        )
    if weights.w_mid is not None:
        return "it has no kernel for a 3-layer kernel MLP (`weights.w_mid`); use a 2-layer one, or 'tiled'"
    if dtype not in TRITON_DTYPES:
        names = ", ".join(str(t) for t in TRITON_DTYPES)
        return f"it computes in {names}, not in {dtype}; cast the features, or use 'tiled'"
    if dtype == torch.bfloat16 and is_interpreted:
        return (
            "Triton's interpreter (TRITON_INTERPRET=1) multiplies the bits of torch.bfloat16 as integers and would "
            "return wrong numbers; use torch.float32 or torch.float16 there, or 'tiled'"
        )
    if head_dim > TRITON_HEAD_DIMS[-1]:
        return f"its head sizes end at {TRITON_HEAD_DIMS[-1]}, `u` has {head_dim}; use more heads, or 'tiled'"
    if width > TRITON_WIDTHS[-1]:
        return (
            f"its kernel widths end at {TRITON_WIDTHS[-1]}, `weights.w1` has {width}; use a smaller width, or 'tiled'"
        )
    return None


def _announce(message: str, level: int = logging.INFO) -> None:
    """Logs a message the first time. Loggers cannot be traced, so a compiled call stays silent."""
    if not torch.compiler.is_compiling() and message not in _announced:
        _announced.add(message)
        logger.log(level, message)
