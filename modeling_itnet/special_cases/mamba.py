# SPDX-License-Identifier: Apache-2.0
"""Theorem 3 (d): the MambaMixer of Transformers as an integral with a content-dependent causal kernel."""

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from itnet_kernels import prefix_sum

from .convert import Conversion, from_module, register
from .kernel import Kernel, Pairs
from .operator import IntegralOperator


class SelectiveScanKernel(Kernel):
    """kappa(t, s) = 1[s <= t] sum_n C_n(t) exp(A_cn (S_c(t) - S_c(s))) Delta_c(s) B_n(s), diagonal in the channels c.

    S is the running sum of the time steps Delta, so that the exponential is the product of exp(Delta(tau) A) over
    s < tau <= t: the kernel depends on the signal between its two ends. S is summed in float64, because it grows with
    T and only its differences matter. ``context`` of a call is (A [c, n], Delta [B, T, c], B [B, T, n], C [B, T, n]).
    """

    def __init__(self, channels: int, state_size: int):
        super().__init__()
        self.entries_per_pair = channels * state_size

    def prepare(self, u_x, u_y, x, y, context):
        a, step, b, c = context
        return a, step, prefix_sum(step.double()), b, c

    def forward(self, pairs: Pairs) -> Tensor:
        a, step, total, b, c = pairs.prepared
        elapsed = total[:, pairs.rows].unsqueeze(2) - total[:, pairs.columns].unsqueeze(1)  # [B, t_q, t_k, c]
        decay = (elapsed.clamp(min=0).to(step.dtype).unsqueeze(-1) * a).exp()  # [B, t_q, t_k, c, n]
        weight = c[:, pairs.rows].unsqueeze(2) * b[:, pairs.columns].unsqueeze(1)  # C_n(t) B_n(s)
        kappa = torch.einsum("bijcn,bijn->bijc", decay, weight.to(decay.dtype))
        return (kappa * step[:, None, pairs.columns]).unsqueeze(3)


@register("transformers.models.mamba.modeling_mamba.MambaMixer")
class MambaMixerOperator(Conversion):
    """The mixer: projection, an integral that is a causal convolution, gate and selection, the integral above.

    The mixer rounds A, D, B, the bias of Delta and the scanned signal to float32, whatever its dtype; so does this.
    """

    def __init__(self, module):
        super().__init__(module)
        self.convolution = from_module(module.conv1d)
        self.integral = IntegralOperator(
            SelectiveScanKernel(module.intermediate_size, module.ssm_state_size), is_causal=True, measure="counting"
        )

    def forward(
        self, hidden_states: Tensor, cache_params=None, attention_mask: Tensor | None = None, **kwargs
    ) -> Tensor:
        if cache_params is not None:
            raise ValueError("`cache_params`: the integral is over the positions of this call; pass `use_cache=False`")
        module, length = self.module, hidden_states.shape[1]
        mask = 1 if attention_mask is None else attention_mask.unsqueeze(-1).to(hidden_states.dtype)
        signal, gate = module.in_proj(hidden_states * mask).chunk(2, dim=-1)
        signal = self.convolution(signal.transpose(1, 2))[..., :length].transpose(1, 2)
        signal = module.act(signal) * mask  # [B, T, c]
        sizes = [module.time_step_rank, module.ssm_state_size, module.ssm_state_size]
        step, b, c = module.x_proj(signal).split(sizes, dim=-1)
        step = softplus(step @ module.dt_proj.weight.T + _rounded(module.dt_proj.bias))  # Delta [B, T, c]
        a = -module.A_log.float().exp().to(signal.dtype)  # [c, n]
        out = self.integral(_rounded(signal), context=(a, step, _rounded(b), c))
        out = out + signal * _rounded(module.D)
        return module.out_proj(out * silu(gate))


def _rounded(tensor: Tensor) -> Tensor:
    return tensor.float().to(tensor.dtype)
