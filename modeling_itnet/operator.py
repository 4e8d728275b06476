# SPDX-License-Identifier: Apache-2.0
"""The multi-head ITNet operator as a module, and the Fourier features of positions."""

import math
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import initialization as init

from configuration_itnet import ITNetConfig
from itnet_kernels import (
    Coordinates,
    KernelWeights,
    fourier_features,
    integral_transform,
    monte_carlo_transform,
    sampled_transform,
)
from itnet_kernels.measure import uniform_measure

from .domain import Domain, merge
from .integration.anchors import take
from .integration.factors import ITNetFactors
from .integration.near import Near
from .integration.proposal import ITNetProposal, draw_from_measure

if TYPE_CHECKING:
    from .generation.cache import ITNetCacheLayer


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

    def reset_parameters(self) -> None:
        init.copy_(self.frequencies, self.draw())

    def forward(self, positions: Tensor) -> Tensor:
        """Maps positions [..., s] to [..., 2L] in float32, or to the coordinates themselves if L = 0."""
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
    """Weights of the kernel MLP: W1 [w, kernel_input_size] shared by the heads, W2 [H, d_h^2, w] and b2 per head.

    With ``kernel_input_sharing="per_head"`` every head has a W1 of its own, [H, w, kernel_input_size]. With
    ``kernel_directions`` every coordinate has a W2 and a b2 as well: [H, s, d_h^2, w] and [H, s, d_h^2].
    """

    def __init__(self, config: ITNetConfig):
        super().__init__()
        self.inputs = tuple(config.kernel_inputs)
        self.head_dim = config.head_dim
        self.init_std, self.init_scale = config.initializer_range, config.kernel_init_scale
        self.position_scale, self.bias_scale = config.kernel_position_scale, config.kernel_bias_scale
        width = config.kernel_hidden_size
        heads = config.num_attention_heads if config.kernel_output_sharing == "per_head" else 1
        own = (config.num_attention_heads,) if config.kernel_input_sharing == "per_head" else ()
        self.w1 = nn.Parameter(torch.empty(*own, width, config.kernel_input_size))
        self.b1 = nn.Parameter(torch.empty(*own, width))
        if config.kernel_num_layers == 3:
            self.w_mid = nn.Parameter(torch.empty(*own, width, width))
            self.b_mid = nn.Parameter(torch.empty(*own, width))
        else:
            self.w_mid = self.b_mid = None
        self.w2 = nn.Parameter(torch.empty(heads, self.head_dim**2, width))
        self.b2 = nn.Parameter(torch.empty(heads, self.head_dim**2))
        self.w2_directions = self.b2_directions = None
        if config.kernel_directions:
            self.w2_directions = nn.Parameter(torch.empty(heads, config.position_dim, self.head_dim**2, width))
            self.b2_directions = nn.Parameter(torch.empty(heads, config.position_dim, self.head_dim**2))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Starts with a small W2 and with the identity as b2, so that the head is the mean of the signal."""
        width = self.w1.shape[-2]
        init.normal_(self.w1, std=self.init_std)
        if self.position_scale != 1:
            content = sum(name.startswith("u_") for name in self.inputs) * self.head_dim  # the last columns
            scale = self.w1.new_ones(self.w1.shape[-1])
            scale[: len(scale) - content] = self.position_scale
            init.copy_(self.w1, self.w1 * scale)
        if self.bias_scale:
            init.normal_(self.b1, std=self.bias_scale)
        else:
            init.zeros_(self.b1)
        if self.w_mid is not None:
            init.normal_(self.w_mid, std=1 / math.sqrt(width))
            init.zeros_(self.b_mid)
        init.normal_(self.w2, std=self.init_scale / math.sqrt(width))
        init.copy_(self.b2, torch.eye(self.head_dim, device="cpu").flatten().expand(self.b2.shape))
        if self.w2_directions is not None:
            init.normal_(self.w2_directions, std=self.init_scale / math.sqrt(width))
            init.zeros_(self.b2_directions)

    def forward(self, frequencies: Tensor) -> KernelWeights:
        own = {name: getattr(self, name) for name in ("w_mid", "b_mid", "w2_directions", "b2_directions")}
        return KernelWeights(self.w1, self.b1, self.w2, self.b2, frequencies, self.inputs, **own)


class ITNetOperator(nn.Module):
    r"""K[u](x) = W^O [ integral of kappa^(h)(x, y, u(x), u(y)) u^(h)(y) dmu(y) ]_h + W_theta u(x), Eq. multihead.

    ``config.integration_mode`` says how the integral is taken (docs/integration.md); the operator owns the parameters
    of the modes that the configuration names: ``kernel`` (exact and Monte Carlo), ``proposal`` (Monte Carlo, in
    training), ``factors`` (low rank). It initialises itself, unless a model does that for its layers, and can stand
    alone. With ``config.output_gate`` the integral is multiplied by SiLU(W_g u(x)) before W^O::

        config = ITNetConfig(modality="signal", position_dim=2, hidden_size=64, num_attention_heads=4)
        operator = ITNetOperator(config)
        out = operator(torch.randn(8, 100, 64), torch.rand(100, 2))  # [8, 100, 64], a uniform measure
    """

    def __init__(self, config: ITNetConfig, *, initialize: bool = True):
        super().__init__()
        self.config = config
        self.num_heads = config.num_attention_heads
        modes = config.integration_modes
        self.kernel = ITNetKernel(config) if modes != ("low_rank",) else None
        self.factors = ITNetFactors(config) if {"low_rank", "near_far"}.intersection(modes) else None
        self.proposal = ITNetProposal(config) if config.has_proposal else None
        self.output = nn.Linear(config.hidden_size, config.hidden_size, bias=False)  # W^O
        self.residual = nn.Linear(config.hidden_size, config.hidden_size, bias=False)  # W_theta
        self.output.initialization, self.residual.initialization = "xavier_output", "identity"
        self.gate = None  # W_g
        if config.output_gate:
            self.gate = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
            self.gate.initialization = "xavier"
        if initialize:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Follows App. init of the paper, as for the operators of a model."""
        for part in (self.kernel, self.factors, self.proposal):
            if part is not None:
                part.reset_parameters()
        for linear in (self.output, self.residual, self.gate):
            if linear is not None:
                reset_linear(linear, self.config)

    @property
    def is_causal(self) -> bool:
        return self.config.is_causal

    def forward(
        self,
        features: Tensor,
        domain: Domain | Tensor,
        measure: Tensor | None = None,
        *,
        kept: "ITNetCacheLayer | None" = None,
        return_proposal_loss: bool = False,
        is_projected: bool = True,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Maps features [B, n, d] on a domain to [B, n, d].

        Alone, an operator also takes positions [n, s] or [B, n, s] in place of the domain, with their measure [B, n],
        which is 0 on padding; None is the uniform one, 1/n. On request it returns a pair of the output and the loss
        that trains its proposal, which is None where there is nothing to train. ``is_projected=False`` stops before
        W^O and W_theta: the heads' integrals side by side. ``kept`` is what a cache holds of the keys before those of
        the domain, which these are added to.
        """
        if not isinstance(domain, Domain):
            omega = uniform_measure(features) if measure is None else measure
            domain = Domain(domain, omega, self.frequencies.to(features.device), is_padded=measure is not None)
        elif measure is not None:
            raise ValueError("`measure` was given beside a `domain`, which has a measure of its own")
        losses = [] if return_proposal_loss else None  # collects the loss of a proposal
        integrals, parts = [], domain.resolve(self.config, self.training)
        for part in parts:
            self._check_parts(part.mode)
            heads = part.of(features).unflatten(-1, (self.num_heads, -1))  # [b, n, H, d_h]
            keys = heads if kept is None else kept.with_new(heads)  # [b, n_k, H, d_h]
            if part.mode in ("low_rank", "near_far"):
                out = self.factors(heads, part)[0] if kept is None else kept.far_field(self.factors, heads, part)
                if part.mode == "near_far":
                    out = out + self._near_integral(heads, keys, part)
            elif part.mode == "monte_carlo" and self.training:
                out = self._sampled_integral(heads, part, losses)
            elif part.anchors is not None:
                out = self._anchored_integral(heads, keys, part)
            else:
                settings = {"measure": part.keys.measure, "is_causal": self.is_causal, "backend": self.config.backend}
                settings |= _queries(heads, part)
                out = integral_transform(keys, part.keys.coordinates, self.kernel(part.frequencies), **settings)
            if part.neighbors is not None:
                out = part.edge_gate.to(out.dtype) * out + self._edge_integral(heads, part)
            if kept is not None:
                kept.store(keys)
            integrals.append(out.flatten(-2))
        out = merge(parts, integrals, features.shape)
        if is_projected:
            if self.gate is not None:
                out = out * silu(self.gate(features))
            out = self._joined(self.output(out) + self.residual(features), parts)
        return (out, torch.stack(losses).mean() if losses else None) if return_proposal_loss else out

    def integral(self, features: Tensor, domain: Domain) -> Tensor:
        """Returns the heads' integrals side by side, before W^O: [B, n, d]."""
        return self.forward(features, domain, is_projected=False)

    def _edge_integral(self, heads: Tensor, domain: Domain) -> Tensor:
        """Returns the integral over the edges of each query only, all of them in every mode."""
        indices, omega = domain.edges
        far = None
        if domain.mode in ("low_rank", "near_far"):
            far = self.factors.sampled(heads, domain, indices, omega)
            if domain.mode == "low_rank":
                return far
            omega = omega * domain.near(self.config).scale.unsqueeze(-1)
        kernel = self.kernel(domain.frequencies)
        given = {"indices": indices, "coefficients": omega, "backend": self.config.backend}
        near = sampled_transform(heads, domain.coordinates, kernel, **given)
        return near if far is None else near + far

    def _near_integral(self, heads: Tensor, keys: Tensor, domain: Domain) -> Tensor:
        """Returns the integral over the neighbourhood of every position, with the full kernel."""
        kernel, near = self.kernel(domain.frequencies), domain.near(self.config)
        queries, places = (None, None) if domain.past is None else (heads, domain.coordinates)
        return near_integral(keys, domain.keys, kernel, near, self.config, queries, places)

    def _sampled_integral(self, heads: Tensor, domain: Domain, losses: list[Tensor] | None) -> Tensor:
        """Returns a Monte Carlo estimate with fresh samples, which are constants to every gradient."""
        features, kernel = heads.flatten(-2), self.kernel(domain.frequencies)
        if self.proposal is None:
            draws = draw_from_measure(domain.measure, self.config.num_samples, self.is_causal)
        else:
            draws = self.proposal.draw(features, domain)
            if losses is not None:
                losses.append(self.proposal.loss(features, domain, draws, kernel))
        given = {"indices": draws.indices, "probabilities": draws.probabilities, "measure": domain.measure}
        given |= {"is_causal": self.is_causal, "backend": self.config.backend}
        return monte_carlo_transform(heads, domain.coordinates, kernel, **given)

    def _anchored_integral(self, heads: Tensor, keys: Tensor, domain: Domain) -> Tensor:
        """Returns the integral over anchors only."""
        anchors, kernel = domain.anchors, self.kernel(domain.frequencies)
        if self.is_causal:
            lists = (part[:, -heads.shape[1] :] for part in anchors[:2])  # those of the queries
            given = dict(zip(("indices", "coefficients"), lists, strict=True)) | _queries(heads, domain)
            return sampled_transform(keys, domain.keys.coordinates, kernel, **given, backend=self.config.backend)
        keys, backend = take(heads, anchors.indices), self.config.backend
        given = {"measure": anchors.measure, "queries": heads, "query_positions": domain.coordinates}
        return integral_transform(keys, anchors.coordinates, kernel, **given, backend=backend)

    @cached_property  # outside of nn.Module's registers: no part of the state
    def frequencies(self) -> Tensor:
        """B of an operator that stands alone: that of a model of its configuration."""
        return ITNetFourierFeatures(self.config).frequencies

    def _joined(self, out: Tensor, parts: list[Domain]) -> Tensor:
        """Returns ``out``, with a gradient of 0 for the parameters of modes that no sample of this batch takes.

        Processes that train together must agree on which parameters have gradients, and their batches may differ.
        """
        is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if not (self.training and torch.is_grad_enabled() and is_distributed):
            return out
        modes = {part.mode for part in parts}
        unused = [self.kernel] if modes == {"low_rank"} else []
        unused += [self.factors] if modes.isdisjoint({"low_rank", "near_far"}) else []
        unused += [self.proposal] if "monte_carlo" not in modes else []
        for part in unused:
            for parameter in part.parameters() if part is not None else ():
                out = out + parameter.flatten()[:0].sum().to(out.dtype)
        return out

    def add_proposal(self) -> None:
        """Adds a new proposal, unless there is one or Monte Carlo integration samples from the measure."""
        if self.proposal is None and self.config.has_proposal:
            weight = self.output.weight
            self.proposal = ITNetProposal(self.config)
            self.proposal.reset_parameters()
            self.proposal.to(weight.device, weight.dtype).train(self.training)

    def _check_parts(self, mode: str) -> None:
        """Raises an error if the mode was changed to one that has no parameters here."""
        for name in {"low_rank": ("factors",), "near_far": ("kernel", "factors")}.get(mode, ("kernel",)):
            if getattr(self, name) is None:
                raise ValueError(
                    f"`integration_mode` ({mode!r}) needs `{name}`, which this model was made without{_REMEDIES[name]}"
                )


def _queries(heads: Tensor, domain: Domain) -> dict[str, Any]:
    """Returns the queries of a call whose keys begin before them, in a cache; nothing where they are the keys."""
    return {} if domain.past is None else {"queries": heads, "query_positions": domain.coordinates}


def near_integral(
    heads: Tensor,
    domain: Domain,
    kernel: KernelWeights,
    near: Near,
    config: ITNetConfig,
    queries: Tensor | None = None,
    places: Coordinates | None = None,
) -> Tensor:
    """Returns scale_i sum_{j in N(i)} omega_j K_ij u_j for heads [B, n, H, d_h] on a domain: [B, n_q, H, d_h].

    The queries are the keys, unless ``queries`` [B, n_q, H, d_h] at other ``places`` are given.
    """
    settings = {"measure": domain.measure, "backend": config.backend}
    given = {"queries": queries, "query_positions": places, "blocks": near.blocks, "window": near.window}
    out = integral_transform(heads, domain.coordinates, kernel, **given, **settings)
    return out * near.scale[..., None, None].to(out.dtype)


def find_operators(model: nn.Module) -> list[ITNetOperator]:
    """Returns the operators of all layers, in their order."""
    return [module for module in model.modules() if isinstance(module, ITNetOperator)]


def reset_linear(linear: nn.Linear, config: ITNetConfig) -> None:
    """Initialises a linear layer as its attribute ``initialization`` says."""
    scheme = linear.initialization
    if scheme == "identity":
        init.eye_(linear.weight)
    elif scheme == "position":  # W_pos gamma(x) is as large as a token embedding: |gamma(x)|^2 is half its length
        std = config.position_init_scale * config.initializer_range * math.sqrt(2 / linear.weight.shape[1])
        init.normal_(linear.weight, std=std)
    else:
        gain = 1 / math.sqrt(2 * config.num_hidden_layers) if scheme == "xavier_output" else 1
        init.xavier_uniform_(linear.weight, gain=gain)


# What to do about missing parameters.
_REMEDIES = {
    "factors": "; `model.to_near_far` and `model.to_low_rank` fit them to an exact model",
    "kernel": "",
    "proposal": "; `model.to_monte_carlo` adds it to an exact model, `proposal_epsilon=1` does without",
}


def check_parts(config: ITNetConfig, missing_keys: Iterable[str]) -> None:
    """Raises an error if a checkpoint has operators, but not the parameters of the mode that it is loaded for."""
    missing = {key.partition(".operator.")[2].partition(".")[0] for key in missing_keys if ".operator." in key}
    if "output" in missing:  # no operators at all: nothing was to be loaded
        return
    for name, remedy in _REMEDIES.items():
        if name in missing:
            raise ValueError(
                f"`integration_mode` ({config.integration_mode!r}) with `approximate_mode` "
                f"({config.approximate_mode!r}) needs `{name}`, which the checkpoint lacks{remedy}"
            )
