"""One token of a causal low-rank operator in one launch: ``itnet::low_rank_step``, for decoding on a GPU."""

import torch
from torch import Tensor

from ..operators import without_derivative
from ..positions import Coordinates
from ..transforms import is_transformed, operator_namespace
from ..validation import batched
from .state import LowRankState

_OPTIONAL = ("matrices", "w_phi", "b_phi", "w_psi", "b_psi", "bias", "rates", "position", "time")
_REQUIRED = ("u", "measure", "query", "key", "moments", "mean", "mass")
_SCHEMA = ", ".join([f"Tensor {name}" for name in _REQUIRED] + [f"Tensor? {name}" for name in _OPTIONAL])
_RESULTS = ("out", "moments", "mean", "mass", "time")


def named_arguments(given: tuple) -> dict:
    """Returns the operator's arguments, or their shapes, by name."""
    return dict(zip((*_REQUIRED, *_OPTIONAL), given, strict=True))


def _shapes(given: dict[str, Tensor | None]) -> dict[str, tuple[int, ...]]:
    batch, heads, head_dim = given["u"].shape
    rows = head_dim if given["matrices"] is None else given["matrices"].shape[2]
    shapes = {"out": (batch, heads, rows), "moments": given["moments"].shape, "mean": (batch, heads, head_dim)}
    return shapes | {"mass": (batch,), "time": (batch,)}


@torch.library.custom_op(
    f"{operator_namespace(__name__)}::low_rank_step",
    mutates_args=(),
    schema=f"({_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _step(*given):
    from ..exact.triton.device import on_device
    from ..sampled.triton.configs import power_of_two
    from .triton.step import launch_step  # imports triton, which may not be installed

    given = named_arguments(given)
    u, is_matrix = given["u"], given["matrices"] is not None
    # Not empty: a kernel that does not decay writes no time.
    new = {name: u.new_zeros(shape, dtype=torch.float32) for name, shape in _shapes(given).items()}
    rows, width = new["out"].shape[2], 1 if is_matrix else given["key"].shape[2]
    sizes = {"R": given["moments"].shape[2], "D": u.shape[2], "A": rows, "K": width}
    sizes |= {f"{name}_PADDED": power_of_two(sizes[name]) for name in "DAK"}
    flags = {"IS_MATRIX": is_matrix, "HAS_BIAS": given["bias"] is not None, "DECAYS": given["rates"] is not None}
    outputs = {"p_out" if name == "out" else f"p_new_{name}": tensor for name, tensor in new.items()}
    with on_device(u.device):
        arguments = {f"p_{name}": tensor for name, tensor in given.items()}
        launch_step(arguments, outputs, sizes, flags | {"heads": u.shape[1]}, u.shape[0] * u.shape[1])
    return tuple(new[name] for name in _RESULTS)


@_step.register_fake
def _(*given):
    given = named_arguments(given)
    shapes = _shapes(given)
    return tuple(given["u"].new_empty(shapes[name], dtype=torch.float32) for name in _RESULTS)


without_derivative(_step, "call the transform where gradients are enabled, which takes the operators of fused.py")


def is_step(num_queries: int, u: Tensor, is_causal: bool, state: LowRankState | None, *tensors: Tensor | None) -> bool:
    """Says whether a call is one token after others, without gradients."""
    if not is_causal or num_queries != 1 or u.shape[1] != 1 or state is None or is_transformed():
        return False
    needed = (u, *tensors, *state)
    return not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in needed))


def low_rank_step(u: Tensor, measure: Tensor, query: Tensor, key: Tensor, state: LowRankState, **others):
    """Returns the output [B, 1, H, d_out] in float32 and the state after a token; ``_OPTIONAL`` names ``others``."""
    moments, mean, mass, time = state
    given = {"u": u[:, 0], "measure": measure[:, 0], "query": query[:, 0], "key": key[:, 0], "time": time}
    given |= {"moments": moments.float(), "mean": mean.float(), "mass": mass.float()} | others
    out, *new = _step(*(given.get(name) for name in (*_REQUIRED, *_OPTIONAL)))
    return out.unsqueeze(1), LowRankState(*new[:3], None if time is None else new[3].to(time.dtype))


def step_decay(decay: Tensor | None, positions: Tensor | Coordinates | None, batch: int) -> dict[str, Tensor]:
    """Returns the rates of a kernel that decays, and where the token is: [B]."""
    return {} if decay is None else {"rates": decay, "position": batched(positions)[:, 0, 0].expand(batch)}
