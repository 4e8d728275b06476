# SPDX-License-Identifier: Apache-2.0
"""``itnet tune``: Phase 1 of Algorithm tiled_full on this machine's GPU."""

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
    output: Annotated[Path | None, Option("--output", "-o", help="Folder to write to; by default the cache.")] = None,
    estimate: Annotated[bool, Option("--estimate", help="Only say how long it would take.")] = False,
) -> None:
    """Calls with other sizes than those that were timed take the defaults."""
    if dtype not in DTYPES:
        raise ValueError(f"`--dtype` ({dtype!r}) must be one of {list(DTYPES)}")
    if not torch.cuda.is_available() and not estimate:
        raise ValueError("`itnet tune` times kernels and needs a GPU: torch.cuda.is_available() is False here")
    from itnet_kernels.exact.triton import tuned
    from itnet_kernels.exact.triton.configs import FORWARD, FUSED_BACKWARD, POSITION_GRADIENT, Problem
    from itnet_kernels.exact.triton.device import device_major, has_fused_backward, shared_limit

    device = torch.device("cuda")
    operand, is_here = DTYPES[dtype], torch.cuda.is_available()
    problem = Problem(head_dim, operand.itemsize, device_major(device) if is_here else 9, shared_limit(device))
    families = [FORWARD]
    if not is_here or has_fused_backward(head_dim, operand, device):
        families += [FUSED_BACKWARD, POSITION_GRADIENT]
    minutes = tuned.estimated_seconds(families, problem) / 60
    echo(f"{sum(len(tuned.candidates(f, problem)) for f in families)} candidates, about {minutes:.0f} minutes")
    if estimate:
        return
    step = _training_step(device, operand, head_dim, width, positions, batch, heads)

    def seconds(family, settings) -> float:
        from triton.testing import do_bench

        _forget_winners()
        with tuned.forced(family.name, settings):
            return do_bench(step, warmup=5, rep=20) / 1e3

    winners = tuned.tune(families, problem, seconds, echo)
    _forget_winners()
    name, key = torch.cuda.get_device_name(device), tuned.problem_key(operand, head_dim, width)
    echo(str(tuned.write(name, key, winners, output or tuned.tuned_directory())))


def _training_step(device, dtype, head_dim, width, positions, batch, heads):
    """A forward and backward of the operator on random inputs, as a function without arguments."""
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

    def step() -> None:
        out = integral_transform(u, where, weights, measure=measure, backend="triton")
        torch.autograd.grad(out, [u, *weights[:4]], torch.ones_like(out))

    return step


def _forget_winners() -> None:
    """Triton keeps what it chose for a kernel: the next launch has to ask again."""
    from itnet_kernels.exact.triton.forward import itnet_fwd_kernel
    from itnet_kernels.exact.triton.fused_backward import itnet_fused_bwd_kernel
    from itnet_kernels.exact.triton.position_gradient import itnet_position_gradient_kernel

    for kernel in (itnet_fwd_kernel, itnet_fused_bwd_kernel, itnet_position_gradient_kernel):
        kernel.cache.clear()
