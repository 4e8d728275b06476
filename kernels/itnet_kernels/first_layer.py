"""The first layer of the kernel MLP by parts. W1 z_ij + b1 splits along the groups of z_ij:

    pre_ij[k] = q_i[k] + Q_i[k] . u_j + P_ij[k]
    q_i[k]    = b1[k] + W_x[k] . gamma(x_i) + W_ux[k] . u_i                                 the row term
    Q_i[k]    = W_uy[k] + W_had[k] * u_i                                                    the virtual queries
    P_ij[k]   = W_y[k] . gamma(y_j) + W_rel[k] . gamma(x_i - y_j) + w_d[k] |x_i - y_j|      the position term

P has no features in it, so that heads share it, and the samples of a batch that share their positions. sin and cos of
a difference are bilinear in gamma(x_i) and gamma(y_j),

    W_rel . gamma(x_i - y_j) = C_i . gamma(y_j),     C_i = [W_c s_i - W_s c_i ; W_s s_i + W_c c_i]

with W_rel = [W_s; W_c] and gamma(x_i) = [s_i; c_i], so that one product with inner size 2L gives all pairs. Raw
coordinates (L = 0) are subtracted first, in :func:`position_dtype`: W_rel x_i - W_rel y_j would cancel far from the
origin.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .transforms import is_transformed


class PositionWeights(NamedTuple):
    """The columns of W1 that meet key positions; None for a group that the kernel does not use."""

    y: Tensor | None  # [w, F]
    relative: Tensor | None  # [w, F]
    distance: Tensor | None  # [w, 1]

    @property
    def are_used(self) -> bool:
        """Says whether the kernel sees key positions at all."""
        return any(weight is not None for weight in self)


def position_row(b1: Tensor, w_x: Tensor | None, gamma_x: Tensor) -> Tensor:
    """Returns q_i[k] without W_ux . u_i: b1 [w], W_x [w, F], gamma(x) [b or 1, t, F] -> [b or 1, t or 1, 1, w]."""
    return b1.expand(1, 1, 1, -1) if w_x is None else b1 + (gamma_x @ w_x.T).unsqueeze(2)


def position_term(
    x: Tensor,  # [..., t, s]
    y: Tensor,  # [..., t or 1, m, s], the keys of each query; without [..., t or 1] if all queries have the same
    gamma_x: Tensor,  # [..., t, F]
    gamma_y: Tensor,  # [..., t or 1, m, F]
    weights: PositionWeights,
    has_frequencies: bool,
) -> Tensor | None:
    """Returns P_ij[k], which broadcasts to [..., t, w, m], or None. All modes of differentiation follow it."""
    factors = key_factors(weights, gamma_x, has_frequencies)
    term = None if factors is None else factors @ gamma_y.mT
    is_raw = weights.relative is not None and not has_frequencies
    differences = x.unsqueeze(-2) - y if is_raw or weights.distance is not None else None  # [..., t, m, s]
    if is_raw:
        product = weights.relative @ differences.mT.to(gamma_y.dtype)
        term = product if term is None else product + term
    if weights.distance is not None:
        lengths = length(differences).unsqueeze(-2).to(gamma_y.dtype)  # [..., t, 1, m]
        if term is None:
            return weights.distance * lengths
        term = term.addcmul(weights.distance, lengths)
    return term


def position_tile(
    x: Tensor,  # [c, t, s]
    y: Tensor,  # [c, m, s]
    gamma_x: Tensor,  # [c, t, F]
    gamma_y: Tensor,  # [c, m, F]
    weights: PositionWeights,
    has_frequencies: bool,
) -> Tensor:
    """Computes :func:`position_term` for cells in which every query meets every key, as tiles have it: [c, m, t, w].

    It takes one product per cell, and autograd cannot follow it: terms are added in place.
    """
    factors = key_factors(weights, gamma_x, has_frequencies)  # [c, t, w, F], or [w, F] for all queries
    is_raw = weights.relative is not None and not has_frequencies
    width = next(len(weight) for weight in weights if weight is not None)
    term = gamma_y.new_empty(len(y), y.shape[1], x.shape[1], width)
    if factors is None:
        term.zero_()
    elif factors.dim() == 2:
        term.copy_((gamma_y @ factors.T).unsqueeze(2))
    else:
        torch.bmm(gamma_y, factors.flatten(1, 2).mT, out=term.flatten(2, 3))
    if is_raw:
        differences = x.unsqueeze(1) - y.unsqueeze(2)  # [c, m, t, s]
        term += differences.to(term.dtype) @ weights.relative.T
    if weights.distance is not None:
        lengths = torch.cdist(y, x, compute_mode="donot_use_mm_for_euclid_dist")  # [c, m, t]
        term.addcmul_(lengths.unsqueeze(-1).to(term.dtype), weights.distance[:, 0])
    return term


def key_factors(weights: PositionWeights, gamma_x: Tensor, has_frequencies: bool) -> Tensor | None:
    """Returns the factors of gamma(y_j) in P: [..., t, w, F], or [w, F] for all queries, or None."""
    if weights.relative is None or not has_frequencies:
        return weights.y
    rotated = rotate(weights.relative, gamma_x)
    return rotated if weights.y is None else rotated + weights.y


def rotate(relative: Tensor, features: Tensor) -> Tensor:
    """Returns the coefficients [..., w, 2L] of gamma(y_j) in W_rel . gamma(x_i - y_j), given gamma(x_i) [..., 2L]."""
    sine, cosine = features.unsqueeze(-2).chunk(2, dim=-1)  # [..., 1, L]
    w_sine, w_cosine = relative.chunk(2, dim=-1)  # [w, L]
    top = (w_cosine * sine).addcmul(w_sine, cosine, value=-1)
    return torch.cat([top, (w_sine * sine).addcmul(w_cosine, cosine)], dim=-1)


def length(differences: Tensor) -> Tensor:
    """Returns |v| of [..., s]: [...]. All derivatives at v = 0 are 0: those of sqrt would be infinite."""
    if not (differences.requires_grad or is_transformed()):
        return torch.linalg.vector_norm(differences, dim=-1)
    squared = differences.square().sum(-1)
    is_positive = squared > 0
    return torch.where(is_positive, squared.where(is_positive, 1).sqrt(), 0)
