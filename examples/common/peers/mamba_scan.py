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


class SelectiveRecurrence(torch.autograd.Function):
    """y_t = C_t·s_t, s_t = exp(dt_t A) s_(t-1) + B_t x_t: dt, x [n, B, d], A [s, d], B, C [n, B, s] -> y [n, B, d].

    The last state, [B, s, d], is returned too, without a gradient. A step at a time, what it needs stays in the cache
    of a core; only the states are kept. Backward: g_t = C_t ∂y_t + exp(dt_(t+1) A) g_(t+1) is the gradient of s_t.
    """

    @staticmethod
    def forward(ctx, dt: Tensor, x: Tensor, A: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
        count, batch = x.shape[:2]
        states, output = x.new_empty(count, batch, *A.shape), torch.empty_like(x)
        state, factor = x.new_zeros(batch, *A.shape), x.new_empty(batch, *A.shape)
        for step in range(count):
            torch.mul(dt[step].unsqueeze(1), A, out=factor).exp_()
            torch.mul(factor, state, out=states[step])
            state = states[step].addcmul_(B[step].unsqueeze(2), x[step].unsqueeze(1))
            torch.bmm(C[step].unsqueeze(1), state, out=output[step].unsqueeze(1))
        ctx.save_for_backward(dt, x, A, B, C, states)
        last = state.clone()
        ctx.mark_non_differentiable(last)
        return output, last

    @staticmethod
    def backward(ctx, gradient: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        dt, x, A, B, C, states = ctx.saved_tensors
        of_dt, of_x, of_B, of_C = (torch.zeros_like(tensor) for tensor in (dt, x, B, C))
        carried, of_A, factor = (torch.zeros_like(states[0]) for _ in range(3))
        for step in range(len(x) - 1, -1, -1):
            upstream = gradient[step]  # [B, d]
            torch.bmm(states[step], upstream.unsqueeze(2), out=of_C[step].unsqueeze(2))
            carried.addcmul_(C[step].unsqueeze(2), upstream.unsqueeze(1))  # g_t
            torch.bmm(carried, x[step].unsqueeze(2), out=of_B[step].unsqueeze(2))
            torch.bmm(B[step].unsqueeze(1), carried, out=of_x[step].unsqueeze(1))
            if step:
                carried.mul_(torch.mul(dt[step].unsqueeze(1), A, out=factor).exp_())
                torch.mul(carried, states[step - 1], out=factor)  # the gradient of dt_t A
                of_A.addcmul_(factor, dt[step].unsqueeze(1))
                torch.sum(factor.mul_(A), 1, out=of_dt[step])
        return of_dt, of_x, of_A.sum(0), of_B, of_C


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
    """Does as Transformers' function of this name: y_t = C_t·s_t + D u_t with s_t = e^(dt A) s_(t-1) + dt B_t u_t."""
    steps = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[..., None]
    steps = F.softplus(steps) if delta_softplus else steps
    steps = steps.permute(2, 0, 1).float().contiguous()  # [n, B, d]
    inputs, B, C = (tensor.permute(2, 0, 1).float().contiguous() for tensor in (hidden_states, B, C))
    output, state = SelectiveRecurrence.apply(steps, steps * inputs, A.T.contiguous(), B, C)
    output = output.permute(1, 2, 0).to(hidden_states.dtype)
    output = output if D is None else output + hidden_states * D[None, :, None]
    output = output if z is None else output * F.silu(z)
    return (output, state.transpose(1, 2)) if return_last_state else output


class ScannedMamba(MambaForCausalLM):
    """MambaForCausalLM, the same in everything but the seconds that its scan takes on a CPU."""

    @wraps(MambaForCausalLM.forward)  # the Trainer looks for `labels` in the signature
    def forward(self, *args, **kwargs):
        if self.device.type != "cpu" or not hasattr(modeling_mamba, "mamba_selective_scan"):
            return super().forward(*args, **kwargs)
        with patch.object(modeling_mamba, "mamba_selective_scan", selective_scan):
            return super().forward(*args, **kwargs)
