"""What the two forms of a low-rank kernel have in common: the keys they sum over, the state of that sum, its decay."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..measure import prefix_sum_of_rows, uniform_measure
from ..positions import Coordinates
from ..transforms import may_look_at
from ..validation import batched, check_causal, check_measure, is_one_of
from .fused import RunningSum, fused_running_sum


class LowRankState(NamedTuple):
    """What all keys so far amount to. A causal operator needs nothing else of the past; the size does not grow."""

    moments: Tensor  # sum_j omega_j Psi_j . u_j: [B, H, r]; in the matrix form sum_j omega_j g_j u_j: [B, H, r, d_h]
    mean: Tensor  # sum_j omega_j u_j: [B, H, d_h]
    mass: Tensor  # sum_j omega_j: [B]
    position: Tensor | None = None  # of a kernel that decays: x of the last key, [B]


class Keys(NamedTuple):
    """The keys of a call; their measure has the dtype of the sums."""

    features: Tensor  # u_j as it was given: [B, n, H, d_h]
    measure: Tensor  # omega_j: [B, n]
    rates: Tensor | None  # lambda of a kernel that decays: [H, r]
    times: Tensor | None  # x of the state and of every key, never falling, if the kernel decays: [B, n + 1]
    operand_dtype: torch.dtype | None = None  # of the matrix products of GPU kernels; None: without these

    @property
    def is_fused(self) -> bool:
        """Says whether GPU kernels do the work."""
        return self.operand_dtype is not None

    @property
    def values(self) -> Tensor:
        """Returns omega_j u_j: [B, n, H, d_h]."""
        return self.features.to(self.measure.dtype) * self.measure[..., None, None]

    def split(self, count: int) -> "tuple[Keys, Keys]":
        """Returns the first ``count`` keys, and the others."""
        times = (None, None) if self.times is None else (self.times[:, : count + 1], self.times[:, count:])
        features, measure = (tensor.tensor_split([count], dim=1) for tensor in self[:2])
        return tuple(self._replace(features=features[k], measure=measure[k], times=times[k]) for k in range(2))

    def decay(self, spans: Tensor) -> Tensor:
        """Returns e^(-lambda_r span) [..., H, r] of spans [...] that are not negative."""
        return torch.exp(-self.rates * spans[..., None, None].to(self.rates.dtype))

    @property
    def decays(self) -> Tensor | None:
        """Says by what the sums shrink from each key to the next: [B, n, H, r]."""
        return None if self.times is None else self.decay(self.times.diff(dim=1))

    @property
    def position(self) -> Tensor | None:
        """Says where a state after the last key stands: [B]."""
        return None if self.times is None else self.times[:, -1]


def check_keys(
    u: Tensor,
    rank: int,
    num_queries: int,
    *,
    measure: Tensor | None,
    is_causal: bool,
    state: LowRankState | None,
    moments: list[int],
    decay: Tensor | None,
    positions: Tensor | Coordinates | None,
) -> Tensor:
    """Checks what both forms take beside their factors; the measure, which has a value if none was given."""
    batch, num_keys, num_heads, _ = u.shape
    if is_causal:
        check_causal(num_queries, num_keys)
    if measure is not None:
        check_measure(measure, batch, num_keys)
    elif is_causal:  # any constant: it is normalised, and pieces of every length agree on 1
        measure = torch.ones_like(u[..., 0, 0])
    elif state is None:
        measure = uniform_measure(u)
    else:
        raise ValueError("`state` without `is_causal` needs a `measure`: 1/n of a piece is not 1/n of the whole")
    if state is not None:
        if list(state.moments.shape) != moments:
            raise ValueError(
                f"`state.moments` {list(state.moments.shape)} must be {moments} to go with `u` and the key factor"
            )
        if (state.position is None) != (decay is None):
            raise ValueError("`state` and this call must both have a `decay`, or both have none")
    if decay is not None:
        if not is_causal or positions is None:
            raise ValueError("`decay` needs `is_causal` and `positions`: a kernel decays from a key to later queries")
        if list(decay.shape) != [num_heads, rank]:
            raise ValueError(f"`decay` {list(decay.shape)} must be {[num_heads, rank]}: a rate per head and rank")
        if may_look_at(decay) and not bool((decay >= 0).all()):
            raise ValueError("`decay` must not be negative or NaN: a kernel that grows with distance overflows")
        check_times(positions, measure)
    return measure


def prepare_keys(u: Tensor, rank: int, num_queries: int, **given) -> tuple[Keys, LowRankState | None]:
    """Returns the keys and the state in the dtype of the sums, from what :func:`check_keys` takes."""
    measure = check_keys(u, rank, num_queries, **given)
    state, decay = given["state"], given["decay"]
    dtype = torch.promote_types(u.dtype, torch.float32)
    if state is not None:
        state = LowRankState(*(tensor.to(dtype) for tensor in state[:3]), state.position)
    times = None if decay is None else _times(given["positions"], measure, state)
    return Keys(u, measure.to(dtype), None if decay is None else decay.to(dtype), times), state


def check_bias(bias: Tensor | None, num_heads: int, rows: int, columns: int) -> None:
    if bias is not None and list(bias.shape) != [num_heads, rows, columns]:
        raise ValueError(f"`bias` {list(bias.shape)} must be {[num_heads, rows, columns]}: a matrix per head")


def check_times(positions: Tensor | Coordinates, measure: Tensor) -> None:
    shape, (batch, count) = batched(positions).shape, measure.shape
    if not is_one_of(shape, [1, count, 1], [batch, count, 1]):
        raise ValueError(
            f"`positions` {list(shape)} must be [{count}, 1] or [{batch}, {count}, 1] with `decay`: one "
            "coordinate for each key"
        )


def _times(positions: Tensor | Coordinates, measure: Tensor, state: LowRankState | None) -> Tensor:
    """Returns the coordinate along which a kernel decays, [B, n + 1]: that of the state, then that of every key.

    Padding has no part in it, wherever it lies: it takes the place of the key before.
    """
    positions, batch = batched(positions), measure.shape[0]
    times = positions[..., 0].to(torch.promote_types(positions.dtype, torch.float32)).expand(batch, -1)
    start = times.detach().amin(1)
    if state is not None:
        start = torch.where(state.mass > 0, state.position.to(times.dtype), start)
    times = torch.cat([start[:, None], times.where(measure > 0, start[:, None])], dim=1)
    order = times.cummax(1).values
    if may_look_at(times) and not bool((times == order)[:, 1:].logical_or(measure == 0).all()):
        raise ValueError("`positions` must not fall from one key to the next, nor below the state, with `decay`")
    return order


def running_sum(
    new: Tensor, before: Tensor | None = None, decays: Tensor | None = None, is_fused: bool = False
) -> Tensor:
    """Returns y_i = decay_i y_(i-1) + new_i over positions, [B, n, ...], with y_(-1) = before [B, ...] or 0.

    ``is_fused`` asks for a GPU kernel. Decays have as many dimensions as ``new``.
    """
    if decays is None:
        total = fused_running_sum(RunningSum(new, None)) if is_fused else prefix_sum_of_rows(new)
        return total if before is None else total + before.unsqueeze(1)
    if before is not None:
        new = torch.cat([new[:, :1] + decays[:, :1] * before.unsqueeze(1), new[:, 1:]], dim=1)
    return fused_running_sum(RunningSum(new, decays.expand_as(new))) if is_fused else _decayed_sum(new, decays)


def _decayed_sum(new: Tensor, decays: Tensor) -> Tensor:
    """Sums in sqrt(n) blocks of sqrt(n) at once, then from block to block. Decays are never divided by."""
    count = new.shape[1]
    if count == 1:
        return new
    size = math.isqrt(count - 1) + 1
    new, decays = (pad(t, (0, 0) * (t.dim() - 2) + (0, -count % size)).unflatten(1, (-1, size)) for t in (new, decays))
    sums, products = [new[:, :, 0]], [decays[:, :, 0]]
    for k in range(1, size):
        sums.append(decays[:, :, k] * sums[-1] + new[:, :, k])
        products.append(decays[:, :, k] * products[-1])
    after = _decayed_sum(sums[-1], products[-1])  # of every block
    before = torch.cat([torch.zeros_like(after[:, :1]), after[:, :-1]], dim=1).unsqueeze(2)
    return (torch.stack(sums, 2) + torch.stack(products, 2) * before).flatten(1, 2)[:, :count]
