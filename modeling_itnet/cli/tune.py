# SPDX-License-Identifier: Apache-2.0
"""``itnet tune`` runs Phase 1 of Algorithm tiled_full on this machine's GPU."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
from typer import Option, echo

from itnet_kernels import KERNEL_INPUTS, KernelWeights, integral_transform, kernel_input_size

from . import commands

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@commands.command()
def tune(
    dtype: Annotated[str, Option(help="bf16, fp16 or fp32.")] = "bf16",
    head_dim: Annotated[int, Option(help="Size of a head, d_h.")] = 64,
    width: Annotated[int, Option(help="Width of the kernel MLP, w.")] = 128,
    positions: Annotated[int, Option(help="Positions of the inputs that are timed.")] = 512,
    batch: Annotated[int, Option(help="Samples of the inputs that are timed.")] = 8,
    heads: Annotated[int, Option(help="Heads of the inputs that are timed.")] = 6,
    most: Annotated[int | None, Option(help="Tiles of a kernel to time at most; by default all that fit.")] = None,
    output: Annotated[Path | None, Option("--output", "-o", help="Folder to write to; by default the cache.")] = None,
    estimate: Annotated[bool, Option("--estimate", help="Only say how long it would take.")] = False,
) -> None:
    """Calls with other head sizes, widths or dtypes than those that were timed take the defaults.

    With TRITON_INTERPRET=1 the same runs on a CPU, for trying it out: its winners are those of Triton's interpreter.
    """
    if dtype not in DTYPES:
        raise ValueError(f"`--dtype` ({dtype!r}) must be one of {list(DTYPES)}")
    if most is not None and most < 1:
        raise ValueError(f"`--most` ({most}) must be at least 1")
    from itnet_kernels.exact.triton import tuned
    from itnet_kernels.exact.triton.configs import FAMILIES, Problem, is_interpreted
    from itnet_kernels.exact.triton.device import device_major, shared_limit
    from itnet_kernels.exact.triton.sizes import KernelSizes

    is_here = torch.cuda.is_available() or is_interpreted()
    if not (is_here or estimate):
        raise ValueError("`itnet tune` times kernels and needs a GPU: torch.cuda.is_available() is False here")
    device = torch.device("cuda" if torch.cuda.is_available() or not is_here else "cpu")
    operand, major = DTYPES[dtype], device_major(device) if is_here and device.type == "cuda" else 9
    sizes = KernelSizes(head_dim, width).supported()
    problem = Problem(sizes.head_dim, operand.itemsize, major, shared_limit(device))
    kernels = _kernels(sizes.head_dim, operand, device, is_here)
    families = [family for family in FAMILIES if family.name in kernels]
    minutes = tuned.estimated_seconds(families, problem, most) / 60
    count = sum(len(tuned.chosen_candidates(family, problem, most)) for family in families)
    echo(f"{count} candidates, about {minutes:.0f} minutes")
    if estimate:
        return
    forward, step = _runs(device, operand, head_dim, width, positions, batch, heads)

    def seconds(family, settings) -> float:
        kernels[family.name].cache.clear()  # Triton keeps what it chose: the next launch has to ask again
        with tuned.forced(family.name, settings):
            return _seconds(forward if family.name == "forward" else step, device)

    winners = tuned.tune(families, problem, seconds, echo, most)
    for kernel in kernels.values():
        kernel.cache.clear()
    key = tuned.problem_key(operand, *sizes)
    echo(str(tuned.write(tuned.device_name(device), key, winners, output or tuned.tuned_directory())))


def _kernels(head_dim: int, dtype: torch.dtype, device: torch.device, is_here: bool) -> dict:
    """Returns what a training step launches on the device, by its family of tiles; without a GPU, on Hopper."""
    from itnet_kernels.exact.triton.backward import itnet_bwd_kernel
    from itnet_kernels.exact.triton.device import has_fused_backward
    from itnet_kernels.exact.triton.forward import itnet_fwd_kernel
    from itnet_kernels.exact.triton.fused_backward import itnet_fused_bwd_kernel
    from itnet_kernels.exact.triton.position_weights import itnet_position_weights_kernel

    is_fused = has_fused_backward(head_dim, dtype, device) if is_here else head_dim <= 64 and dtype.itemsize == 2
    if not is_fused:
        return {"forward": itnet_fwd_kernel, "backward": itnet_bwd_kernel}
    backward = {"fused_backward": itnet_fused_bwd_kernel, "position_weights": itnet_position_weights_kernel}
    return {"forward": itnet_fwd_kernel} | backward


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Returns the median on a GPU, and the time of one run in the interpreter."""
    if device.type == "cpu":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    from triton.testing import do_bench

    return do_bench(run, warmup=5, rep=20, return_mode="median") / 1e3


def _runs(device, dtype, head_dim, width, positions, batch, heads) -> tuple[Callable[[], None], Callable[[], None]]:
    """Returns a forward, and a forward with backward, of the operator on random inputs, as a model trains it."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_()

    weights = KernelWeights(
        w1=normal(width, kernel_input_size(KERNEL_INPUTS, 64, 2, head_dim)),
        b1=normal(width),
        w2=normal(heads, head_dim**2, width),
        b2=normal(heads, head_dim**2),
        fourier=torch.randn(64, 2, generator=generator).to(device),
    )
    u, where = normal(batch, positions, heads, head_dim), torch.rand(positions, 2, generator=generator).to(device)
    measure = torch.full((batch, positions), 1 / positions, device=device)

    def run() -> torch.Tensor:
        return integral_transform(u, where, weights, measure=measure, backend="triton")

    def step() -> None:
        out = run()
        torch.autograd.grad(out, [u, *weights[:4]], torch.ones_like(out))

    return torch.no_grad()(run), step
