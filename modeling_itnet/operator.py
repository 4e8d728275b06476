# Copyright 2026 The ITNet Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""The multi-head ITNet operator as a module, and the Fourier features of positions."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from configuration_itnet import ITNetConfig
from itnet_kernels import (
    KernelWeights,
    fourier_features,
    integral_transform,
    monte_carlo_transform,
    sampled_low_rank_transform,
    sampled_transform,
)

from .factors import ITNetFactors
from .integration import Anchors, ITNetAnchors, integration_mode, needs_anchors
from .proposal import ITNetProposal, draw_from_measure


class ITNetFourierFeatures(nn.Module):
    """gamma(x) = [sin(2 pi B x); cos(2 pi B x)], with one frozen B ~ N(0, sigma^2) for the encoder and all layers.

    B is a persistent buffer, drawn from ``config.fourier_seed``. Casts of the model leave it in float32: rounding a
    frequency of 10 cycles to bfloat16 would move the phase at x = 1 by tenths of a radian.
    """

    def __init__(self, config: ITNetConfig):
        super().__init__()
        self.shape = (config.num_fourier_features, config.position_dim)
        self.scale, self.seed = config.fourier_scale, config.fourier_seed
        self.register_buffer("frequencies", self.draw())  # B [L, s]

    def draw(self) -> Tensor:
        generator = torch.Generator("cpu").manual_seed(self.seed)
        # The dtype is explicit: `from_config(..., dtype=...)` changes the default while the model is built.
        return self.scale * torch.randn(*self.shape, generator=generator, dtype=torch.float32, device="cpu")

    def forward(self, positions: Tensor) -> Tensor:
        """positions [..., s] -> [..., 2L] in float32 (the coordinates themselves if L = 0)."""
        return fourier_features(positions.float(), self.frequencies)

    @property
    def size(self) -> int:
        """Length of gamma(x)."""
        return 2 * self.shape[0] or self.shape[1]

    def _apply(self, fn, recurse=True):
        exact = self.frequencies
        super()._apply(fn, recurse)
        if self.frequencies.dtype != exact.dtype:
            self.frequencies = exact.to(self.frequencies.device)
        return self


class ITNetKernel(nn.Module):
    """Weights of the kernel MLP: W1 [w, kernel_input_size] shared by the heads, W2 [H, d_h^2, w] and b2 per head."""

    def __init__(self, config: ITNetConfig):
        super().__init__()
        self.inputs = tuple(config.kernel_inputs)
        self.head_dim = config.head_dim
        self.init_scale = config.kernel_init_scale
        width = config.kernel_hidden_size
        heads = config.num_attention_heads if config.kernel_output_sharing == "per_head" else 1
        self.w1 = nn.Parameter(torch.empty(width, config.kernel_input_size))
        self.b1 = nn.Parameter(torch.empty(width))
        if config.kernel_num_layers == 3:
            self.w_mid = nn.Parameter(torch.empty(width, width))
            self.b_mid = nn.Parameter(torch.empty(width))
        else:
            self.w_mid = self.b_mid = None
        self.w2 = nn.Parameter(torch.empty(heads, self.head_dim**2, width))
        self.b2 = nn.Parameter(torch.empty(heads, self.head_dim**2))

    def forward(self, frequencies: Tensor) -> KernelWeights:
        return KernelWeights(
            self.w1, self.b1, self.w2, self.b2, frequencies, self.inputs, w_mid=self.w_mid, b_mid=self.b_mid
        )


class ITNetOperator(nn.Module):
    r"""K[u](x) = W^O [ integral of kappa^(h)(x, y, u(x), u(y)) u^(h)(y) dmu(y) ]_h + W_theta u(x), Eq. multihead.

    ``config.integration_mode`` says how the integral is taken (docs/integration.md); the operator owns the parameters
    of the modes that the configuration names: ``kernel`` (exact and Monte Carlo), ``proposal`` (Monte Carlo, in
    training), ``factors`` (low rank).
    """

    def __init__(self, config: ITNetConfig):
        super().__init__()
        self.config = config
        self.num_heads = config.num_attention_heads
        self.is_causal = config.is_causal
        self.backend = config.backend
        modes = config.integration_modes
        self.kernel = ITNetKernel(config) if modes != ("low_rank",) else None
        self.factors = ITNetFactors(config) if "low_rank" in modes else None
        self.proposal = ITNetProposal(config) if config.has_proposal else None
        self.output = nn.Linear(config.hidden_size, config.hidden_size, bias=False)  # W^O
        self.residual = nn.Linear(config.hidden_size, config.hidden_size, bias=False)  # W_theta
        self.output.initialization, self.residual.initialization = "xavier_output", "identity"

    def forward(
        self,
        features: Tensor,
        positions: Tensor,
        measure: Tensor,
        frequencies: Tensor,
        neighbors: Tensor | None = None,
        edge_gate: Tensor | None = None,
        anchors: Anchors | None = None,
    ) -> Tensor:
        """features [B, n, d], positions [n, s] or [B, n, s], measure [B, n], neighbors [B, n, m] -> [B, n, d].

        With ``neighbors`` the kernel is multiplied by 1[edge] + lambda, lambda = ``edge_gate`` (App. enc_graph).
        ``anchors`` of the domain save finding them again in every layer.
        """
        integral = self.integral(features, positions, measure, frequencies, anchors)
        if neighbors is not None:
            edges = self.edge_integral(features, positions, measure, frequencies, neighbors)
            integral = edge_gate.to(edges.dtype) * integral + edges
        return self.output(integral) + self.residual(features)

    def integral(
        self,
        features: Tensor,
        positions: Tensor,
        measure: Tensor,
        frequencies: Tensor,
        anchors: Anchors | None = None,
    ) -> Tensor:
        """The heads' integrals side by side, before W^O: [B, n, d]."""
        heads = self._heads(features)
        mode = integration_mode(self.config, features.shape[1])
        self._check_parts(mode)
        if mode == "low_rank":
            out, _ = self.factors(heads, positions, measure, frequencies)
        elif mode == "monte_carlo" and self.training:
            out = self._sampled_integral(features, positions, measure, frequencies)
        elif needs_anchors(self.config, features.shape[1], self.training):
            out = self._anchored_integral(heads, positions, measure, frequencies, anchors)
        else:
            out = integral_transform(
                heads,
                positions,
                self.kernel(frequencies),
                measure=measure,
                is_causal=self.is_causal,
                backend=self.backend,
            )
        return out.flatten(-2)

    def edge_integral(
        self, features: Tensor, positions: Tensor, measure: Tensor, frequencies: Tensor, neighbors: Tensor
    ) -> Tensor:
        """The heads' integrals over the edges of each query only, all of them in every mode: [B, n, d]."""
        heads = self._heads(features)
        indices = neighbors.clamp(min=0)
        omega = measure.gather(1, indices.flatten(1)).view(indices.shape) * (neighbors >= 0)  # [B, n, m]
        if integration_mode(self.config, features.shape[1]) == "low_rank":
            phi, psi = self.factors.factors(heads, positions, frequencies)
            bias = self.factors.bias
            out = sampled_low_rank_transform(heads, phi, psi, indices=indices, coefficients=omega, bias=bias)
        else:
            out = sampled_transform(heads, positions, self.kernel(frequencies), indices=indices, coefficients=omega)
        return out.flatten(-2)

    def proposal_loss(
        self, features: Tensor, positions: Tensor, measure: Tensor, frequencies: Tensor
    ) -> Tensor | None:
        """What trains the proposal; None where there is nothing to train."""
        trains = self.training and integration_mode(self.config, features.shape[1]) == "monte_carlo"
        if not trains or self.proposal is None:
            return None
        return self.proposal.loss(features, positions, measure, frequencies, self.kernel(frequencies))

    def _sampled_integral(self, features, positions, measure, frequencies) -> Tensor:
        """Monte Carlo estimate with fresh samples. Indices and probabilities are constants to every gradient."""
        if self.proposal is None:
            indices, probabilities = draw_from_measure(measure, self.config.num_samples, self.is_causal)
        else:
            indices, probabilities = self.proposal.draw(features, positions, measure, frequencies)
        return monte_carlo_transform(
            self._heads(features),
            positions,
            self.kernel(frequencies),
            indices=indices,
            probabilities=probabilities,
            measure=measure,
            is_causal=self.is_causal,
        )

    def _anchored_integral(self, heads, positions, measure, frequencies, anchors: Anchors | None) -> Tensor:
        """The integral over anchors only."""
        count = self.config.num_samples
        anchors = ITNetAnchors()(positions, measure, count, self.is_causal) if anchors is None else anchors
        kernel = self.kernel(frequencies)
        if self.is_causal:
            indices = anchors.indices.unsqueeze(1).expand(anchors.measure.shape)  # [B, n, M]
            return sampled_transform(heads, positions, kernel, indices=indices, coefficients=anchors.measure)
        samples = torch.arange(heads.shape[0], device=heads.device)[:, None]
        return integral_transform(
            heads[samples, anchors.indices],
            positions.expand(heads.shape[0], *positions.shape[-2:])[samples, anchors.indices],
            kernel,
            measure=anchors.measure,
            queries=heads,
            query_positions=positions,
            backend=self.backend,
        )

    def _heads(self, features: Tensor) -> Tensor:
        return features.unflatten(-1, (self.num_heads, -1))  # [B, n, H, d_h]

    def add_proposal(self) -> None:
        """A new proposal, unless there is one or Monte Carlo integration samples from the measure."""
        if self.proposal is None and self.config.has_proposal:
            weight = self.output.weight
            self.proposal = ITNetProposal(self.config).to(weight.device, weight.dtype).train(self.training)
            for linear in (self.proposal.query, self.proposal.key):
                nn.init.normal_(linear.weight, std=self.config.initializer_range)

    def _check_parts(self, mode: str) -> None:
        """The mode may have been changed after the parameters were made."""
        name = "factors" if mode == "low_rank" else "kernel"
        if getattr(self, name) is None:
            raise ValueError(
                f"`integration_mode` ({mode!r}) needs `{name}`, which this model was made without{_REMEDIES[name]}"
            )


# What to do about missing parameters.
_REMEDIES = {
    "factors": "; `model.to_low_rank` fits them to an exact model",
    "kernel": "",
    "proposal": "; `model.to_monte_carlo` adds it to an exact model, `proposal_epsilon=1` does without",
}


def check_parts(config: ITNetConfig, missing_keys: Iterable[str]) -> None:
    """An error if a checkpoint has operators, but not the parameters of the mode that it is loaded for."""
    missing = {key.partition(".operator.")[2].partition(".")[0] for key in missing_keys if ".operator." in key}
    if "output" in missing:  # no operators at all: nothing was to be loaded
        return
    for name, remedy in _REMEDIES.items():
        if name in missing:
            raise ValueError(
                f"`integration_mode` ({config.integration_mode!r}) with `approximate_mode` "
                f"({config.approximate_mode!r}) needs `{name}`, which the checkpoint lacks{remedy}"
            )
