# SPDX-License-Identifier: Apache-2.0
"""From exact to low-rank, and to near and far integration: fits new kernels to the operators of a trained model."""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers.utils import logging

from configuration_itnet import ITNetConfig
from itnet_kernels import Coordinates, Factor, low_rank_matrix_transform, low_rank_transform

from ..domain import Domain
from ..heads.signal import ITNetQueryLayer
from ..operator import ITNetKernel, ITNetOperator, find_operators, near_integral
from .capture import forward_arguments, module_inputs, module_output
from .choice import integrating
from .factors import ITNetFactors
from .near import find_near_keys

# Ridge of the least-squares step, relative to the mean of the Gram matrix's diagonal.
_RIDGE = 1e-7

CalibrationData = Mapping[str, Tensor] | Iterable[Mapping[str, Tensor]]


@dataclass(frozen=True)
class FitReport:
    """How close the new operators come to the exact ones, on the data of the fit and on data it did not see."""

    rank: int
    layer_errors: list[float]  # |integral - exact| / |exact| of every layer, fitted alone, at the exact features
    output_error: float  # the same of what the model's head reads, with all layers converted
    held_out_error: float | None = None  # the same on samples that were held out of the fit; None if none were
    num_held_out: int = 0  # how many samples these are
    query_error: float | None = None  # as ``layer_errors``, of the query layer of a signal model, if that was fitted

    def __str__(self) -> str:
        rows = [f"  layer {index}: {error:.4f}" for index, error in enumerate(self.layer_errors)]
        rows += [] if self.query_error is None else [f"  query layer: {self.query_error:.4f}"]
        lines = [f"relative errors at rank {self.rank}", *rows, f"  output: {self.output_error:.4f}"]
        if self.held_out_error is None:
            return "\n".join([*lines, "  (all on the data of the fit: nothing was held out)"])
        return "\n".join([*lines, f"  output on {self.num_held_out} held-out samples: {self.held_out_error:.4f}"])


class Settings(NamedTuple):
    """How both fits proceed.

    ``steps`` are Adam steps per layer, each on one batch; 0 leaves the hidden units random. ``learning_rate`` is that
    of Adam at its start; it falls to 0 along a cosine. ``distillation_steps`` and ``distillation_learning_rate`` are
    the same for all layers together. ``hold_out`` is the share of each batch, rounded down to samples, that the fit
    does not see: an error on other data than those it was fitted to is what the model will have. Batches of fewer than
    8 lose nothing at the default. ``seed`` is that of the initial hidden units.
    """

    steps: int = 300
    learning_rate: float = 1e-2
    distillation_steps: int = 300
    distillation_learning_rate: float = 2e-3
    hold_out: float = 0.125
    seed: int = 0


def fit_low_rank(
    model: nn.Module,
    rank: int,
    calibration_data: CalibrationData,
    *,
    integration_mode: Literal["low_rank", "auto"] = "low_rank",
    factor_form: Literal["vector", "matrix"] | None = None,
    **settings,
) -> FitReport:
    r"""Gives every layer factors of rank ``rank`` that reproduce its exact integral on calibration data.

    Layer by layer, at the features that the exact model sees there, the relative squared error of the integral is
    minimised over all parameters of the factors by Adam; before and after, the output layer of Phi (in the matrix form
    the matrices M) and the constant part of the kernel, in which the integral is linear, are solved for by least
    squares. Then the factors of all layers are trained together to give the exact model's last hidden state: what one
    layer gets wrong, another can mend. Weights outside the kernels do not change. The features of all calibration data
    are in memory at once.

    Args:
        model: a model with exact kernels; it is changed in place.
        rank: rank of the kernel per head.
        calibration_data: one batch or more, each the keyword arguments of a forward; labels are ignored.
        integration_mode: what the model is set to. ``"low_rank"`` drops the exact kernels; ``"auto"`` keeps them for
            up to ``exact_max_positions`` positions and uses the factors above.
        factor_form: the low-rank kernel, as in the configuration, whose form it is unless given.
        settings: the fields of :class:`Settings`.

    Returns:
        The relative errors, per layer and of the whole model.
    """
    if integration_mode not in ("low_rank", "auto"):
        raise ValueError(f"`integration_mode` ({integration_mode!r}) must be 'low_rank' or 'auto'")
    wanted = {"rank": rank, "factor_form": factor_form, "integration_mode": "low_rank"}
    report = _convert(model, calibration_data, _changed(model.config, wanted), Settings(**settings))
    for operator in find_operators(model):
        if integration_mode == "low_rank":
            operator.kernel = operator.proposal = None
    model.config.approximate_mode = "low_rank"
    model.config.integration_mode = integration_mode
    return report


def fit_near_far(
    model: nn.Module,
    calibration_data: CalibrationData,
    *,
    near_size: int | None = None,
    near_radius: float | None = None,
    rank: int | None = None,
    factor_form: Literal["vector", "matrix"] | None = "matrix",
    **settings,
) -> FitReport:
    r"""Gives every layer a near kernel and a far field that together reproduce its exact integral.

    The near field weighs the keys of a neighbourhood by scale_i omega_j, the exact integral by omega_j alone, and what
    is smooth in the exact kernel the far field has already. So the near kernel starts as T kappa + B, with the exact
    kernel's kappa = W2 GELU(.) and matrices T and B per head, which are solved for together with what the far field is
    linear in. (Exact kernels with one W2 for all heads get one T and B for all.) The hidden units of the far field are
    fitted by Adam, layer by layer, as :func:`fit_low_rank` does it; then near kernels and far fields of all layers are
    trained together. The query layer of :class:`ITNetForSignalRegression` is a layer as all others, and what is
    reproduced there are the features that it gives its regressor.

    There is no conversion to ``"auto"``: near and exact integration would share a kernel that has to differ.

    Args:
        model: a model with exact kernels; it is changed in place.
        calibration_data: one batch or more, each the keyword arguments of a forward; labels are ignored.
        near_size, near_radius, rank: as in the configuration, whose values they are unless given.
        factor_form: the low-rank kernel of the far field.
        settings: the fields of :class:`Settings`.

    Returns:
        The relative errors, per layer and of the whole model.
    """
    wanted = {"near_size": near_size, "near_radius": near_radius, "rank": rank, "factor_form": factor_form}
    config = _changed(model.config, wanted | {"integration_mode": "near_far"})
    report = _convert(model, calibration_data, config, Settings(**settings))
    for operator in find_operators(model):
        operator.proposal = None
    model.config.integration_mode = "near_far"
    return report


def _changed(config: ITNetConfig, values: Mapping) -> ITNetConfig:
    """A copy of a configuration with other values, where these are not None; an error if they do not fit."""
    config = copy.deepcopy(config)
    for name, value in values.items():
        if value is not None:
            setattr(config, name, value)
    config.validate_architecture()
    return config


def _convert(
    model: nn.Module, calibration_data: CalibrationData, config: ITNetConfig, settings: Settings
) -> FitReport:
    """Fits and installs the kernels of ``config.integration_mode``, and takes over the values that they need.

    Only if all goes well: whoever stops the fit finds the model as it was.
    """
    if not 0 <= settings.hold_out < 1:
        raise ValueError(f"`hold_out` ({settings.hold_out}) must be in [0, 1)")
    operators, mode = find_operators(model), config.integration_mode
    if any(operator.kernel is None for operator in operators):
        raise ValueError("the model has no exact kernels to start from: it is a low-rank model already")
    if model.config.integration_mode == "near_far":
        raise ValueError("the model has no exact kernels to start from: it has near kernels, of 'near_far'")
    is_near = mode == "near_far"
    readers = [part for part in model.modules() if isinstance(part, ITNetQueryLayer)] if is_near else []
    owners, whole_model = [*operators, *readers], model if readers else model.base_model
    last = readers[-1] if readers else model.base_model.layernorm

    batches, held_out, num_held_out = _split(model.base_model, _batches(model, calibration_data), settings.hold_out)
    total = len(owners) * settings.steps + settings.distillation_steps
    bar = logging.tqdm(total=total, desc=f"fitting rank {config.rank}")
    with integrating("exact"):
        inputs = [module_inputs(whole_model, owners, batch) for batch in batches]  # [batch][owner]
        problem, unseen = (_model_problem(whole_model, last, operators[0], part) for part in (batches, held_out))
        fitted, errors = [], []
        for index, owner in enumerate(owners):
            fitted.append(_NewIntegral(owner.kernel, config, settings.seed + index).to(model.device))
            calls = [_call(owner, config, *batch[index]) for batch in inputs]
            errors.append(fitted[-1].fit(calls, settings.steps, settings.learning_rate, bar))
    names = ("rank", "factor_form", "near_size", "near_radius")
    before = [(owner.kernel, owner.factors) for owner in owners], [getattr(model.config, name) for name in names]
    try:
        for name in names:
            setattr(model.config, name, getattr(config, name))
        for owner, new in zip(owners, fitted, strict=True):
            new.install(owner)
        with integrating(mode):  # also for "auto": the data may be short
            learned = settings.distillation_steps, settings.distillation_learning_rate
            output_error = _fit(problem, fitted, *learned, bar)
            held_out_error = _relative_error(unseen) if held_out else None
    except BaseException:
        for owner, (kernel, factors) in zip(owners, before[0], strict=True):
            owner.kernel, owner.factors = kernel, factors
        for name, value in zip(names, before[1], strict=True):
            setattr(model.config, name, value)
        raise
    bar.close()
    for owner, (kernel, _) in zip(owners, before[0], strict=True):
        owner.factors.config = model.config
        for parameter, old in zip(owner.kernel.parameters(), kernel.parameters(), strict=True):
            parameter.requires_grad_(old.requires_grad)
    errors, query_error = errors[: len(operators)], errors[-1] if readers else None
    return FitReport(config.rank, errors, output_error, held_out_error, num_held_out, query_error)


class _Call(NamedTuple):
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
def _call(
    owner: ITNetOperator | ITNetQueryLayer, config: ITNetConfig, features: Tensor, domain: Domain, *more: Tensor
) -> _Call:
    """What an operator or a query layer was called with, and its exact integral."""
    heads = features.float().unflatten(-1, (config.num_attention_heads, -1))  # [B, n, H, d_h]
    if isinstance(owner, ITNetOperator):
        wanted = owner.integral(features, domain.replaced(neighbors=None)).float()  # whatever the edges
        real = (domain.measure > 0)[..., None, None]
        return _Call(heads, domain, None, None, real, wanted.view_as(heads) * real)
    places = owner.places(domain, *more)
    # The queries as they are, and as they will be in the converted model.
    exact, local = (owner.query_norm(owner.interpolated(features, domain, places, is_local=x)) for x in (False, True))
    wanted = owner.integral(features, domain, exact, places).float()
    queries = local.float().unflatten(-1, heads.shape[2:])
    return _Call(heads, domain, queries, places, torch.ones_like(heads[:, :1, :1, :1]), wanted.view_as(queries))


class _NewIntegral(nn.Module):
    """What takes the place of an exact integral: factors, and for near and far fields a near kernel T kappa + B."""

    def __init__(self, kernel: ITNetKernel, config: ITNetConfig, seed: int):
        super().__init__()
        self.config = config
        self.factors = _random_factors(config, seed)
        self.kernel = copy.deepcopy(kernel).float() if config.integration_mode == "near_far" else None
        size = 0 if self.kernel is None else 2 * config.head_dim
        self.register_buffer("mixing", torch.zeros(config.num_attention_heads, size, config.head_dim))  # [T^T; B^T]
        self.exact_weight = kernel.w2.detach().float()

    def install(self, owner: ITNetOperator | ITNetQueryLayer) -> None:
        """Makes these the parameters of an operator or a query layer."""
        dtype, training = owner.output.weight.dtype, owner.training
        owner.factors = self.factors.to(dtype).train(training)
        if self.kernel is not None:
            owner.kernel = self.kernel.to(dtype).train(training).requires_grad_(True)

    def fit(self, calls: list[_Call], steps: int, learning_rate: float, bar) -> float:
        """Fits to the wanted integrals by least squares, Adam, least squares; the relative error."""
        terms = [self._near_terms(call) for call in calls]
        if self.kernel is not None:
            self.kernel.requires_grad_(False)  # its hidden units stay those of the exact kernel

        def outcome(call: _Call, near: Tensor) -> tuple[Tensor, Tensor]:
            far = self.factors(call.heads, call.domain, **call.at)[0]
            return (far + torch.einsum("bnhf,hfa->bnha", near, self.mixing)) * call.real, call.wanted

        problem = [lambda call=call, near=near: outcome(call, near) for call, near in zip(calls, terms, strict=True)]
        self._solve(calls, terms)
        return _fit(problem, [self], steps, learning_rate, bar, lambda: self._solve(calls, terms))

    @torch.no_grad()
    def _near_terms(self, call: _Call) -> Tensor:
        """What the near field is linear in: the near integrals of the exact kernel without b2, and of the identity.

        [B, m, H, 2 d_h], or [B, m, H, 0] without a near field.
        """
        heads, domain, config = call.heads, call.domain, self.config
        if self.kernel is None:
            return call.wanted[..., :0]
        near = domain.near(config) if call.queries is None else find_near_keys(config, call.places, domain)
        weights = self.kernel(domain.frequencies)._replace(w2=self.exact_weight)
        identity = torch.eye(heads.shape[-1], device=heads.device).flatten().expand_as(weights.b2)
        parts = (
            weights._replace(b2=torch.zeros_like(weights.b2)),
            weights._replace(w2=torch.zeros_like(weights.w2), b2=identity),
        )
        integrals = [near_integral(heads, domain, part, near, config, call.queries, call.places) for part in parts]
        return torch.cat(integrals, dim=-1)

    @torch.no_grad()
    def _solve(self, calls: list[_Call], terms: list[Tensor]) -> None:
        """Solves for all that the integral is linear in, out_i = W^T [regressors_i; ubar; near terms_i]: Phi's output
        layer or the matrices, the constant, T and B."""
        gram = right = 0
        for call, near in zip(calls, terms, strict=True):
            regressors = (torch.cat([_regressors(self.factors, call), near], -1) * call.real).double()  # [B, m, H, f]
            gram = gram + torch.einsum("bnhf,bnhg->hfg", regressors, regressors)
            right = right + torch.einsum("bnhf,bnha->hfa", regressors, call.wanted.double())
        size, near_size = right.shape[2], self.mixing.shape[1]
        sizes = [gram.shape[1] - near_size, near_size // 2, near_size // 2]
        is_shared = len(self.exact_weight) < len(gram)
        solution = _least_squares(gram, right, sizes, near_size if is_shared else 0)  # [H, f, a]
        far, near = solution.split([sizes[0], near_size], dim=1)
        _set_factors(self.factors, *far.tensor_split([-size], dim=1))
        if self.kernel is not None:
            self.mixing.copy_(near)
            count, width = self.exact_weight.shape[0], self.exact_weight.shape[2]
            mixed, constant = self.mixing[:count].split(size, dim=1)  # [H or 1, b, a], [H or 1, c, a]
            weight = torch.einsum("hba,hbck->hack", mixed, self.exact_weight.view(count, size, size, width))
            self.kernel.w2.copy_(weight.flatten(1, 2))
            self.kernel.b2.copy_(constant.mT.flatten(1))


def _least_squares(gram: Tensor, right: Tensor, sizes: list[int], num_shared: int) -> Tensor:
    """The solution [H, f, a] of gram [H, f, f] solution = right [H, f, a], a little damped.

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
    """Phi's output layer or the matrices, and the constant, from rows of a solution [H, ..., a]."""
    factors.bias.copy_(constant.mT)
    if factors.is_matrix:
        factors.matrices.copy_(weight.unflatten(1, factors.matrices.shape[1:3]).mT)  # [H, r, c, a] -> [H, r, a, c]
        return
    rank, width = factors.phi.w2.shape[1], factors.phi.w2.shape[3]
    weight, bias = weight.split([rank * width, rank], dim=1)
    factors.phi.w2.copy_(weight.unflatten(1, (rank, width)).transpose(2, 3))
    factors.phi.b2.copy_(bias)


def _regressors(factors: ITNetFactors, call: _Call) -> Tensor:
    """[Z[r] h_i[k]; Z[r]; ubar[c]], or in the matrix form [f_i[r] S[r, c]; ubar[c]], at all queries: [B, m, H, ...].

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


# What is to be fitted: for every batch a function that gives (actual, wanted), both 0 at padding.
Problem = list[Callable[[], tuple[Tensor, Tensor]]]


@torch.no_grad()
def _model_problem(
    model: nn.Module, last: nn.Module, first_operator: ITNetOperator, batches: list[dict[str, Tensor]]
) -> Problem:
    """The outputs that the module ``last`` has when this is called, which the converted model is to reproduce."""

    def real(batch: dict[str, Tensor]) -> Tensor:
        """Which positions, or queries, are not padding: [B, m, 1], or 1 for all."""
        if isinstance(last, ITNetQueryLayer):
            mask = batch.get("query_mask")
            return torch.ones((), device=model.device) if mask is None else (mask > 0).unsqueeze(-1)
        return (module_inputs(model, [first_operator], batch)[0][1].measure > 0).unsqueeze(-1)

    masks = [real(batch) for batch in batches]
    wanted = [module_output(model, last, batch) * mask for batch, mask in zip(batches, masks, strict=True)]
    return [
        lambda batch=batch, mask=mask, target=target: (module_output(model, last, batch) * mask, target)
        for batch, mask, target in zip(batches, masks, wanted, strict=True)
    ]


@torch.enable_grad()
def _fit(
    problem: Problem, fitted: list[nn.Module], steps: int, learning_rate: float, bar, finish=lambda: None
) -> float:
    """Minimises the relative squared error over the parameters by Adam, and touches no other gradient.

    Keeps the better of start and end, after ``finish``, and returns its relative error.
    """
    start, start_error = copy.deepcopy([part.state_dict() for part in fitted]), _relative_error(problem)
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
    error = _relative_error(problem)
    if error > start_error:
        for part, state in zip(fitted, start, strict=True):
            part.load_state_dict(state)
    return min(error, start_error)


@torch.no_grad()
def _relative_error(problem: Problem) -> float:
    pairs = [outcome() for outcome in problem]
    difference = sum((actual - wanted).float().square().sum() for actual, wanted in pairs)
    return float((difference / sum(wanted.float().square().sum() for _, wanted in pairs).clamp(min=1e-30)).sqrt())


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
