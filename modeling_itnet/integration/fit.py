# SPDX-License-Identifier: Apache-2.0
"""Turns exact into low-rank, or near and far, integration: fits new kernels to the operators of a trained model."""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers.utils import logging

from configuration_itnet import ITNetConfig

from ..heads.signal import ITNetQueryLayer
from ..operator import ITNetOperator, find_operators
from .capture import forward_arguments, module_inputs, module_output
from .choice import integrating
from .fitted import FittedIntegral, Problem, exact_call, minimise, relative_error

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
    if integration_mode == "low_rank":
        for operator in find_operators(model):
            operator.kernel = operator.proposal = None
    model.config.approximate_mode, model.config.integration_mode = "low_rank", integration_mode
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

    ``near_size``, ``near_radius`` and ``rank`` are as in the configuration, whose values they are unless given;
    ``factor_form`` is that of the far field. All else is as in :func:`fit_low_rank`.
    """
    wanted = {"near_size": near_size, "near_radius": near_radius, "rank": rank, "factor_form": factor_form}
    config = _changed(model.config, wanted | {"integration_mode": "near_far"})
    report = _convert(model, calibration_data, config, Settings(**settings))
    for operator in find_operators(model):
        operator.proposal = None
    model.config.integration_mode = "near_far"
    return report


def _changed(config: ITNetConfig, values: Mapping) -> ITNetConfig:
    """Returns a copy of a configuration with other values, where these are not None; an error if they do not fit."""
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

    The model changes only if all goes well: whoever stops the fit finds it as it was.
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
            fitted.append(FittedIntegral(owner.kernel, config, settings.seed + index).to(model.device))
            calls = [exact_call(owner, config, *batch[index]) for batch in inputs]
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
            output_error = minimise(problem, fitted, *learned, bar)
            held_out_error = relative_error(unseen) if held_out else None
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


@torch.no_grad()
def _model_problem(
    model: nn.Module, last: nn.Module, first_operator: ITNetOperator, batches: list[dict[str, Tensor]]
) -> Problem:
    """Returns the outputs that the module ``last`` has when this is called, which the new model is to reproduce."""

    def real(batch: dict[str, Tensor]) -> Tensor:
        """Returns which positions, or queries, are not padding: [B, m, 1], or 1 for all."""
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


def _batches(model: nn.Module, data) -> list[dict[str, Tensor]]:
    """Returns the calibration data as forward arguments of the base model, on its device."""
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
    """Returns all batches without their last samples, these samples, and how many they are."""
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
