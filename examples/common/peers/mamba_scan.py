"""Mamba of Transformers with a scan for training without its GPU kernels.

Transformers' own fallback reads step t of the sequence by indexing, whose backward writes a gradient of the whole
sequence for every t: quadratic in the length. Here a step costs what it should, and the values are the same.
"""

from functools import wraps
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import MambaForCausalLM
from transformers.models.mamba import modeling_mamba


class LinearRecurrence(torch.autograd.Function):
    """s_t = a_t s_(t-1) + b_t with s_0 = b_0, for a, b [n, ...] -> s [n, ...].

    Backward: g_t = ∂s_t + a_(t+1) g_(t+1) is the gradient of b_t, and g_t s_(t-1) that of a_t.
    """

    @staticmethod
    def forward(ctx, factors: Tensor, inputs: Tensor) -> Tensor:
        states = inputs.clone()
        for step in range(1, len(states)):
            states[step].addcmul_(factors[step], states[step - 1])
        ctx.save_for_backward(factors, states)
        return states

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        factors, states = ctx.saved_tensors
        total = gradient.clone()
        for step in range(len(total) - 1, 0, -1):
            total[step - 1].addcmul_(factors[step], total[step])
        of_factors = torch.zeros_like(factors)
        torch.mul(total[1:], states[:-1], out=of_factors[1:])
        return of_factors, total


def selective_scan(
    hidden_states: Tensor,  # u [B, d, n]
    dt: Tensor,  # [B, d, n]
    A: Tensor,  # [d, s]
    B: Tensor,  # [B, s, n]
    C: Tensor,  # [B, s, n]
    D: Tensor | None = None,  # [d]
    z: Tensor | None = None,  # [B, d, n]
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **kwargs,
) -> Tensor | tuple[Tensor, Tensor]:
    """The function of this name in Transformers: y_t = C_t·s_t + D u_t with s_t = e^(dt A) s_(t-1) + dt B_t u_t."""
    steps = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[..., None]
    steps = F.softplus(steps) if delta_softplus else steps
    steps = steps.permute(2, 0, 1).float().contiguous()  # [n, B, d]
    inputs = (steps * hidden_states.permute(2, 0, 1)).unsqueeze(-1) * B.permute(2, 0, 1).unsqueeze(2)  # [n, B, d, s]
    states = LinearRecurrence.apply(torch.exp(steps.unsqueeze(-1) * A), inputs)
    output = (states @ C.permute(2, 0, 1).unsqueeze(-1)).squeeze(-1).permute(1, 2, 0).to(hidden_states.dtype)
    output = output if D is None else output + hidden_states * D[None, :, None]
    output = output if z is None else output * F.silu(z)
    return (output, states[-1]) if return_last_state else output


class ScannedMamba(MambaForCausalLM):
    """MambaForCausalLM, the same in everything but the seconds that its scan takes on a CPU."""

    @wraps(MambaForCausalLM.forward)  # the Trainer looks for `labels` in the signature
    def forward(self, *args, **kwargs):
        if self.device.type != "cpu" or not hasattr(modeling_mamba, "mamba_selective_scan"):
            return super().forward(*args, **kwargs)
        with patch.object(modeling_mamba, "mamba_selective_scan", selective_scan):
            return super().forward(*args, **kwargs)
