"""What a check is: the same tensors through a kernel and through its literal sum."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

#: Stay in float32 beside features of half precision, as models give them.
SINGLE = {"positions", "query_positions", "measure", "coefficients", "decay", "fourier"}
Tensors = dict[str, Tensor]


@dataclass
class Case:
    """One check. ``kernel`` and ``literal`` map tensors by name to an output."""

    family: str  # exact, lists, low rank or one token
    name: str
    tensors: Tensors  # float64, on the device
    kernel: Callable[[Tensors], Tensor]
    literal: Callable[[Tensors], Tensor]
    has_gradients: bool = True
    is_causal: bool = False
    fixed: tuple[str, ...] = ("fourier",)  # without a gradient
    is_fused: bool = False  # by the fused backward also in the interpreter; on a GPU, the device decides
    is_repeated: bool = False  # twice also in the interpreter, where it costs most of the time

    def cast(self, dtype: torch.dtype) -> Tensors:
        """Returns the tensors as a kernel takes them."""
        single = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        return {name: t.to(single if name in SINGLE else dtype) for name, t in self.tensors.items()}

    def evaluate(self, function: Callable[[Tensors], Tensor], tensors: Tensors) -> Tensors:
        """Returns the output, and the gradient of a fixed functional of it in every tensor that is not fixed, by
        name."""
        if not self.has_gradients:
            with torch.no_grad():
                return {"out": function(tensors)}
        wanted = [name for name in tensors if name not in self.fixed]
        leaves = {name: tensors[name].detach().clone().requires_grad_(name in wanted) for name in tensors}
        out = function(leaves)
        grads = torch.autograd.grad(out, [leaves[name] for name in wanted], self.upstream(out), allow_unused=True)
        found = {name: grad for name, grad in zip(wanted, grads, strict=True) if grad is not None}
        return {"out": out.detach()} | found

    @staticmethod
    def upstream(out: Tensor) -> Tensor:
        """Returns dL/dout: random, the same for every dtype but for its rounding, and exact in all of them."""
        generator = torch.Generator().manual_seed(1)
        numbers = torch.randint(-8, 9, out.shape, generator=generator) / 4
        return numbers.to(out.device, out.dtype)


class Draw:
    """Random float64 tensors of a fixed seed on a device."""

    def __init__(self, device: str, seed: int = 0):
        self.device, self.generator = device, torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64).to(self.device)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, dtype=torch.float64).to(self.device)

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.generator).to(self.device)
