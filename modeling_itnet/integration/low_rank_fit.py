# SPDX-License-Identifier: Apache-2.0
"""From exact to low-rank integration: fits Phi and Psi of every layer to the operator of a trained model."""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from transformers.utils import logging

from configuration_itnet import ITNetConfig
from itnet_kernels import Factor, low_rank_matrix_transform, low_rank_transform

from ..domain import Domain, Signal
from ..operator import ITNetOperator, find_operators
from .capture import evaluating, forward_arguments, operator_inputs
from .choice import integrating
from .factors import ITNetFactors

# Ridge of the least-squares step, relative to the mean of the Gram matrix's diagonal.
_RIDGE = 1e-7


@dataclass(frozen=True)
class LowRankReport:
    """How close the low-rank operators come to the exact ones, on the data of the fit and on data it did not see."""

    rank: int
    layer_errors: list[float]  # |integral - exact| / |exact| of every layer, fitted alone, at the exact features
    output_error: float  # the same of the model's last hidden state, with all layers converted
    held_out_error: float | None = None  # the same on samples that were held out of the fit; None if none were
    num_held_out: int = 0  # how many samples these are

    def __str__(self) -> str:
        rows = [f"  layer {index}: {error:.4f}" for index, error in enumerate(self.layer_errors)]
        lines = [f"relative errors at rank {self.rank}", *rows, f"  output: {self.output_error:.4f}"]
        if self.held_out_error is None:
            return "\n".join([*lines, "  (all on the data of the fit: nothing was held out)"])
        return "\n".join([*lines, f"  output on {self.num_held_out} held-out samples: {self.held_out_error:.4f}"])


def fit_low_rank(
    model: nn.Module,
    rank: int,
    calibration_data: Mapping[str, Tensor] | Iterable[Mapping[str, Tensor]],
    *,
    steps: int = 300,
    learning_rate: float = 1e-2,
    distillation_steps: int = 300,
    distillation_learning_rate: float = 2e-3,
    integration_mode: Literal["low_rank", "auto"] = "low_rank",
    factor_form: Literal["vector", "matrix"] | None = None,
    hold_out: float = 0.125,
    seed: int = 0,
) -> LowRankReport:
    r"""Gives every layer factors of rank ``rank`` that reproduce its exact integral on calibration data.

    Layer by layer, at the features that the exact model sees there, the relative squared error of the integral is
    minimised over all parameters of the factors by Adam; before and after, the output layer of Phi (in the matrix form
    the matrices M) and the constant part of the kernel, in which the integral is linear, are solved for by least
    squares. Then the factors of all
    layers are trained together to give the exact model's last hidden state: what one layer gets wrong, another can
    mend. Weights outside the kernels do not change. The features of all calibration data are in memory at once.

    Args:
        model: a model with exact kernels; it is changed in place.
        rank: rank of the kernel per head.
        calibration_data: one batch or more, each the keyword arguments of a forward; labels are ignored.
        steps: Adam steps per layer, each on one batch. 0 leaves the hidden units random.
        learning_rate: of Adam at its start; it falls to 0 along a cosine.
        distillation_steps, distillation_learning_rate: the same for all layers together.
        integration_mode: what the model is set to. ``"low_rank"`` drops the exact kernels; ``"auto"`` keeps them for
            up to ``exact_max_positions`` positions and uses the factors above.
        factor_form: the low-rank kernel, as in the configuration, whose form it is unless given.
        hold_out: share of each batch, rounded down to samples, that the fit does not see: an error on other data than
            those it was fitted to is what the model will have. Batches of fewer than 8 lose nothing at the default.
        seed: of the initial hidden units.

    Returns:
        The relative errors, per layer and of the whole model.
    """
    config = _low_rank_config(model.config, rank, integration_mode, factor_form)
    if not 0 <= hold_out < 1:
        raise ValueError(f"`hold_out` ({hold_out}) must be in [0, 1)")
    operators = find_operators(model)
    if any(operator.kernel is None for operator in operators):
        raise ValueError("the model has no exact kernels to start from: it is a low-rank model already")
    base = model.base_model
    with integrating("exact"):
        batches, held_out, num_held_out = _split(base, _batches(model, calibration_data), hold_out)
        inputs = [operator_inputs(base, batch) for batch in batches]  # [batch][layer]
        whole = _model_problem(base, batches, inputs)
        unseen = _model_problem(base, held_out, [operator_inputs(base, batch) for batch in held_out])
        fitted, errors = [], []
        bar = logging.tqdm(total=len(operators) * steps + distillation_steps, desc=f"fitting rank {rank}")
        for index, operator in enumerate(operators):
            fitted.append(_random_factors(config, seed + index).to(model.device))
            layer_inputs = [batch[index] for batch in inputs]
            errors.append(_fit_layer(operator, fitted[-1], layer_inputs, steps, learning_rate, bar))
    before = [operator.factors for operator in operators]
    try:
        for operator, factors in zip(operators, fitted, strict=True):
            operator.factors = factors.to(operator.output.weight.dtype).train(operator.training)
        with integrating("low_rank"):  # also for "auto": the data may be short
            output_error = _fit(whole, fitted, distillation_steps, distillation_learning_rate, bar)
            held_out_error = _relative_error(unseen) if held_out else None
    except BaseException:
        for operator, factors in zip(operators, before, strict=True):
            operator.factors = factors
        raise
    bar.close()
    for operator in operators:
        operator.factors.config = model.config
        if integration_mode == "low_rank":
            operator.kernel = operator.proposal = None
    model.config.rank, model.config.factor_form = rank, config.factor_form
    model.config.approximate_mode = "low_rank"
    model.config.integration_mode = integration_mode
    return LowRankReport(rank, errors, output_error, held_out_error, num_held_out)


# What is to be fitted: for every batch a function that gives (actual, wanted), both 0 at padding.
Problem = list[Callable[[], tuple[Tensor, Tensor]]]


@torch.no_grad()
def _model_problem(base: nn.Module, batches: list[dict[str, Tensor]], inputs: list[list[Signal]]) -> Problem:
    """The last hidden states that the model has when this is called, which the converted model is to reproduce."""
    real = [(first.measure > 0).unsqueeze(-1) for first, *_ in inputs]  # [B, n, 1]

    def states(index: int) -> Tensor:
        with evaluating(base):
            return base(**batches[index]).last_hidden_state * real[index]

    wanted = [states(index) for index in range(len(batches))]
    return [lambda index=index: (states(index), wanted[index]) for index in range(len(batches))]


def _fit_layer(operator: ITNetOperator, factors: ITNetFactors, inputs: list[Signal], *settings) -> float:
    """Fits factors to the integrals of one operator by least squares, Adam, least squares; the relative error."""
    data = []
    for features, domain in inputs:
        with torch.no_grad():
            wanted = operator.integral(features, domain.replaced(neighbors=None)).float()  # whatever the edges
        heads = features.float().unflatten(-1, (operator.num_heads, -1))  # [B, n, H, d_h]
        real = (domain.measure > 0)[..., None, None]  # what comes out at padding does not matter
        data.append((heads, domain, real, wanted.view_as(heads) * real))

    def outcome(heads: Tensor, domain: Domain, real: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        return factors(heads, domain)[0] * real, wanted

    _solve(factors, data)
    return _fit([partial(outcome, *batch) for batch in data], [factors], *settings, lambda: _solve(factors, data))


@torch.no_grad()
def _solve(factors: ITNetFactors, data: list[tuple[Tensor, Domain, Tensor, Tensor]]) -> None:
    """Solves for what the integral is linear in, out_i = W^T [regressors_i; ubar]: Phi's output layer or the matrices,
    and the constant."""
    gram = right = 0
    for heads, domain, real, wanted in data:
        regressors = (_regressors(factors, heads, domain) * real).double()  # [B, n, H, f]
        gram = gram + torch.einsum("bnhf,bnhg->hfg", regressors, regressors)
        right = right + torch.einsum("bnhf,bnha->hfa", regressors, wanted.double())
    scale = gram.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    solution = torch.linalg.solve(gram + _RIDGE * scale * torch.eye(gram.shape[1]).to(gram), right)  # [H, f, a]
    weight, constant = solution.tensor_split([-right.shape[2]], dim=1)
    factors.bias.copy_(constant.mT)
    if factors.is_matrix:
        factors.matrices.copy_(weight.unflatten(1, factors.matrices.shape[1:3]).mT)  # [H, r, c, a] -> [H, r, a, c]
        return
    rank, width = factors.phi.w2.shape[1], factors.phi.w2.shape[3]
    weight, bias = weight.split([rank * width, rank], dim=1)
    factors.phi.w2.copy_(weight.unflatten(1, (rank, width)).transpose(2, 3))
    factors.phi.b2.copy_(bias)


@torch.enable_grad()
def _fit(
    problem: Problem, fitted: list[ITNetFactors], steps: int, learning_rate: float, bar, finish=lambda: None
) -> float:
    """Minimises the relative squared error over the factors by Adam, and touches no other gradient.

    Keeps the better of start and end, after ``finish``, and returns its relative error.
    """
    start, start_error = copy.deepcopy([factors.state_dict() for factors in fitted]), _relative_error(problem)
    parameters = [parameter for factors in fitted for parameter in factors.parameters()]
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
    error = _relative_error(problem)
    if error > start_error:
        for factors, state in zip(fitted, start, strict=True):
            factors.load_state_dict(state)
    return min(error, start_error)


@torch.no_grad()
def _relative_error(problem: Problem) -> float:
    pairs = [outcome() for outcome in problem]
    difference = sum((actual - wanted).float().square().sum() for actual, wanted in pairs)
    return float((difference / sum(wanted.float().square().sum() for _, wanted in pairs).clamp(min=1e-30)).sqrt())


def _regressors(factors: ITNetFactors, heads: Tensor, domain: Domain) -> Tensor:
    """[Z[r] h_i[k]; Z[r]; ubar[c]], or in the matrix form [f_i[r] S[r, c]; ubar[c]], at all positions: [B, n, H, ...].

    The operator itself gives them: with unit vectors for Phi, or unit matrices for M; the mean, with a kernel of 0 and
    an identity as its constant.
    """
    phi, psi = factors.factors(heads, domain)
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
        none = torch.zeros_like(psi[..., :1])
        return torch.cat([*pieces, low_rank_matrix_transform(heads, none, none, unit, bias=identity, **settings)], -1)
    pieces = []
    for first in range(0, psi.bias.shape[1], head_dim):  # an integral has d_h numbers per head: Z comes in pieces
        some = slice(first, first + head_dim)
        piece = Factor(psi.hidden, psi.weight[:, some], psi.bias[:, some])
        size = piece.bias.shape[1]
        unit = torch.eye(size, head_dim, device=heads.device).expand(*heads.shape[:3], -1, -1)
        pieces.append(low_rank_transform(heads, unit, piece, **of_ranks(some))[..., :size])
    moments = torch.cat(pieces, dim=-1)
    mean = low_rank_transform(heads, torch.zeros_like(unit), piece, bias=identity, **settings)
    products = (moments.unsqueeze(-1) * phi.hidden.unsqueeze(-2)).flatten(-2)
    return torch.cat([products, moments, mean], dim=-1)


@torch.no_grad()
def _random_factors(config: ITNetConfig, seed: int) -> ITNetFactors:
    """Factors with hidden units of a useful size, in float32: those of a new model start close to 0."""
    factors = ITNetFactors(config).float()
    generator = torch.Generator().manual_seed(seed)
    for parameter in factors.parameters():
        fan_in = parameter.shape[-1]
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / fan_in**0.5)
    if factors.log_decay is not None:
        factors.reset_decay()
    return factors


def _low_rank_config(config: ITNetConfig, rank: int, integration_mode: str, factor_form: str | None) -> ITNetConfig:
    if integration_mode not in ("low_rank", "auto"):
        raise ValueError(f"`integration_mode` ({integration_mode!r}) must be 'low_rank' or 'auto'")
    config = copy.deepcopy(config)
    config.rank, config.factor_form = rank, factor_form or config.factor_form
    config.validate_architecture()
    return config


def _batches(model: nn.Module, data) -> list[dict[str, Tensor]]:
    """The calibration data as forward arguments of the base model, on its device."""
    if isinstance(data, Tensor):
        data = [data]
    batches = [data] if isinstance(data, Mapping) else list(data or [])
    if not batches:
        raise ValueError("`calibration_data` is empty: the factors are fitted to what the model does on real inputs")
    batches = [forward_arguments(model, batch, "calibration_data") for batch in batches]
    return [{name: value.to(model.device) for name, value in batch.items()} for batch in batches]


def _split(
    base: nn.Module, batches: list[dict[str, Tensor]], hold_out: float
) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]], int]:
    """All batches without their last samples, these samples, and how many they are."""
    kept, held, num_held = [], [], 0
    for batch in batches:
        size = next((len(batch[name]) for name in base.encoder.required if name in batch), 0)
        count = int(hold_out * size)
        pieces = {}
        for name, value in batch.items():
            is_shared = len(value) != size or value.dim() < (3 if name.endswith("positions") else 2)
            pieces[name] = [value] * 2 if is_shared else value.split([size - count, count])
        kept.append({name: piece[0] for name, piece in pieces.items()})
        held += [{name: piece[1] for name, piece in pieces.items()}] if count else []
        num_held += count
    return kept, held, num_held
