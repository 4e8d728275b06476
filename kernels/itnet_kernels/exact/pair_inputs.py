"""The arguments of the sum over pairs, as every evaluation of it takes them."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..first_layer import PositionWeights
from ..measure import uniform_measure


class PairInputs(NamedTuple):
    """Arguments of the pair sum, as integral_transform.py prepares them. None: a group that the kernel does not use.

    Their order and types are also the schema of the operator ``itnet::pair_sum``.
    """

    queries: Tensor  # [B, n_q, H, d_h]
    keys: Tensor  # [B, n_k, H, d_h]
    row: Tensor  # q [B, n_q, H, w], or its part without content, which broadcasts to that
    measure: Tensor | None  # [B, n_k]; None is uniform
    query_positions: Tensor  # [B or 1, n_q, s]
    key_positions: Tensor  # [B or 1, n_k, s]
    query_features: Tensor  # gamma(x) [B or 1, n_q, F]
    key_features: Tensor  # gamma(y) [B or 1, n_k, F]
    w_y: Tensor | None  # [w, F]
    w_relative: Tensor | None  # [w, F]
    w_distance: Tensor | None  # [w, 1]
    w_query: Tensor | None  # W_ux [w, d_h], where row is without content
    w_key: Tensor | None  # W_uy [w, d_h]
    w_product: Tensor | None  # W_had [w, d_h]
    w_mid: Tensor | None  # [w, w]
    b_mid: Tensor | None  # [w]
    w2: Tensor  # [H, w * d_h, d_h], rows (k, c), columns a
    frequencies: Tensor  # [L, s]
    displacements: Tensor | None  # both as Coordinates.lattice gives them; None: nobody looked for a lattice yet
    displacement_index: Tensor | None
    # The pairs as one or several :class:`Blocks` list them; [] is all pairs. With blocks, the last hidden unit is a
    # constant 1 on the pairs that count, whatever its weights, and meets b2 in the last rows of w2.
    block_queries: list[Tensor]  # [B or 1, N, t] each
    block_keys: list[Tensor]  # [B or 1, N, m]
    block_pairs: list[Tensor]  # [B or 1, N, t, m]
    is_causal: bool
    operand_dtype: torch.dtype  # of the matrix products in the triton backend; they accumulate in float32
    backend: str  # "tiled" or "triton"

    @property
    def position_weights(self) -> PositionWeights:
        return PositionWeights(self.w_y, self.w_relative, self.w_distance)

    @property
    def has_position_bias(self) -> bool:
        return self.position_weights.are_used

    @property
    def omega(self) -> Tensor:
        """Returns the measure [B, n_k]."""
        return uniform_measure(self.keys) if self.measure is None else self.measure

    @property
    def has_frequencies(self) -> bool:
        return len(self.frequencies) > 0

    def with_rows(self) -> "PairInputs":
        """Returns the same sum with the whole row term, in the dtype of its part without content."""
        row = self.row.expand(*self.queries.shape[:3], -1)
        if self.w_query is not None:
            row = row + self.queries.to(row.dtype) @ self.w_query.T
        return self._replace(row=row, w_query=None)

    def zeros(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Returns contiguous zeros in the shape of the named arguments."""
        return {name: torch.zeros_like(getattr(self, name), memory_format=torch.contiguous_format) for name in names}


#: The arguments that depend on positions, in the order in which PositionBias takes them.
POSITIONS = ("query_positions", "key_positions", "query_features", "key_features")
#: The arguments that evaluations keep in the layout [H, B, n, .]; everywhere else it is [B, n, H, .].
HEAD_MAJOR = ("queries", "keys", "row")
#: The arguments that the sum has a derivative in.
DIFFERENTIABLE = PairInputs._fields[: PairInputs._fields.index("frequencies")]


def slices(start: int, stop: int, size: int) -> Iterator[slice]:
    """Yields neighbouring slices of at most ``size``, or of 1 if that is less."""
    size = max(1, size)
    return (slice(first, min(first + size, stop)) for first in range(start, stop, size))
