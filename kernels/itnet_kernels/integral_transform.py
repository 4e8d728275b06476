"""The public operator: checks its arguments, chooses a backend and calls it."""

import importlib.util
import logging
from typing import Literal

import torch
from torch import Tensor

from .reference import reference_transform
from .tiled import tiled_transform
from .weights import KERNEL_INPUTS, KernelWeights, kernel_input_size

logger = logging.getLogger(__name__)

Backend = Literal["auto", "reference", "tiled", "triton"]
BACKENDS = ("auto", "reference", "tiled", "triton")


def integral_transform(
    u: Tensor,
    positions: Tensor,
    weights: KernelWeights,
    *,
    measure: Tensor | None = None,
    is_causal: bool = False,
    queries: Tensor | None = None,
    query_positions: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    r"""The multi-head integral operator with a learned, matrix-valued kernel (the integral of Eq. multihead).

        out_i^(h) = sum_j omega_j K_ij^(h) u_j^(h),     K_ij^(h) = reshape(W2^(h) GELU(W1 z_ij + b1) + b2^(h))

    with z_ij of Eq. kernel_input (see :class:`KernelWeights`). W^O and W_theta are not part of it. Differentiable in
    ``u``, ``queries``, the positions, ``measure`` and all weights but ``weights.fourier``.

    Args:
        u: key features ``[B, n, H, d_h]``; also the query features unless ``queries`` is given. float32, float64,
            float16 or bfloat16; half precision is accumulated in float32. Must be finite where ``measure`` is 0.
        positions: coordinates of ``u``, ``[n, s]`` (shared by the batch) or ``[B, n, s]``. Keep them in float32.
        weights: the kernel MLP.
        measure: quadrature weights omega ``[B, n]``, not negative; None is uniform, 1/n. A key of measure 0 (padding)
            contributes nothing.
        is_causal: query i sees keys j <= i + n_k - n_q only, and omega is normalised over them.
        queries: features ``[B, n_q, H, d_h]`` of a query domain other than the key domain.
        query_positions: ``[n_q, s]`` or ``[B, n_q, s]``; goes with ``queries``.
        backend: "reference" forms every K_ij; "tiled" is the reassociated form in PyTorch; "triton" the fused GPU
            kernel; "auto" takes triton for tensors on a GPU where it is installed and tiled otherwise.

    Returns:
        ``[B, n_q, H, d_h]`` in the dtype of the queries.
    """
    if (queries is None) != (query_positions is None):
        given, missing = ("queries", "query_positions") if query_positions is None else ("query_positions", "queries")
        raise ValueError(f"`{given}` was given without `{missing}`: a query domain needs features and positions")
    _check_features("u", u)
    if queries is None:
        queries, query_positions = u, positions
    else:
        _check_features("queries", queries)
        if queries.shape[0] != u.shape[0] or queries.shape[2:] != u.shape[2:]:
            raise ValueError(
                f"`queries` {list(queries.shape)} must agree with `u` {list(u.shape)} in batch, heads and head size"
            )
    _check_positions("positions", positions, "u", u, weights)
    _check_positions("query_positions", query_positions, "queries", queries, weights)
    _check_weights(weights, num_heads=u.shape[2], head_dim=u.shape[3])
    batch, num_keys = u.shape[:2]
    if is_causal and queries.shape[1] > num_keys:
        raise ValueError(
            f"a causal operator needs at least as many keys as queries: `u` has {num_keys} positions, "
            f"`queries` {queries.shape[1]}"
        )
    if measure is None:
        measure = torch.full((batch, num_keys), 1 / num_keys, dtype=torch.float32, device=u.device)
        measure = measure.to(torch.promote_types(u.dtype, torch.float32))
    else:
        _check_measure(measure, batch, num_keys)
    run = _BACKEND_FUNCTIONS[resolve_backend(backend, u.device)]
    return run(queries, u, _batched(query_positions), _batched(positions), weights, measure, is_causal)


def resolve_backend(backend: str, device: torch.device) -> str:
    """The backend that will run: "auto" is settled, a choice that cannot run on this machine raises."""
    if backend not in BACKENDS:
        raise ValueError(f"`backend` ({backend!r}) must be one of {list(BACKENDS)}")
    if backend == "auto":
        return "tiled"
    if backend == "triton":
        raise ValueError(_why_no_triton())
    return backend


def _batched(positions: Tensor) -> Tensor:
    return positions if positions.dim() == 3 else positions.unsqueeze(0)


def _check_features(name: str, features: Tensor) -> None:
    if features.dim() != 4 or 0 in features.shape:
        raise ValueError(
            f"`{name}` must have shape [batch, positions, heads, head size] with no size 0, got {list(features.shape)}"
        )
    if not features.is_floating_point():
        raise ValueError(f"`{name}` must be a floating-point tensor, got {features.dtype}")


def _check_positions(name: str, positions: Tensor, owner: str, features: Tensor, weights: KernelWeights) -> None:
    batch, count = features.shape[:2]
    dim = weights.fourier.shape[1]
    allowed = ([count, dim], [1, count, dim], [batch, count, dim])
    if list(positions.shape) not in allowed:
        raise ValueError(
            f"`{name}` {list(positions.shape)} must be {allowed[0]} or {allowed[2]}: one coordinate of size {dim} "
            f"(from `weights.fourier`) for each position of `{owner}` {list(features.shape)}"
        )
    if not positions.is_floating_point():
        raise ValueError(f"`{name}` must be a floating-point tensor, got {positions.dtype}")
    if positions.device.type == "cpu" and not bool(
        positions.isfinite().all()
    ):  # elsewhere it would wait for the device
        raise ValueError(f"`{name}` holds values that are not finite; coordinates must be finite numbers")


def _check_measure(measure: Tensor, batch: int, num_keys: int) -> None:
    if list(measure.shape) != [batch, num_keys]:
        raise ValueError(
            f"`measure` {list(measure.shape)} must be [{batch}, {num_keys}], one weight for each key of `u`"
        )
    if not measure.is_floating_point():
        raise ValueError(f"`measure` must be a floating-point tensor, got {measure.dtype}")
    if measure.device.type == "cpu" and not bool((measure >= 0).all()):  # also catches NaN
        raise ValueError("`measure` must not be negative or NaN: it holds the quadrature weights omega_j >= 0")


def _check_weights(weights: KernelWeights, num_heads: int, head_dim: int) -> None:
    unknown = [name for name in weights.inputs if name not in KERNEL_INPUTS]
    if unknown:
        raise ValueError(f"`weights.inputs` has unknown groups {unknown}; known are {list(KERNEL_INPUTS)}")
    width = weights.w1.shape[0]
    columns = kernel_input_size(weights.inputs, *weights.fourier.shape, head_dim)
    heads = 1 if weights.w2.shape[0] == 1 else num_heads
    expected = {
        "w1": [width, columns],
        "b1": [width],
        "w2": [heads, head_dim**2, width],
        "b2": [heads, head_dim**2],
    }
    if (weights.w_mid is None) != (weights.b_mid is None):
        raise ValueError("`weights.w_mid` and `weights.b_mid` go together: both for a 3-layer kernel, or none")
    if weights.w_mid is not None:
        expected |= {"w_mid": [width, width], "b_mid": [width]}
    for name, shape in expected.items():
        actual = list(getattr(weights, name).shape)
        if actual != shape:
            raise ValueError(
                f"`weights.{name}` {actual} must be {shape} for {num_heads} heads of size {head_dim}, "
                f"inputs {list(weights.inputs)} and {weights.fourier.shape[0]} frequencies"
            )


def _why_no_triton() -> str:
    if importlib.util.find_spec("triton") is None:
        return '`backend` ("triton") needs the triton package: pip install "itnet[triton]"'
    return '`backend` ("triton") is not part of this version; use "auto", "tiled" or "reference"'


_BACKEND_FUNCTIONS = {"reference": reference_transform, "tiled": tiled_transform}
