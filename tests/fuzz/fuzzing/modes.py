"""Families of the approximate modes: low rank with states, and sums over listed keys."""

from itertools import pairwise

import torch
from torch import Tensor

from itnet_kernels import (
    Factor,
    LowRankState,
    integrand_norms,
    low_rank_transform,
    monte_carlo_transform,
    sampled_low_rank_transform,
    sampled_transform,
)

from . import oracle
from .case import Draw, Outcome, allowed
from .problems import (
    compute_eps,
    draw_dtype,
    draw_measure,
    draw_problem,
    kernel_weights,
    precise,
    with_gradients,
)


def compare(outcome: Outcome, problem: dict, call, expected, upstream: Tensor | None, names=None) -> None:
    """``call(problem)`` against ``expected(problem in float64, rounding)``, with gradients of ``names``."""
    wanted = allowed(
        lambda r: with_gradients(lambda p: expected(p, r), precise(problem), upstream, names),
        compute_eps(problem["u"].dtype),
    )
    for name, value in with_gradients(call, problem, upstream, names).items():
        outcome.compare_stored(name, value, wanted[name], 1 if name == "out" else 4)


def low_rank(draw: Draw, outcome: Outcome) -> None:
    """Factors as tensors or as MLPs, all at once or, if causal or with a measure, in pieces."""
    batch, heads, size = (draw.integer(name, 1, 3) for name in ("batch", "heads", "head size"))
    count, rank, width = draw.integer("keys", 1, 12), draw.integer("rank", 1, 3), draw.integer("width", 1, 4)
    is_causal = draw.chance("causal", 0.5)
    queries = draw.integer("queries", 1, count if is_causal else 12) if draw.chance("query domain", 0.3) else count
    dtype = draw_dtype(draw, "dtype")
    problem = {"u": draw.normal(batch, count, heads, size), "measure": draw_measure(draw, batch, count)}
    forms = {}
    for name, points in (("phi", queries), ("psi", count)):
        forms[name] = draw.choice(f"{name} as", ("tensor", "MLP"))
        if forms[name] == "tensor":
            problem[name] = draw.normal(batch, points, heads, rank, size)
        else:
            problem[f"{name} hidden"] = draw.normal(batch, points, heads, width)
            problem[f"{name} weight"] = draw.normal(heads, rank, size, width)
            problem[f"{name} bias"] = draw.normal(heads, rank, size)
    if draw.chance("bias", 0.6):
        problem["bias"] = draw.normal(heads, size, size)
    problem = {name: None if tensor is None else tensor.to(dtype) for name, tensor in problem.items()}
    splits = _splits(draw, count, queries, is_causal, problem["measure"] is not None)

    def factor(p: dict, name: str, part=slice(None)):
        if forms[name] == "tensor":
            return p[name][:, part]
        return Factor(p[f"{name} hidden"][:, part], p[f"{name} weight"], p[f"{name} bias"])

    def multiplied(p: dict, name: str, r) -> Tensor:
        if forms[name] == "tensor":
            return p[name]
        hidden, weight = r(p[f"{name} hidden"]), r(p[f"{name} weight"])
        return r(torch.einsum("bnhk,hrak->bnhra", hidden, weight) + r(p[f"{name} bias"]))

    def call(p: dict) -> Tensor:
        if splits is None:
            return low_rank_transform(
                *(p["u"], factor(p, "phi"), factor(p, "psi")),
                measure=p["measure"],
                is_causal=is_causal,
                bias=p.get("bias"),
            )
        state: LowRankState | None = None
        outs = []
        for start, stop in pairwise(splits):
            part = slice(start, stop)
            # Without causality the queries see all keys only with the last piece.
            query = part if is_causal else slice(None)
            out, state = low_rank_transform(
                *(p["u"][:, part], factor(p, "phi", query), factor(p, "psi", part)),
                measure=None if p["measure"] is None else p["measure"][:, part],
                is_causal=is_causal,
                state=state,
                bias=p.get("bias"),
                return_state=True,
            )
            outs.append(out)
        return torch.cat(outs, 1) if is_causal else outs[-1]

    def expected(p: dict, r) -> Tensor:
        u = p["u"]
        measure = u.new_full((batch, count), 1 / count) if p["measure"] is None else p["measure"]
        omega = oracle.pair_measure(measure, queries, is_causal, r)
        return oracle.low_rank(u, multiplied(p, "phi", r), multiplied(p, "psi", r), p.get("bias"), omega, r)

    upstream = draw.normal(batch, queries, heads, size).to(dtype) if draw.chance("gradients", 0.5) else None
    compare(outcome, problem, call, expected, upstream)


def _splits(draw: Draw, count: int, queries: int, is_causal: bool, has_measure: bool) -> list[int] | None:
    """Where the keys are cut into pieces; None for all at once."""
    if not draw.chance("pieces", 0.5) or (not has_measure and not is_causal) or (is_causal and queries != count):
        return None
    inner = [i for i in range(1, count) if draw.random.random() < 0.4]
    draw.choices["cuts"] = inner
    return [0, *inner, count]


def sampled(draw: Draw, outcome: Outcome) -> None:
    """Monte Carlo estimates, weighted lists of keys and norms of their integrands."""
    problem = draw_problem(draw)
    batch, count, heads, size = problem["u"].shape
    queries = count if problem.get("queries") is None else problem["queries"].shape[1]
    number = draw.integer("samples", 1, 6)
    indices = draw.integers(0, count, batch, queries, number)
    inputs, is_causal, dtype = problem["inputs"], problem["is_causal"], problem["u"].dtype
    what = draw.choice("what", ("monte carlo", "list", "list", "norms", "low rank"))
    domain = {name: problem.get(name) for name in ("queries", "query_positions")}
    upstream = draw.normal(batch, queries, heads, size).to(dtype) if draw.chance("gradients", 0.5) else None
    if what == "norms":
        wanted = allowed(
            lambda r: {"norms": oracle.listed(precise(problem), inputs, indices, r).square().sum((-1, -2)).sqrt()},
            compute_eps(dtype),
        )
        actual = integrand_norms(
            problem["u"], problem["positions"], kernel_weights(problem), indices=indices, **domain
        )
        outcome.compare_stored("norms", actual, wanted["norms"])
        return
    if what == "low rank":
        _sampled_low_rank(draw, outcome, problem["u"], indices, upstream)
        return
    if what == "list":
        problem["coefficients"] = draw.normal(batch, queries, number).to(dtype)
        problem["measure"] = None

        def call(p):
            return sampled_transform(
                *(p["u"], p["positions"], kernel_weights(p)),
                indices=indices,
                coefficients=p["coefficients"],
                queries=p.get("queries"),
                query_positions=p.get("query_positions"),
            )

        def expected(p, r):
            return torch.einsum("bim,bimha->biha", r(p["coefficients"]), oracle.listed(p, inputs, indices, r))

    else:
        # In the dtype of the measure: the estimate divides one by the other.
        probabilities = (draw.uniform(batch, queries, number) + 0.1).to(torch.promote_types(dtype, torch.float32))

        def call(p):
            return monte_carlo_transform(
                *(p["u"], p["positions"], kernel_weights(p)),
                indices=indices,
                probabilities=probabilities,
                measure=p["measure"],
                is_causal=is_causal,
                queries=p.get("queries"),
                query_positions=p.get("query_positions"),
            )

        def expected(p, r):
            measure = p["u"].new_full((batch, count), 1 / count) if p["measure"] is None else p["measure"]
            omega = r(oracle.pair_measure(measure, queries, is_causal, r)).gather(2, indices)
            coefficients = r(omega / (number * probabilities.double()))
            return torch.einsum("bim,bimha->biha", coefficients, oracle.listed(p, inputs, indices, r))

    compare(outcome, problem, call, expected, upstream)


def _sampled_low_rank(draw: Draw, outcome: Outcome, u: Tensor, indices: Tensor, upstream: Tensor | None) -> None:
    batch, count, heads, size = u.shape
    rank, queries = draw.integer("rank", 1, 3), indices.shape[1]
    problem = {
        "u": u,
        "phi": draw.normal(batch, queries, heads, rank, size).to(u.dtype),
        "psi": draw.normal(batch, count, heads, rank, size).to(u.dtype),
        "coefficients": draw.normal(*indices.shape).to(u.dtype),
        "bias": draw.normal(heads, size, size).to(u.dtype),
    }

    def call(p):
        return sampled_low_rank_transform(
            *(p["u"], p["phi"], p["psi"]), indices=indices, coefficients=p["coefficients"], bias=p["bias"]
        )

    def expected(p, r):
        omega = torch.zeros(batch, queries, count, dtype=torch.float64).scatter_add(2, indices, r(p["coefficients"]))
        return oracle.low_rank(p["u"], p["phi"], p["psi"], p["bias"], omega, r)

    compare(outcome, problem, call, expected, upstream)
