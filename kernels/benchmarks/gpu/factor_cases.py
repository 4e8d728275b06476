"""Checks of low-rank kernels in both forms: complete, causal, with decay and a state, and token by token."""

import torch
from torch import Tensor

from itnet_kernels import Factor, LowRankState, low_rank_matrix_transform, low_rank_transform

from . import literal
from .cases import Case, Draw, Tensors
from .scope import Scope

FORMS = ("vector", "matrix")
#: What lies along the positions.
_ALONG = ("u", "measure", "positions", "f", "g", "phi.hidden", "psi.hidden")


def _problem(scope: Scope, form: str, n: int, has_decay: bool, padding: int = 0) -> Tensors:
    draw, samples, heads, dim = Draw(scope.device), scope.sharing, scope.check_heads, scope.head_dim
    rank, hidden = scope.rank, scope.factor_hidden
    tensors = {
        "u": draw.normal(samples, n, heads, dim),
        "measure": 2 * draw.uniform(samples, n) / n,
        "bias": draw.normal(heads, dim, dim) / dim**0.5,
    }
    if form == "matrix":
        tensors |= {name: draw.normal(samples, n, heads, rank) for name in ("f", "g")}
        tensors["matrices"] = draw.normal(heads, rank, dim, dim) / dim**0.5
    else:
        for name in ("phi", "psi"):
            tensors[f"{name}.hidden"] = draw.normal(samples, n, heads, hidden)
            tensors[f"{name}.weight"] = draw.normal(heads, rank, dim, hidden) / (hidden * dim) ** 0.5
            tensors[f"{name}.bias"] = draw.normal(heads, rank, dim) / dim**0.5
    if has_decay:
        tensors["decay"] = draw.uniform(heads, rank)
        tensors["positions"] = draw.uniform(samples, n, 1).cumsum(1) * (8 / n)
    if padding:
        tensors["measure"][-1, -padding:] = 0
    return tensors


def _run(t: Tensors, is_causal: bool, **settings):
    given = {name: tensor for name, tensor in t.items() if "." not in name}
    given |= {"is_causal": is_causal, "backend": "triton"} | settings
    if "f" in t:
        return low_rank_matrix_transform(**given)
    factors = {name: Factor(*(t[f"{name}.{part}"] for part in Factor._fields)) for name in ("phi", "psi")}
    return low_rank_transform(**given, **factors)


def _literal(t: Tensors, is_causal: bool) -> Tensor:
    omega = literal.causal(t["measure"]) if is_causal else t["measure"].unsqueeze(1).expand(-1, t["u"].shape[1], -1)
    decay = literal.decays(t["decay"], t["positions"]) if "decay" in t else None
    if "f" in t:
        return literal.matrix_sum(t["f"], t["g"], t["matrices"], t["u"], t["bias"], omega, decay)
    phi, psi = (
        torch.einsum("hrak,bihk->bihra", t[f"{name}.weight"], t[f"{name}.hidden"]) + t[f"{name}.bias"]
        for name in ("phi", "psi")
    )
    return literal.factor_sum(phi, torch.einsum("bjhrc,bjhc->bjhr", psi, t["u"]), t["u"], t["bias"], omega, decay)


def _part(t: Tensors, along: slice) -> Tensors:
    return {name: tensor[:, along] if name in _ALONG else tensor for name, tensor in t.items()}


def _in_two_parts(t: Tensors) -> Tensor:
    """Lets the second half of the positions continue from the state of the first."""
    middle = t["u"].shape[1] // 2
    first, state = _run(_part(t, slice(0, middle)), True, return_state=True)
    return torch.cat([first, _run(_part(t, slice(middle, None)), True, state=state)], dim=1)


def low_rank_cases(scope: Scope) -> list[Case]:
    cases = []
    for form in FORMS:
        complete, causal, decaying = (
            _problem(scope, form, n, has_decay, padding)
            for n, has_decay, padding in ((scope.long, False, 1), (scope.long, False, 0), (scope.short, True, 0))
        )
        cases += [
            Case("low rank", f"{form}, complete, padded", complete, lambda t: _run(t, False),
                 lambda t: _literal(t, False), is_repeated=True),
            Case("low rank", f"{form}, causal", causal, lambda t: _run(t, True), lambda t: _literal(t, True),
                 is_causal=True),
            Case("low rank", f"{form}, causal, decay, state", decaying, _in_two_parts, lambda t: _literal(t, True),
                 is_causal=True),
        ]  # fmt: skip
    return cases


def step_cases(scope: Scope) -> list[Case]:
    """Takes three tokens, each from the state that the one before it left."""

    def by_token(t: Tensors) -> Tensor:
        count = t["u"].shape[1] - 3
        _, state = _run(_part(t, slice(0, count)), True, return_state=True)
        outs = []
        for k in range(3):
            out, state = _token(_part(t, slice(count + k, count + k + 1)), state)
            outs.append(out)
        return torch.cat(outs, dim=1)

    return [
        Case("one token", f"low rank, {form}", _problem(scope, form, scope.short, has_decay=True), by_token,
             lambda t: _literal(t, True)[:, -3:], has_gradients=False)
        for form in FORMS
    ]  # fmt: skip


def _token(t: Tensors, state: LowRankState) -> tuple[Tensor, LowRankState]:
    return _run(t, True, state=state, return_state=True)
