"""Which of PyTorch's ways to trace and to differentiate is at work, for code that not all of them can pass through."""

import zlib
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint


def operator_namespace(module: str) -> str:
    """Says where a module registers its operators: "itnet", or a namespace of its own in a copy of this package.

    A Hub kernel and a checkpoint's own code are copies under other names, which may be loaded beside the package.
    """
    return "itnet" if module.startswith("itnet_kernels.") else f"itnet_{zlib.crc32(module.encode()):08x}"


def is_transformed() -> bool:
    """Returns whether a transform of torch.func is running or forward-mode differentiation is switched on."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def is_batched(tensor: Tensor) -> bool:
    """Returns whether a vmap runs over the tensor, which then stands for many and has no value to look at."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor) and not functorch.is_batchedtensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    # The other kind comes from torch.autograd.grad(..., is_grads_batched=True).
    return functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor)


def needs_graph(grad_out: Tensor) -> bool:
    """Returns whether the gradient that a backward gets will itself be differentiated, or is one of many: then it goes
    through ordinary operations."""
    return torch.is_grad_enabled() or is_transformed() or is_batched(grad_out)


def has_values(tensor: Tensor) -> bool:
    """Returns whether the tensor's values can be looked at: not while tracing, under vmap, or without storage."""
    is_traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.device.type != "meta"
    return is_plain and not is_traced and not is_batched(tensor)


def may_look_at(tensor: Tensor) -> bool:
    """Returns whether a check may depend on the tensor's values: also not where it would wait for a device."""
    return tensor.device.type == "cpu" and has_values(tensor)


def recomputed(function: Callable[..., Tensor], *arguments: Tensor | None) -> Tensor:
    """Returns ``function(*arguments)``, evaluated again in the backward instead of keeping what is inside.

    Transforms of torch.func and forward mode cannot do that: under them everything is kept.
    """
    if torch.is_grad_enabled() and not is_transformed():
        return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
    return function(*arguments)
