# SPDX-License-Identifier: Apache-2.0
"""The kernel matrices K_ij of a model on given inputs: what diagnosis, spectrum and pictures are made of."""

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn

from itnet_kernels import KernelWeights, kernel_matrices
from itnet_kernels.exact.reference import pair_measure
from itnet_kernels.measure import over_mass
from itnet_kernels.positions import position_dtype

from ..domain import Signal
from ..integration.capture import operator_inputs
from ..integration.choice import requested_mode
from ..operator import ITNetOperator, find_operators

Part = Literal["full", "learned", "variation"]

# Numbers of the matrices K_ij that are in memory at a time: 64 MB in float32.
PIECE_ELEMENTS = 2**24


class LayerKernels:
    r"""K_ij = reshape(W2 GELU(W1 z_ij + b1) + b2) of one layer, at the signal that its operator was called with.

    The measure omega of each sample sums to 1 and is 0 on padding. omega_ij is the share of key j in what query i
    sees: omega_j, or in a causal model omega_j relative to the mass of the keys up to i. The edge gate of a graph is
    no part of K_ij.

    The kernel of a model with ``integration_mode="near_far"`` is the near one: query i sees the keys of its
    neighbourhood, with omega_ij = scale_i omega_j. The far field is no part of K_ij either.
    """

    def __init__(self, operator: ITNetOperator, call: Signal):
        features, domain = call
        self.heads = features.unflatten(-1, (operator.num_heads, -1))  # u [B, n, H, d_h]
        positions = domain.positions.view(-1, *domain.positions.shape[-2:])
        is_shared = bool((positions == positions[:1]).all())
        self.positions = positions[:1] if is_shared else positions  # [1 or B, n, s]
        measure = domain.measure.to(position_dtype(domain.measure.device))
        total = measure.sum(1, keepdim=True)  # 1, or the number of tokens where there is a cache
        self.measure = measure / total  # omega [B, n]
        self.weights: KernelWeights = operator.kernel(domain.frequencies)
        self.is_causal = operator.is_causal
        is_near = requested_mode(operator.config) == "near_far"
        self.near = domain.near(operator.config) if is_near else None
        self.near_scale = None if self.near is None else self.near.scale * total

    @cached_property
    def pair_measure(self) -> Tensor:
        """The measure omega_ij of every pair [B, n, n]."""
        if self.near is None:
            return pair_measure(self.measure, self.measure.shape[1], self.is_causal)
        weights = self.near_scale.unsqueeze(2) * self.measure.unsqueeze(1)
        return weights * self.near.pairs(self.measure.shape[1])

    @cached_property
    def visible(self) -> Tensor:
        """The pairs [B, n, n] of real positions of which query i sees key j."""
        return (self.pair_measure > 0) & (self.measure > 0).unsqueeze(2)

    def pieces(self, shift: Tensor | float = 0.0) -> Iterator[tuple[slice, Tensor]]:
        """Yields rows and K [B, t, n, H, d_h, d_h] of these queries, with all positions moved by ``shift`` [s]."""
        positions = self.positions + shift
        batch, count, num_heads, size = self.heads.shape
        step = max(1, PIECE_ELEMENTS // (batch * count * num_heads * size**2))
        for start in range(0, count, step):
            rows = slice(start, start + step)
            yield rows, kernel_matrices(self.heads[:, rows], self.heads, positions[:, rows], positions, self.weights)

    def subtract(self, constant: Tensor) -> None:
        """Takes a matrix per head [H or 1, d_h, d_h] away from all K_ij."""
        self.weights = self.weights._replace(b2=self.weights.b2 - constant.flatten(1))

    def weighted_sum(self, pair_weights: Tensor) -> Tensor:
        """Returns the sum over i and j of w_ij K_ij for weights [B, n, n], in float64: [B, H, d_h, d_h]."""
        weights = pair_weights.double()
        return sum(torch.einsum("bij,bijhac->bhac", weights[:, rows], k.double()) for rows, k in self.pieces())


def layer_kernels(
    model: nn.Module, inputs: Mapping[str, Tensor], *, layer: int | None = None, name: str = "inputs"
) -> list[LayerKernels]:
    """Runs the model on ``inputs`` in evaluation mode and returns the kernels of all layers, or of one ``layer``.

    The model is an ITNetModel or contains one (a task head, a PEFT or data-parallel wrapper). The inputs are keyword
    arguments of its forward, on its device; errors call them ``name``.
    """
    operators = find_operators(model)
    if not operators:
        raise ValueError(f"`model` ({type(model).__name__}) has no exact kernels: it has no ITNet layers")
    if layer is not None and not -len(operators) <= layer < len(operators):
        raise ValueError(f"`layer` ({layer}) is out of range: the model has {len(operators)} ITNet layers")
    chosen = range(len(operators)) if layer is None else [layer % len(operators)]
    for index in chosen:
        if operators[index].kernel is None:
            raise ValueError(f"layer {index} is low-rank: it has factors, and no exact kernels K_ij to look at")
    calls = operator_inputs(model, inputs, name)
    return [LayerKernels(operators[index], calls[index]) for index in chosen]


@torch.no_grad()
def kernel_norms(model: nn.Module, inputs: Mapping[str, Tensor], layer: int = -1, part: Part = "full") -> Tensor:
    r"""Computes Frobenius norms of the kernel of one layer, for every head and every pair of positions of ``inputs``.

    The kernel is evaluated at the features that the layer really sees. The norm is that of

    - ``"full"``: K_ij itself. b2, which starts as the identity, is part of it and may outweigh what differs from pair
      to pair: an identity kernel has norm sqrt(d_h) everywhere.
    - ``"learned"``: K_ij - b2 = W2 GELU(.), what the pair's positions and features add to the constant kernel.
    - ``"variation"``: K_ij - sum_j omega_ij K_ij / sum_j omega_ij, by which query i tells its keys apart; 0 if it
      takes a plain mean.

    Arguments are those of :func:`layer_kernels`. Returns ``[B, H, n, n]`` by sample, head, query i and key j, in
    float32 at least, and 0 where query i does not see key j: padding, the future in a causal model, and with
    ``integration_mode="near_far"`` keys that are not near. The image models' [CLS] is position 0.
    """
    if part not in ("full", "learned", "variation"):
        raise ValueError(f"`part` ({part!r}) must be 'full', 'learned' or 'variation'")
    (kernels,) = layer_kernels(model, inputs, layer=layer)
    if part == "learned":
        kernels.subtract(kernels.weights.b2.unsqueeze(-1))
    omega, norms = kernels.pair_measure, []
    shares = over_mass(omega, omega.sum(-1, keepdim=True))
    for rows, matrices in kernels.pieces():
        if part == "variation":
            mean = torch.einsum("bij,bijhac->bihac", shares[:, rows].to(matrices.dtype), matrices)
            matrices = matrices - mean.unsqueeze(2)
        norms.append(torch.linalg.matrix_norm(matrices))  # [B, t, n, H]
    return (torch.cat(norms, dim=1) * (omega > 0).unsqueeze(-1)).permute(0, 3, 1, 2)
