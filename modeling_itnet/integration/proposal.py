# SPDX-License-Identifier: Apache-2.0
"""Says where Monte Carlo integration samples: from the measure, or from a learned proposal (§mc_impl of the paper)."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import initialization as init

from configuration_itnet import ITNetConfig
from itnet_kernels import KernelWeights, integrand_norms, prefix_sum
from itnet_kernels.measure import over_mass

from ..domain import Domain
from .anchors import take

# Elements of one [B, queries, n] tile of probabilities: 16 MB in float32.
_TILE_ELEMENTS = 2**22


class Draws(NamedTuple):
    """Keys drawn for every query, and what they were drawn with."""

    indices: Tensor  # [B, n, M]
    probabilities: Tensor  # [B, n, M]
    queries: Tensor | None = None  # a [B, n, m], with the graph of phi
    keys: Tensor | None = None  # b [B, n, m]


class ITNetProposal(nn.Module):
    r"""A pmf over the keys of each query, with parameters phi of its own:

        p_ij = (1 - eps) softmax_j(a_i . b_j / sqrt(m) + log omega_j) + eps omega_j,
        a_i = W_a [gamma(x_i); u_i],  b_j = W_b [gamma(x_j); u_j]

    over the keys that query i sees; padding has probability 0. m is ``proposal_size``. Everything that enters is
    detached: phi is trained by :meth:`loss` alone, and nothing else by it.
    """

    def __init__(self, config: ITNetConfig):
        super().__init__()
        self.config = config
        size = config.position_size + config.hidden_size
        self.query = nn.Linear(size, config.proposal_size, bias=False)  # W_a
        self.key = nn.Linear(size, config.proposal_size, bias=False)  # W_b

    def reset_parameters(self) -> None:
        """Starts close to the measure: scores are small."""
        for linear in (self.query, self.key):
            init.normal_(linear.weight, std=self.config.initializer_range)

    def forward(self, features: Tensor, domain: Domain) -> Tensor:
        """Returns p for all pairs: [B, n, n]. For small inputs; :meth:`draw` never holds more than a tile of it."""
        rows = torch.arange(features.shape[1], device=features.device)[None]
        return self._pmf(*self._ends(features, domain), domain.measure, rows)

    def draw(self, features: Tensor, domain: Domain) -> Draws:
        """Draws M keys for every query, with replacement; their probabilities are constants to every gradient."""
        queries, keys = self._ends(features, domain)
        batch, count = domain.measure.shape
        rows = torch.arange(count, device=features.device)[None]
        size = max(1, _TILE_ELEMENTS // (batch * count))
        with torch.no_grad():
            drawn = [
                sample(self._pmf(part, keys, domain.measure, row), self.config.num_samples)
                for part, row in zip(queries.split(size, dim=1), rows.split(size, dim=1), strict=True)
            ]
        indices, probabilities = zip(*drawn, strict=True)
        return Draws(torch.cat(indices, dim=1), torch.cat(probabilities, dim=1), queries, keys)

    def loss(self, features: Tensor, domain: Domain, draws: Draws, weights: KernelWeights) -> Tensor:
        r"""Returns the cross-entropy of p against the optimal proposal, Eq. proposal_loss_clean; a scalar.

            loss = - mean_i sum_m t_im log p_im,     t_im = w_im / sum_m w_im,     w_im = omega_j |K_ij u_j| / p_ij

        The target t is the self-normalised importance estimate of p*_ij ~ omega_j |K_ij u_j| from the M keys that were
        drawn from p for the integral. A norm costs d_h times as much as a pair of the operator's sum, so the mean goes
        over a few queries, drawn from the measure.
        """
        features, measure = features.detach(), domain.measure.detach()
        batch, count = measure.shape
        rows, _ = sample(measure / measure.sum(1, keepdim=True), num_loss_queries(self.config, count))  # [B, number]
        indices, probabilities = (take(t, rows) for t in (draws.indices, draws.probabilities))  # [B, number, M]
        heads = features.unflatten(-1, (-1, self.config.head_dim))
        weights = KernelWeights(*(t.detach() if isinstance(t, Tensor) else t for t in weights))
        places = take(domain.positions.expand(batch, *domain.positions.shape[-2:]), rows)
        given = {"indices": indices, "queries": take(heads, rows), "query_positions": places}
        norms = integrand_norms(heads, domain.coordinates, weights, **given)
        target = norms * measure.gather(1, indices.flatten(1)).view(indices.shape) / probabilities
        target = target / target.sum(-1, keepdim=True).clamp(min=torch.finfo(target.dtype).tiny)
        pmf = self._pmf(take(draws.queries, rows), draws.keys, measure, rows)  # with its gradient, of these rows alone
        return -(target * pmf.gather(2, indices).log()).sum(-1).mean()

    def _ends(self, features: Tensor, domain: Domain) -> tuple[Tensor, Tensor]:
        """Returns a and b of all positions: [B, n, m] each."""
        features, gamma = features.detach(), domain.gamma(features.dtype).detach()
        joint = torch.cat([gamma.expand(*features.shape[:2], -1), features], dim=-1)
        return self.query(joint), self.key(joint)

    def _pmf(self, queries: Tensor, keys: Tensor, measure: Tensor, rows: Tensor) -> Tensor:
        """Returns p [B, t, n] in float32 of queries [B, t, m] with indices ``rows`` [B or 1, t] and keys [B, n, m]."""
        omega = measure.float().unsqueeze(1)  # [B, 1, n]
        if self.config.is_causal:
            hidden = torch.arange(keys.shape[1], device=keys.device) > rows.unsqueeze(-1)  # [B or 1, t, n]
            omega = omega.masked_fill(hidden, 0)
        omega = over_mass(omega, omega.sum(-1, keepdim=True), otherwise=1 / keys.shape[1])
        scores = (queries @ keys.mT).float() / math.sqrt(keys.shape[-1])
        epsilon = self.config.proposal_epsilon
        return (1 - epsilon) * (scores + omega.log()).softmax(-1) + epsilon * omega


def num_loss_queries(config: ITNetConfig, count: int) -> int:
    """Returns how many of ``count`` queries the proposal loss of a layer looks at: n / (4 d_h), from 1 to 16."""
    return max(1, min(16, count // (4 * config.head_dim)))


@torch.no_grad()
def draw_from_measure(measure: Tensor, count: int, is_causal: bool) -> Draws:
    """Draws ``count`` keys for every query from the measure of those it sees."""
    cumulated = prefix_sum(measure.float())  # [B, n]
    mass = cumulated if is_causal else cumulated[:, -1:].expand_as(cumulated)
    indices = _invert(cumulated, mass, count)
    drawn = measure.float().gather(1, indices.flatten(1)).view(indices.shape)
    return Draws(indices, over_mass(drawn, mass.unsqueeze(-1), otherwise=1))


def sample(pmf: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Draws ``count`` times with replacement from every row: pmf [..., n] -> indices, probabilities [..., count]."""
    cumulated = prefix_sum(pmf.detach(), dim=-1)
    indices = _invert(cumulated, cumulated[..., -1:], count).squeeze(-2)
    return indices, pmf.detach().gather(-1, indices)


def _invert(cumulated: Tensor, mass: Tensor, count: int) -> Tensor:
    """Inverts cumulated weights [..., n] at uniform points of [0, mass): mass [..., t] -> indices [..., t, count]."""
    points = torch.rand(*mass.shape, count, device=mass.device) * mass.unsqueeze(-1)
    indices = torch.searchsorted(cumulated, points.flatten(-2), right=True).view(points.shape)
    last = torch.searchsorted(cumulated, mass.contiguous())  # rounding must not step past the last key with a weight
    return torch.minimum(indices, last.unsqueeze(-1))
