"""The arguments of the sum over pairs, as every evaluation of it takes them."""

from typing import NamedTuple

from torch import Tensor


class PairInputs(NamedTuple):
    """Arguments of the pair sum, as reassociated.py prepares them. None: a group that the kernel does not use."""

    queries: Tensor  # [B, n_q, H, d_h]
    keys: Tensor  # [B, n_k, H, d_h]
    row: Tensor  # q [B, n_q, H, w]
    measure: Tensor | None  # [B, n_k]; None is uniform
    query_positions: Tensor  # [B or 1, n_q, s]
    key_positions: Tensor  # [B or 1, n_k, s]
    query_features: Tensor  # gamma(x) [B or 1, n_q, F]
    key_features: Tensor  # gamma(y) [B or 1, n_k, F]
    w_y: Tensor | None  # [w, F]
    w_relative: Tensor | None  # [w, F]
    w_distance: Tensor | None  # [w, 1]
    w_key: Tensor | None  # W_uy [w, d_h]
    w_product: Tensor | None  # W_had [w, d_h]
    w_mid: Tensor | None  # [w, w]
    b_mid: Tensor | None  # [w]
    w2: Tensor  # [H, w * d_h, d_h], rows (k, c), columns a
    frequencies: Tensor  # [L, s], not differentiable
    is_causal: bool

    @property
    def has_position_bias(self) -> bool:
        return not (self.w_y is None and self.w_relative is None and self.w_distance is None)
