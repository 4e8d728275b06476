"""Random arguments of the operator: features, positions, measures and weights."""

import torch
from torch import Tensor

from itnet_kernels import KernelWeights

from .case import Draw
from .oracle import GROUPS

DTYPES = {"f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
TRAINED = ("w1", "b1", "w_mid", "b_mid", "w2", "b2")


def draw_dtype(draw: Draw, name: str, options=("f64", "f32", "f32", "f16", "bf16")) -> torch.dtype:
    return DTYPES[draw.choice(name, options)]


def draw_weights(draw: Draw, heads: int, size: int, dim: int, widths=(1, 3, 6)) -> dict:
    """Kernel weights in float64 by name, with ``inputs``."""
    width = draw.choice("width", widths)
    frequencies = draw.choice("frequencies", (0, 1, 3))
    inputs = draw.choice("all inputs", (GROUPS, None)) or draw.subset("inputs", GROUPS)
    position = 2 * frequencies or dim
    columns = sum({"distance": 1}.get(name, size if name.startswith("u_") else position) for name in inputs)
    outputs = 1 if draw.chance("shared output", 0.3) else heads
    weights = {
        "w1": 0.5 * draw.normal(width, columns),
        "b1": 0.5 * draw.normal(width),
        "w2": 0.5 * draw.normal(outputs, size * size, width),
        "b2": 0.5 * draw.normal(outputs, size * size),
        "fourier": (2 * draw.normal(frequencies, dim)).to(draw_dtype(draw, "fourier dtype", ("f64", "f32"))),
    }
    if draw.chance("3 layers", 0.25):
        weights |= {"w_mid": 0.5 * draw.normal(width, width), "b_mid": 0.5 * draw.normal(width)}
    return weights | {"inputs": inputs}


def draw_measure(draw: Draw, batch: int, count: int) -> Tensor | None:
    """None, random weights, or a padding mask on the left, on the right or anywhere; not always of mass 1."""
    kind = draw.choice("measure", ("none", "weights", "left", "right", "anywhere", "uneven"))
    if kind == "none":
        return None
    measure = draw.uniform(batch, count) + 0.1
    if kind == "uneven":
        measure = 10 ** (4 * draw.uniform(batch, count) - 2)
    if kind in ("left", "right", "anywhere"):
        kept = draw.integers(1, count + 1, batch, 1)
        index = torch.arange(count).expand(batch, count)
        if kind == "anywhere":
            index = torch.stack([draw.permutation(count) for _ in range(batch)])
        mask = index >= count - kept if kind == "left" else index < kept
        measure = mask / kept if draw.chance("uniform on real", 0.5) else measure * mask
    return measure.double()


def _points(draw: Draw, count: int, dim: int) -> Tensor:
    """Points in a unit cube, or a line of a lattice."""
    if draw.chance("lattice", 0.3):
        return (torch.arange(count).unsqueeze(1) + draw.integers(0, 3, dim)) / count
    return draw.uniform(count, dim)


def draw_problem(
    draw: Draw, most: int = 9, points=None, dtype=None, sizes=(1, 2, 3), widths=(1, 3, 6), least: int = 1
) -> dict:
    """Arguments of ``integral_transform`` by name, cast to random dtypes; ``points(count, dim)`` draws points."""
    batch, heads, size = draw.integer("batch", 1, 2), draw.integer("heads", 1, 2), draw.choice("head size", sizes)
    count = draw.integer("keys", least, most)
    dim = draw.integer("dim", 1, 3)
    is_causal = draw.chance("causal", 0.3)
    per_sample = draw.chance("per sample", 0.4)
    queries = draw.integer("queries", 1, count if is_causal else most) if draw.chance("query domain", 0.3) else 0
    domains = [(points or _points)(draw, queries + count, dim) for _ in range(batch if per_sample else 1)]
    domains = torch.stack(domains) if per_sample else domains[0]
    problem = {"u": draw.normal(batch, count, heads, size), "positions": domains[..., queries:, :]}
    if queries:
        problem["queries"] = draw.normal(batch, queries, heads, size)
        problem["query_positions"] = domains[..., :queries, :]
    problem["measure"] = draw_measure(draw, batch, count)
    problem |= draw_weights(draw, heads, size, dim, widths=widths) | {"is_causal": is_causal}
    dtype = dtype or draw_dtype(draw, "dtype")
    position_dtype = draw_dtype(draw, "position dtype", ("f64", "f32", "f32", "f16", "bf16"))
    weight_dtype = torch.float32 if dtype != torch.float64 and draw.chance("float32 weights", 0.3) else dtype
    for name, value in problem.items():
        if isinstance(value, Tensor) and name != "fourier":
            own = position_dtype if "positions" in name else weight_dtype if name in TRAINED else dtype
            problem[name] = value.to(own)
    return problem


def kernel_weights(problem: dict) -> KernelWeights:
    return KernelWeights(
        *(problem[name] for name in ("w1", "b1", "w2", "b2", "fourier", "inputs")),
        w_mid=problem.get("w_mid"),
        b_mid=problem.get("b_mid"),
    )


def tensors(problem: dict) -> dict[str, Tensor]:
    """What a gradient can be taken of."""
    return {name: t for name, t in problem.items() if isinstance(t, Tensor) and name != "fourier"}


def precise(problem: dict) -> dict:
    """The same numbers in float64."""
    return {name: t.double() if isinstance(t, Tensor) else t for name, t in problem.items()}


def compute_eps(dtype: torch.dtype) -> float:
    """Half precision is computed in float32."""
    return torch.finfo(torch.promote_types(dtype, torch.float32)).eps


def with_gradients(function, problem: dict, upstream: Tensor | None, names=None) -> dict[str, Tensor]:
    """``function(problem)`` and its gradients against ``upstream``, which is not called for without gradients."""
    names = list(tensors(problem)) if names is None else names
    leaves = {name: problem[name].detach().clone().requires_grad_() for name in names} if upstream is not None else {}
    out = function(problem | leaves)
    result = {"out": out.detach()}
    if leaves and out.requires_grad:
        grads = torch.autograd.grad(out, list(leaves.values()), upstream.to(out.dtype), allow_unused=True)
        for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
            result[f"grad {name}"] = torch.zeros_like(leaf) if grad is None else grad
    return result
