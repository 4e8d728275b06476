# SPDX-License-Identifier: Apache-2.0
"""Puts one integral in place of another: fits factors, and a near kernel, to an exact integral."""

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from configuration_itnet import ITNetConfig
from itnet_kernels import Coordinates, Factor, low_rank_matrix_transform, low_rank_transform

from ..domain import Domain
from ..heads.signal import ITNetQueryLayer
from ..operator import ITNetKernel, ITNetOperator, near_integral
from .factors import ITNetFactors
from .near import find_near_keys

# Ridge of the least-squares step, relative to the mean of the Gram matrix's diagonal.
_RIDGE = 1e-7

# What is to be fitted: for every batch a function that gives (actual, wanted), both 0 at padding.
Problem = list[Callable[[], tuple[Tensor, Tensor]]]


class ExactCall(NamedTuple):
    """One integral of a batch: what it is taken of, where, and the exact one that is wanted."""

    heads: Tensor  # u [B, n, H, d_h]
    domain: Domain
    queries: Tensor | None  # [B, m, H, d_h] of a query layer, at ``places``; None: the keys
    places: Coordinates | None
    real: Tensor  # [B, m or 1, 1, 1]: what comes out at padding does not matter
    wanted: Tensor  # [B, m, H, d_h], 0 at padding

    @property
    def at(self) -> dict:
        """The queries, as factors take them."""
        return {} if self.queries is None else {"queries": self.queries, "query_domain": self.places}


@torch.no_grad()
def exact_call(
    owner: ITNetOperator | ITNetQueryLayer, config: ITNetConfig, features: Tensor, domain: Domain, *more: Tensor
) -> ExactCall:
    """Returns what an operator or a query layer was called with, and its exact integral."""
    heads = features.float().unflatten(-1, (config.num_attention_heads, -1))  # [B, n, H, d_h]
    if isinstance(owner, ITNetOperator):
        wanted = owner.integral(features, domain.replaced(neighbors=None)).float()  # whatever the edges
        real = (domain.measure > 0)[..., None, None]
        return ExactCall(heads, domain, None, None, real, wanted.view_as(heads) * real)
    places = owner.places(domain, *more)
    # The queries as they are, and as they will be in the converted model.
    exact, local = (owner.query_norm(owner.interpolated(features, domain, places, is_local=x)) for x in (False, True))
    wanted = owner.integral(features, domain, exact, places).float()
    queries = local.float().unflatten(-1, heads.shape[2:])
    return ExactCall(heads, domain, queries, places, torch.ones_like(heads[:, :1, :1, :1]), wanted.view_as(queries))


class FittedIntegral(nn.Module):
    """What takes the place of an exact integral: factors, and for near and far fields a near kernel T kappa + B."""

    def __init__(self, kernel: ITNetKernel, config: ITNetConfig, seed: int):
        super().__init__()
        self.config = config
        self.factors = _random_factors(config, seed)
        self.kernel = copy.deepcopy(kernel).float() if config.integration_mode == "near_far" else None
        size = 0 if self.kernel is None else 2 * config.head_dim
        self.register_buffer("mixing", torch.zeros(config.num_attention_heads, size, config.head_dim))  # [T^T; B^T]
        parts = {name: getattr(kernel, name) for name in ("w2", "w2_directions", "b2_directions")}
        #: What the hidden units of the exact kernel meet, but for b2.
        self.exact = {name: part.detach().float() for name, part in parts.items() if part is not None}

    def install(self, owner: ITNetOperator | ITNetQueryLayer) -> None:
        """Makes these the parameters of an operator or a query layer."""
        dtype, training = owner.output.weight.dtype, owner.training
        owner.factors = self.factors.to(dtype).train(training)
        if self.kernel is not None:
            owner.kernel = self.kernel.to(dtype).train(training).requires_grad_(True)

    def fit(self, calls: list[ExactCall], steps: int, learning_rate: float, bar) -> float:
        """Fits to the wanted integrals by least squares, Adam, least squares; the relative error."""
        terms = [self._near_terms(call) for call in calls]
        if self.kernel is not None:
            self.kernel.requires_grad_(False)  # its hidden units stay those of the exact kernel

        def outcome(call: ExactCall, near: Tensor) -> tuple[Tensor, Tensor]:
            far = self.factors(call.heads, call.domain, **call.at)[0]
            return (far + torch.einsum("bnhf,hfa->bnha", near, self.mixing)) * call.real, call.wanted

        problem = [lambda call=call, near=near: outcome(call, near) for call, near in zip(calls, terms, strict=True)]
        self._solve(calls, terms)
        return minimise(problem, [self], steps, learning_rate, bar, lambda: self._solve(calls, terms))

    @torch.no_grad()
    def _near_terms(self, call: ExactCall) -> Tensor:
        """Returns what the near field is linear in: near integrals of the exact kernel without b2 and of the identity.

        They are [B, m, H, 2 d_h], or [B, m, H, 0] without a near field.
        """
        heads, domain, config = call.heads, call.domain, self.config
        if self.kernel is None:
            return call.wanted[..., :0]
        near = domain.near(config) if call.queries is None else find_near_keys(config, call.places, domain)
        weights = self.kernel(domain.frequencies)._replace(**self.exact)
        identity = torch.eye(heads.shape[-1], device=heads.device).flatten().expand_as(weights.b2)
        parts = (
            weights._replace(b2=torch.zeros_like(weights.b2)),
            weights._replace(
                w2=torch.zeros_like(weights.w2), b2=identity, **dict.fromkeys(("w2_directions", "b2_directions"))
            ),
        )
        integrals = [near_integral(heads, domain, part, near, config, call.queries, call.places) for part in parts]
        return torch.cat(integrals, dim=-1)

    @torch.no_grad()
    def _solve(self, calls: list[ExactCall], terms: list[Tensor]) -> None:
        """Solves for all that the integral is linear in, out_i = W^T [regressors_i; ubar; near terms_i]: Phi's output
        layer or the matrices, the constant, T and B."""
        gram = right = 0
        for call, near in zip(calls, terms, strict=True):
            regressors = (torch.cat([_regressors(self.factors, call), near], -1) * call.real).double()  # [B, m, H, f]
            gram = gram + torch.einsum("bnhf,bnhg->hfg", regressors, regressors)
            right = right + torch.einsum("bnhf,bnha->hfa", regressors, call.wanted.double())
        size, near_size = right.shape[2], self.mixing.shape[1]
        sizes = [gram.shape[1] - near_size, near_size // 2, near_size // 2]
        is_shared = len(self.exact["w2"]) < len(gram)
        solution = _least_squares(gram, right, sizes, near_size if is_shared else 0)  # [H, f, a]
        far, near = solution.split([sizes[0], near_size], dim=1)
        _set_factors(self.factors, *far.tensor_split([-size], dim=1))
        if self.kernel is not None:
            self.mixing.copy_(near)
            count = len(self.exact["w2"])
            mixed, constant = self.mixing[:count].split(size, dim=1)  # [H or 1, b, a], [H or 1, c, a]
            for name, part in self.exact.items():
                number = part.shape[1] if name.endswith("directions") else 1
                rows = part.reshape(count, number, size, -1)  # [H or 1, s or 1, b, c w]
                getattr(self.kernel, name).copy_(torch.einsum("hba,hsbk->hsak", mixed, rows).view_as(part))
            self.kernel.b2.copy_(constant.mT.flatten(1))


def _least_squares(gram: Tensor, right: Tensor, sizes: list[int], num_shared: int) -> Tensor:
    """Returns the solution [H, f, a] of gram [H, f, f] solution = right [H, f, a], a little damped.

    Every block of ``sizes`` regressors is damped by its own size. The last ``num_shared`` rows are the same for all
    heads.
    """
    diagonal = gram.diagonal(dim1=1, dim2=2)
    damping = [block.mean(1, keepdim=True).expand_as(block) for block in diagonal.split(sizes, dim=1)]
    gram = gram + torch.diag_embed(_RIDGE * torch.cat(damping, dim=1).clamp(min=1e-30))
    if num_shared == 0:
        return torch.linalg.solve(gram, right)
    own = gram.shape[1] - num_shared
    (own_gram, mixed), (_, shared_gram) = (
        half.split([own, num_shared], 2) for half in gram.split([own, num_shared], 1)
    )
    own_right, shared_right = right.split([own, num_shared], 1)
    # What each head has of its own, as a function of what they share: own = free - slope shared.
    slope, free = torch.linalg.solve(own_gram, torch.cat([mixed, own_right], 2)).split([num_shared, right.shape[2]], 2)
    shared = torch.linalg.solve((shared_gram - mixed.mT @ slope).sum(0), (shared_right - mixed.mT @ free).sum(0))
    return torch.cat([free - slope @ shared, shared.expand(len(gram), -1, -1)], dim=1)


def _set_factors(factors: ITNetFactors, weight: Tensor, constant: Tensor) -> None:
    """Sets Phi's output layer or the matrices, and the constant, from rows of a solution [H, ..., a]."""
    factors.bias.copy_(constant.mT)
    if factors.is_matrix:
        factors.matrices.copy_(weight.unflatten(1, factors.matrices.shape[1:3]).mT)  # [H, r, c, a] -> [H, r, a, c]
        return
    rank, width = factors.phi.w2.shape[1], factors.phi.w2.shape[3]
    weight, bias = weight.split([rank * width, rank], dim=1)
    factors.phi.w2.copy_(weight.unflatten(1, (rank, width)).transpose(2, 3))
    factors.phi.b2.copy_(bias)


def _regressors(factors: ITNetFactors, call: ExactCall) -> Tensor:
    """Returns [Z[r] h_i[k]; Z[r]; ubar[c]], or in the matrix form [f_i[r] S[r, c]; ubar[c]]: [B, m, H, ...].

    The operator itself gives them: with unit vectors for Phi, or unit matrices for M; the mean, with a kernel of 0 and
    an identity as its constant.
    """
    heads, domain = call.heads, call.domain
    phi, psi = factors.factors(heads, domain, *call.at.values())
    settings = factors.settings(domain)
    decay, head_dim = settings.pop("decay", None), heads.shape[-1]
    identity = torch.eye(head_dim, device=heads.device).expand(heads.shape[2], -1, -1)

    def of_ranks(ranks: slice) -> dict:
        return settings | {"decay": None if decay is None else decay[:, ranks]}

    if factors.is_matrix:
        ranks = [slice(r, r + 1) for r in range(psi.shape[-1])]
        unit = identity.unsqueeze(1)
        pieces = [
            low_rank_matrix_transform(heads, phi[..., one], psi[..., one], unit, **of_ranks(one)) for one in ranks
        ]
        none = torch.zeros_like(phi[..., :1]), torch.zeros_like(psi[..., :1])
        return torch.cat([*pieces, low_rank_matrix_transform(heads, *none, unit, bias=identity, **settings)], -1)
    pieces = []
    for first in range(0, psi.bias.shape[1], head_dim):  # an integral has d_h numbers per head: Z comes in pieces
        some = slice(first, first + head_dim)
        piece = Factor(psi.hidden, psi.weight[:, some], psi.bias[:, some])
        size = piece.bias.shape[1]
        unit = torch.eye(size, head_dim, device=heads.device).expand(*phi.hidden.shape[:3], -1, -1)
        pieces.append(low_rank_transform(heads, unit, piece, **of_ranks(some))[..., :size])
    moments = torch.cat(pieces, dim=-1)
    mean = low_rank_transform(heads, torch.zeros_like(unit), piece, bias=identity, **settings)
    products = (moments.unsqueeze(-1) * phi.hidden.unsqueeze(-2)).flatten(-2)
    return torch.cat([products, moments, mean], dim=-1)


@torch.no_grad()
def _random_factors(config: ITNetConfig, seed: int) -> ITNetFactors:
    """Makes factors with hidden units of a useful size, in float32: those of a new model start close to 0."""
    factors = ITNetFactors(config).float()
    generator = torch.Generator().manual_seed(seed)
    for parameter in factors.parameters():
        fan_in = parameter.shape[-1]
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / fan_in**0.5)
    if factors.log_decay is not None:
        factors.reset_decay()
    return factors


@torch.enable_grad()
def minimise(
    problem: Problem, fitted: list[nn.Module], steps: int, learning_rate: float, bar, finish=lambda: None
) -> float:
    """Minimises the relative squared error over the parameters by Adam, and touches no other gradient.

    Keeps the better of start and end, after ``finish``, and returns its relative error.
    """
    start, start_error = copy.deepcopy([part.state_dict() for part in fitted]), relative_error(problem)
    parameters = [parameter for part in fitted for parameter in part.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(steps, 1))
    for step in range(steps):
        actual, wanted = problem[step % len(problem)]()
        loss = (actual - wanted).float().square().sum() / wanted.float().square().sum().clamp(min=1e-30)
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient
        optimizer.step()
        schedule.step()
        bar.update()
    optimizer.zero_grad()
    finish()
    error = relative_error(problem)
    if error > start_error:
        for part, state in zip(fitted, start, strict=True):
            part.load_state_dict(state)
    return min(error, start_error)


@torch.no_grad()
def relative_error(problem: Problem) -> float:
    pairs = [outcome() for outcome in problem]
    difference = sum((actual - wanted).float().square().sum() for actual, wanted in pairs)
    return float((difference / sum(wanted.float().square().sum() for _, wanted in pairs).clamp(min=1e-30)).sqrt())
