# SPDX-License-Identifier: Apache-2.0
"""``from_module`` returns the ITNet operator that equals a given module, with the module's own weights."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

_CONVERTERS: dict[type | str, Callable[..., nn.Module]] = {}


class Conversion(nn.Module):
    """An ITNet operator in place of ``module``, which computes the module's call as integrals against kernels.

    It keeps the module for its parameters and reads them at every call, so that the two share weights and gradients;
    the module's ``forward`` is never called. Attributes that the operator does not have are those of the module, for
    callers that read them: ``operator.weight``, ``operator.batch_first``.
    """

    num_outputs = 1  # of the module; the operator computes the first
    num_returned = 1  # None for the others, where a caller inside of a model unpacks them

    def __init__(self, module: nn.Module):
        super().__init__()
        if any(is_lazy(parameter) for parameter in module.parameters()):
            name = type(module).__name__
            raise ValueError(f"{name} has parameters without a shape: call it once before converting it")
        self.module = module
        self.training = module.training
        self.check_hooks()
        self.check_dropout()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or not hasattr(module, name):
                raise
            return getattr(module, name)

    def __call__(self, *args, **kwargs):
        self.check_hooks()
        out = super().__call__(*args, **kwargs)
        return out if self.num_returned == 1 else (out, *(None,) * (self.num_returned - 1))

    def check_hooks(self) -> None:
        """Raises if the module has hooks of its own. Those of modules inside of it run where it would call these."""
        hooks = [
            f"{kind} {getattr(hook, '__name__', None) or type(hook).__name__}"
            for kind in ("forward_pre_hook", "forward_hook", "backward_pre_hook", "backward_hook")
            for hook in getattr(self.module, f"_{kind}s").values()
        ]
        if hooks:
            raise ValueError(
                f"{type(self.module).__name__} has hooks ({', '.join(hooks)}), which run when it is called: the "
                "operator does not call it, and would compute something else. Remove them first: remove_weight_norm, "
                "remove_spectral_norm or prune.remove of torch.nn.utils. What torch.nn.utils.parametrizations has "
                "instead needs no hook and can be converted"
            )

    def with_batch_first(self, signal: Tensor) -> Tensor:
        """Returns [B, n, d], from [n, d], or from [n, B, d] if the module has not ``batch_first``."""
        if signal.dim() == 2:
            return signal.unsqueeze(0)
        return signal if self.module.batch_first else signal.transpose(0, 1)

    def as_given(self, out: Tensor, like: Tensor) -> Tensor:
        """Returns [B, n, d] with the axes of the module's input ``like``."""
        return out.squeeze(0) if like.dim() == 2 else self.with_batch_first(out)

    def dropout(self) -> float:
        """Returns the rate of the dropout inside of what the operator replaces."""
        return 0.0

    def check_dropout(self) -> None:
        rate = self.dropout()
        if rate > 0 and (self.training or self.module.training):
            raise ValueError(
                f"{type(self.module).__name__} is in training mode with a dropout of {rate}: a random kernel has no "
                "integral to compare with. Call `.eval()` on it, or set its dropout to 0, before converting it"
            )


def register(*module_classes: type | str) -> Callable:
    """Makes ``from_module`` use a converter for modules of these classes: @register(MyModule), or its dotted name.

    A name stands for a class that need not be importable: "transformers.models.vit.modeling_vit.ViTAttention".
    """

    def decorate(converter: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        _CONVERTERS.update(dict.fromkeys(module_classes, converter))
        return converter

    return decorate


def from_module(module: nn.Module, **options) -> nn.Module:
    """Returns an ITNet operator that computes what ``module`` computes, called as the module is.

    It returns the module's main output: of several, the first (for nn.LSTM the sequence of hidden states). Weights
    are shared with the module. Options are those of the family (see docs/special_cases.md).
    """
    for base in type(module).__mro__:  # the nearest base class that is known; with another forward it is of no use
        converter = _CONVERTERS.get(base) or _CONVERTERS.get(f"{base.__module__}.{base.__qualname__}")
        if converter is not None and type(module).forward is base.forward:
            return converter(module, **options)
        if converter is not None:
            break
    raise TypeError(
        f"`module` ({type(module).__module__}.{type(module).__qualname__}) cannot be converted: it is none of "
        f"{', '.join(convertible())}, nor a subclass that keeps the `forward` of one"
    )


def convertible() -> list[str]:
    """Returns the names of the classes that ``from_module`` converts."""
    return sorted(key.rpartition(".")[2] if isinstance(key, str) else key.__name__ for key in _CONVERTERS)


def swap_modules(model: nn.Module, module_class: type | Iterable[type], **options) -> int:
    """Replaces every module of a class inside ``model`` by its ITNet operator, in place; returns how many.

    Modules that return several outputs are replaced by operators that return as many, None for all but the main one.
    """
    classes = (module_class,) if isinstance(module_class, type) else tuple(module_class)
    children = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]
    # All of them are converted before any is replaced.
    found = [(*place, from_module(child, **options)) for *place, child in children if isinstance(child, classes)]
    for parent, name, operator in found:
        setattr(parent, name, operator)
        operator.num_returned = getattr(operator, "num_outputs", 1)
        # In evaluation, nn.TransformerEncoderLayer computes with the weights of its attention instead of calling it,
        # unless that has a hook; and only its fused layers can read nested tensors.
        operator.register_forward_pre_hook(_must_be_called)
    for encoder in model.modules():
        if isinstance(encoder, nn.TransformerEncoder) and any(isinstance(m, Conversion) for m in encoder.modules()):
            encoder.use_nested_tensor = False
    return len(found)


def _must_be_called(module: nn.Module, args: tuple) -> None:
    """Does nothing, as a hook."""
