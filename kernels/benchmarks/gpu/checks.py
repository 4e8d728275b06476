"""Every kernel in every dtype against its literal sum in float64: output, every gradient, two runs bit by bit."""

import contextlib
import os
from collections.abc import Iterator

import torch
from torch import Tensor

from . import factor_cases, pair_cases
from .cases import Case, Tensors
from .scope import HALF, Scope

#: Relative, of float32. Products of three TF32 parts have an error of 2^-21.
SINGLE_TOLERANCE = 2e-5


def cases(scope: Scope) -> list[Case]:
    return [
        *pair_cases.exact_cases(scope),
        *pair_cases.list_cases(scope),
        *factor_cases.low_rank_cases(scope),
        *pair_cases.step_cases(scope),
        *factor_cases.step_cases(scope),
    ]


def run(scope: Scope) -> Iterator[dict]:
    """Yields a row for each case and dtype. A kernel that raises has failed; the others still run."""
    for case in cases(scope):
        for dtype in scope.dtypes:
            row = {"family": case.family, "case": case.name, "dtype": str(dtype).removeprefix("torch.")}
            is_repeated = scope.is_measured or (case.is_repeated and dtype in HALF)
            try:
                with contextlib.nullcontext() if scope.is_measured else _backward(case.is_fused):
                    row |= _check(case, dtype, is_repeated)
            except Exception as error:  # the compiler and the driver have many ways to say no
                row |= {"passed": False, "error": f"{type(error).__name__}: {error}"[:500]}
            yield row


@contextlib.contextmanager
def _backward(is_fused: bool) -> Iterator[None]:
    """Chooses the backward of exact sums, as docs/kernels.md says."""
    before = os.environ.get("ITNET_FUSED_BACKWARD", "")
    os.environ["ITNET_FUSED_BACKWARD"] = str(int(is_fused))
    try:
        yield
    finally:
        os.environ["ITNET_FUSED_BACKWARD"] = before


def _check(case: Case, dtype: torch.dtype, is_repeated: bool) -> dict:
    given = case.cast(dtype)
    actual = case.evaluate(case.kernel, given)
    expected = case.evaluate(case.literal, {name: t.double() for name, t in given.items()})
    plain = case.evaluate(case.literal, given) if dtype in HALF else None
    # Error over what is allowed, by name.
    shares = {name: _error(actual[name], value) / _allowed(case, name, given, expected, plain, dtype)
              for name, value in expected.items()}  # fmt: skip
    worst = max(shares, key=lambda name: shares[name] if shares[name] == shares[name] else float("inf"))
    row = {
        "worst": worst,
        "relative_error": _error(actual[worst], expected[worst]) / max(float(expected[worst].norm()), 1e-30),
        "share_of_allowed": shares[worst],
        "compared": len(shares),
    }
    if is_repeated:
        again = case.evaluate(case.kernel, given)
        row["repeats"] = all(torch.equal(actual[name], again[name]) for name in actual)
    return row | {"passed": shares[worst] <= 1 and row.get("repeats", True)}


def _error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm())


def _allowed(case: Case, name: str, given: Tensors, expected: Tensors, plain: Tensors | None, dtype) -> float:
    """Returns the error that a result may have, in the 2-norm.

    float32: a fixed share of its size. Half precision: twice the error of the same mathematics in plain PyTorch in
    that dtype, and two roundings of it. What should vanish is measured by the output.
    """
    size = max(float(expected[name].norm()), 1e-3 * float(expected["out"].norm()))
    if name == "measure" and case.is_causal:
        size += _visible_mass_part(given["measure"].double(), expected["out"])
    if plain is None:
        return SINGLE_TOLERANCE * size
    return 2 * _error(plain[name], expected[name]) + 2 * torch.finfo(dtype).eps * size


def _visible_mass_part(measure: Tensor, out: Tensor) -> float:
    """Returns the size of what the normalisation of a causal sum takes away from the gradient of the measure.

    Both parts of it are rounded by themselves, before one is subtracted from the other.
    """
    mass = measure.cumsum(1)
    per_query = ((Case.upstream(out) * out).sum((2, 3)) / mass.where(mass > 0, 1)).where(mass > 0, 0)
    return float(per_query.flip(1).cumsum(1).norm())
