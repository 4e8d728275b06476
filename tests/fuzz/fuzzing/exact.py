"""Families of ``integral_transform``: every argument, some pairs, positions of every kind, forward derivatives,
Triton."""

import os

import torch
from torch import Tensor

from itnet_kernels import Blocks, ball_blocks, integral_transform, listed_blocks, window_blocks
from itnet_kernels.weights import kernel_group_sizes

from . import oracle
from .case import DOUBLE, Draw, Outcome, allowed
from .positions import draw_positions
from .problems import TRAINED, compute_eps, draw_problem, kernel_weights, precise, tensors, with_gradients


def call(problem: dict, backend: str) -> Tensor:
    return integral_transform(
        problem["u"],
        problem["positions"],
        kernel_weights(problem),
        measure=problem["measure"],
        is_causal=problem["is_causal"],
        queries=problem.get("queries"),
        query_positions=problem.get("query_positions"),
        blocks=problem.get("blocks"),
        backend=backend,
    )


def check(
    outcome: Outcome,
    problem: dict,
    backends,
    upstream: Tensor | None,
    eps: float | None = None,
    pairs: Tensor | None = None,
) -> None:
    """Output and gradients of each backend against the oracle on the same numbers, and on some pairs only."""
    inputs, is_causal = problem["inputs"], problem["is_causal"]

    def expected(r):
        def literal(p):
            return oracle.transform(p, inputs, is_causal, r, pairs)

        return with_gradients(literal, precise(problem), upstream)

    wanted = allowed(expected, eps or compute_eps(problem["u"].dtype))
    for backend in backends:
        for name, value in with_gradients(lambda p, b=backend: call(p, b), problem, upstream).items():
            # u is cast for queries and for keys, and every cast rounds its own gradient.
            outcome.compare_stored(f"{backend} {name}", value, wanted[name], 1 if name == "out" else 4)


def draw_upstream(draw: Draw, problem: dict, probability: float) -> Tensor | None:
    queries = problem["u"] if problem.get("queries") is None else problem["queries"]
    return draw.normal(*queries.shape).to(queries.dtype) if draw.chance("gradients", probability) else None


def operator(draw: Draw, outcome: Outcome) -> None:
    problem = draw_problem(draw)
    check(outcome, problem, ("reference", "tiled"), draw_upstream(draw, problem, 0.6))


def near(draw: Draw, outcome: Outcome) -> None:
    """Sums over some pairs: windows, balls, lists, and random pairs in random blocks."""
    problem = draw_problem(draw, most=draw.choice("most", (9, 40))) | {"is_causal": False}
    batch, num_keys = problem["u"].shape[:2]
    x_k = problem["positions"]
    x_q = problem.get("query_positions", x_k)
    num_queries = x_q.shape[-2]
    kind = draw.choice("kind", ("ball", "list", "random", "window" if num_queries == num_keys else "ball"))
    if kind == "window":
        reach, is_causal = draw.integer("reach", 0, 6), draw.chance("past", 0.5)
        problem["blocks"] = window_blocks((num_keys,), reach, is_causal=is_causal)
        steps = torch.arange(num_keys)[:, None] - torch.arange(num_keys)
        pairs = ((steps <= reach) & (steps >= (0 if is_causal else -reach))).unsqueeze(0)
    elif kind == "ball":
        radius = draw.power("radius", -1.5, 0.3)
        x_q, x_k = (x if x.dim() == 3 else x.unsqueeze(0) for x in (x_q, x_k))
        problem["blocks"] = ball_blocks(x_q, x_k, radius)
        squares = (x_q.double().unsqueeze(2) - x_k.double().unsqueeze(1)).square()
        pairs = sum(squares.unbind(-1)) <= radius**2
    elif kind == "list":
        pairs = draw.uniform(batch, num_queries, num_keys) < 0.4
        order = draw.permutation(num_keys)
        problem["blocks"] = [listed_blocks(torch.where(pairs[..., order], order, -1))]
    else:  # every pair in one of two lists of blocks of two queries and all keys in any order
        pairs = draw.uniform(draw.choice("sets", (1, batch)), num_queries, num_keys) < 0.5
        first = draw.uniform(*pairs.shape) < 0.5
        problem["blocks"] = [_paired(draw, pairs & first), _paired(draw, pairs & ~first)]
    check(outcome, problem, ("reference", "tiled"), draw_upstream(draw, problem, 0.6), pairs=pairs.double())


def _paired(draw: Draw, pairs: Tensor) -> Blocks:
    """A table [sets, n_q, n_k] as blocks of two queries; the last of an odd number stands there twice."""
    queries, keys = draw.permutation(pairs.shape[1]), draw.permutation(pairs.shape[2])
    table = pairs[:, queries][:, :, keys]
    if len(queries) % 2:
        queries, table = torch.cat([queries, queries[-1:]]), torch.cat([table, torch.zeros_like(table[:, -1:])], 1)
    queries = queries.view(1, -1, 2)
    return Blocks(queries, keys.expand(1, queries.shape[1], -1), table.unflatten(1, (-1, 2)))


def positions(draw: Draw, outcome: Outcome) -> None:
    """Small problems on many points, which may or may not lie on a lattice; ``tiled`` looks for one."""
    scale = draw.power("scale", -6, 6)
    most = draw.choice("most", (12, 40, 70))
    problem = draw_problem(draw, most, lambda *shape: scale * draw_positions(*shape), sizes=(1,), widths=(2,))
    sets = [name for name in ("positions", "query_positions") if name in problem]
    if problem["positions"].dtype == torch.float16:  # its range ends at 65504
        problem |= {name: problem[name].clamp(-6e4, 6e4) for name in sets}
    # Frequencies that resolve the points, and weights that keep raw coordinates and distances of order 1.
    every = torch.cat([problem[name].double().flatten(0, -2) for name in sets])
    size = float(every.abs().max()) or 1.0
    extent = float((every - every[0]).abs().max()) or size
    problem["fourier"] = problem["fourier"].double() * (draw.power("turns", -1, 1.5) / extent)
    units = {"x": size, "y": size, "x-y": extent, "distance": extent}
    if len(problem["fourier"]):
        units = {"distance": extent}
    if problem["w1"].dtype.itemsize == 2:  # such weights, and their gradients, may leave the range of float16
        problem |= {name: problem[name].float() for name in TRAINED if name in problem}
    problem["w1"] = scaled_columns(problem, units)
    check(outcome, problem, ("tiled",), draw_upstream(draw, problem, 0.3))


def scaled_columns(problem: dict, units: dict[str, float]) -> Tensor:
    """W1 with the columns of some input groups in units of their own."""
    sizes = kernel_group_sizes(*problem["fourier"].shape, problem["u"].shape[-1])
    columns = [torch.full((sizes[name],), 1 / units.get(name, 1.0)) for name in sizes if name in problem["inputs"]]
    return problem["w1"] * (torch.cat(columns) if columns else torch.ones(0)).to(problem["w1"].dtype)


def derivatives(draw: Draw, outcome: Outcome) -> None:
    """Forward-mode derivatives in a random direction of some or all arguments, and derivatives of those."""
    dtype = torch.float64 if draw.chance("double", 0.6) else torch.float32
    # All second derivatives of a single point by its displacement from itself cancel: nothing to compare with.
    problem = draw_problem(draw, most=6, dtype=dtype, least=2)
    names = [name for name in tensors(problem) if draw.random.random() < 0.5] or ["u"]
    draw.choices["along"] = names
    direction = {name: draw.normal(*problem[name].shape).to(problem[name].dtype) for name in names}
    backend = draw.choice("backend", ("tiled", "tiled", "reference"))
    inputs, is_causal = problem["inputs"], problem["is_causal"]

    kind = draw.choice("kind", ("tangent", "tangent", "second tangent", "gradient of tangent"))

    def along(function, p: dict) -> dict[str, Tensor]:
        chosen = {name: p[name] for name in names}
        step = {name: direction[name].to(p[name]) for name in names}

        def tangent(point):
            return torch.func.jvp(lambda inner: function(p | inner), (point,), (step,))

        out, first = tangent(chosen)
        result = {"out": out, "tangent": first}
        if kind == "second tangent":
            result[kind] = torch.func.jvp(lambda point: tangent(point)[1], (chosen,), (step,))[1]
        elif kind == "gradient of tangent":
            for name, value in torch.func.grad(lambda point: tangent(point)[1].sum())(chosen).items():
                result[f"gradient of tangent in {name}"] = value
        return result

    wanted = allowed(
        lambda r: along(lambda p: oracle.transform(p, inputs, is_causal, r), precise(problem)),
        compute_eps(problem["u"].dtype),
    )
    for name, value in along(lambda p: call(p, backend), problem).items():
        outcome.compare_stored(f"{backend} {name}", value, wanted[name], 2)


def triton(draw: Draw, outcome: Outcome) -> None:
    """The GPU kernels in Triton's interpreter; half precision multiplies half-precision operands."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("TRITON_INTERPRET=1 must be set before the start of Python")
    dtype = draw.choice("dtype", (torch.float32, torch.float32, torch.float16))
    problem = draw_problem(draw, most=20, dtype=dtype, sizes=(16,), widths=(32,))
    problem = {name: value for name, value in problem.items() if name not in ("w_mid", "b_mid")}
    for name in ("w1", "w2", "b2"):  # wide layers: keep the sums as large as those of narrow ones
        problem[name] = problem[name] / 4
    check(outcome, problem, ("triton",), draw_upstream(draw, problem, 0.5), max(torch.finfo(dtype).eps, DOUBLE))
