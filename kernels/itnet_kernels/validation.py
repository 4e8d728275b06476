"""Checks of the arguments that the public functions have in common. Every message names the argument and its shape."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .positions import Coordinates
from .transforms import may_look_at
from .weights import KERNEL_INPUTS, KernelWeights, kernel_input_size


def batched(positions: Tensor | Coordinates) -> Tensor:
    """Brings positions [n, s] or [B, n, s] to [B or 1, n, s]."""
    positions = positions.positions if isinstance(positions, Coordinates) else positions
    return positions if positions.dim() == 3 else positions.unsqueeze(0)


def check_operands(
    u: Tensor,
    positions: Tensor | Coordinates,
    weights: KernelWeights,
    queries: Tensor | None,
    query_positions: Tensor | Coordinates | None,
) -> tuple[Tensor, Coordinates, Coordinates]:
    """Checks both domains and the weights; returns the queries, which are the keys unless given, their coordinates and
    those of the keys."""
    if (queries is None) != (query_positions is None):
        given, missing = ("queries", "query_positions") if query_positions is None else ("query_positions", "queries")
        raise ValueError(f"`{given}` was given without `{missing}`: a query domain needs features and positions")
    check_features("u", u)
    if queries is not None:
        check_features("queries", queries)
        if queries.shape[0] != u.shape[0] or queries.shape[2:] != u.shape[2:]:
            shapes = f"`queries` {list(queries.shape)} must agree with `u` {list(u.shape)}"
            raise ValueError(f"{shapes} in batch, heads and head size")
    keys = check_positions("positions", positions, "u", u, weights)
    check_weights(weights, num_heads=u.shape[2], head_dim=u.shape[3])
    if queries is None:
        return u, keys, keys
    return queries, check_positions("query_positions", query_positions, "queries", queries, weights), keys


def check_causal(num_queries: int, num_keys: int) -> None:
    if num_queries > num_keys:
        given = f"`u` has {num_keys} positions, `queries` {num_queries}"
        raise ValueError(f"a causal operator needs at least as many keys as queries: {given}")


def check_features(name: str, features: Tensor) -> None:
    if features.dim() != 4 or 0 in features.shape:
        expected = "[batch, positions, heads, head size] with no size 0"
        raise ValueError(f"`{name}` must have shape {expected}, got {list(features.shape)}")
    if not features.is_floating_point():
        raise ValueError(f"`{name}` must be a floating-point tensor, got {features.dtype}")


def is_one_of(shape: Sequence[int], *allowed: Sequence[int]) -> bool:
    """Returns whether a shape is allowed. A compiled graph knows sizes by symbols, which `in` cannot compare."""
    same_length = (other for other in allowed if len(other) == len(shape))
    return any(all(a == b for a, b in zip(shape, other, strict=True)) for other in same_length)


def check_positions(
    name: str, positions: Tensor | Coordinates, owner: str, features: Tensor, weights: KernelWeights
) -> Coordinates:
    """Checks positions and returns the coordinates of ``features`` [B, n, H, d_h]."""
    batch, count = features.shape[:2]
    dim = weights.fourier.shape[1]
    is_prepared = isinstance(positions, Coordinates)
    shape = list((positions.positions if is_prepared else positions).shape)
    allowed = ([count, dim], [1, count, dim], [batch, count, dim])
    if not is_one_of(shape, *allowed):
        raise ValueError(
            f"`{name}` {shape} must be {allowed[0]} or {allowed[2]}: one coordinate of size {dim} "
            f"(from `weights.fourier`) for each position of `{owner}` {list(features.shape)}"
        )
    if not is_prepared:
        return Coordinates(positions, weights.fourier, name=name)
    if not positions.has_frequencies_of(weights.fourier):
        raise ValueError(
            f"`{name}` were prepared with other frequencies ({list(positions.frequencies.shape)}) than "
            f"`weights.fourier` ({list(weights.fourier.shape)}); prepare them with those of the weights"
        )
    return positions


def check_measure(measure: Tensor, batch: int, num_keys: int) -> None:
    if list(measure.shape) != [batch, num_keys]:
        shape = list(measure.shape)
        raise ValueError(f"`measure` {shape} must be [{batch}, {num_keys}], one weight for each key of `u`")
    if not measure.is_floating_point():
        raise ValueError(f"`measure` must be a floating-point tensor, got {measure.dtype}")
    if may_look_at(measure) and not bool((measure >= 0).all()):  # also catches NaN
        raise ValueError("`measure` must not be negative or NaN: it holds the quadrature weights omega_j >= 0")


def check_weights(weights: KernelWeights, num_heads: int, head_dim: int) -> None:
    unknown = [name for name in weights.inputs if name not in KERNEL_INPUTS]
    if unknown:
        raise ValueError(f"`weights.inputs` has unknown groups {unknown}; known are {list(KERNEL_INPUTS)}")
    width, own = weights.w1.shape[-2], [num_heads] if weights.has_own_hidden else []
    columns = kernel_input_size(weights.inputs, *weights.fourier.shape, head_dim)
    heads = 1 if weights.w2.shape[0] == 1 else num_heads
    expected = {"w1": [*own, width, columns], "b1": [*own, width]}
    expected |= {"w2": [heads, head_dim**2, width], "b2": [heads, head_dim**2]}
    if (weights.w_mid is None) != (weights.b_mid is None):
        raise ValueError("`weights.w_mid` and `weights.b_mid` go together: both for a 3-layer kernel, or none")
    if weights.w_mid is not None:
        expected |= {"w_mid": [*own, width, width], "b_mid": [*own, width]}
    if (weights.w2_directions is None) != (weights.b2_directions is None):
        raise ValueError("`weights.w2_directions` and `weights.b2_directions` go together: both, or none")
    if weights.w2_directions is not None:
        shape = [heads, weights.fourier.shape[1], head_dim**2]
        expected |= {"w2_directions": [*shape, width], "b2_directions": shape}
    for name, shape in expected.items():
        actual = list(getattr(weights, name).shape)
        if actual != shape:
            raise ValueError(
                f"`weights.{name}` {actual} must be {shape} for {num_heads} heads of size {head_dim}, "
                f"inputs {list(weights.inputs)} and {weights.fourier.shape[0]} frequencies"
            )


def check_indices(indices: Tensor, batch: int, num_queries: int, num_keys: int, **per_pair: Tensor) -> None:
    """Checks the keys of each query, which are [B, n_q, M] integers in [0, n_k), and what has a number for each."""
    if indices.dim() != 3 or list(indices.shape[:2]) != [batch, num_queries]:
        raise ValueError(f"`indices` {list(indices.shape)} must be [{batch}, {num_queries}, M]: M keys for each query")
    if indices.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"`indices` must be an integer tensor, got {indices.dtype}")
    if may_look_at(indices) and not bool(((indices >= 0) & (indices < num_keys)).all()):
        raise ValueError(f"`indices` must be in [0, {num_keys}): `u` has {num_keys} positions")
    for name, tensor in per_pair.items():
        if tensor.shape != indices.shape or not tensor.is_floating_point():
            expected = f"a floating-point tensor of the shape of `indices` {list(indices.shape)}"
            raise ValueError(f"`{name}` must be {expected}, got {tensor.dtype} {list(tensor.shape)}")
