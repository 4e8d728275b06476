"""From dL/dP to the gradients of positions and of the weights that meet them, for several samples at once."""

import torch
from torch import Tensor

from ...first_layer import key_factors, length
from ..pair_inputs import POSITIONS, PairInputs


def of_samples(tensor: Tensor, samples: slice) -> Tensor:
    """What belongs to some samples, in a tensor [B, ...] or [1, ...] that all samples share."""
    return tensor if len(tensor) == 1 else tensor[samples]


def add_position_gradients(
    inputs: PairInputs, samples: slice, rows: slice, grad: Tensor, grads: dict[str, Tensor]
) -> None:
    """Adds a tile's part to every gradient in ``grads``, given its dL/dP [b, t, w, n_k] in float32.

    The tile has queries ``rows`` of ``samples``; b = 1 if the batch shares its positions, and dL/dP is summed over it.
    ``grads`` go by the names of :class:`PairInputs`, and hold positions and features or none of them. Products with
    gamma(y) are taken in bfloat16 if the operands are.
    """
    w_y, w_relative, w_distance = inputs.position_weights
    x, y, gamma_x, gamma_y = (of_samples(getattr(inputs, name), samples) for name in POSITIONS)
    x, gamma_x = x[:, rows], gamma_x[:, rows]
    needs_positions = "key_positions" in grads

    def add(name: str, part: Tensor) -> None:  # [b, n, .]
        target = of_samples(grads[name], samples)
        target = target[:, rows] if name.startswith("query") else target
        target += part.sum(0, keepdim=True) if len(target) < len(part) else part

    if w_y is not None or (w_relative is not None and inputs.has_frequencies):
        dtype = torch.bfloat16 if inputs.operand_dtype == torch.bfloat16 else grad.dtype
        by_rows = grad.flatten(1, 2)  # [b, t * w, n_k]
        grad_factors = (by_rows.to(dtype) @ gamma_y.to(dtype)).to(grad.dtype).view(*grad.shape[:3], -1)
        if needs_positions:
            factors = key_factors(inputs.position_weights, gamma_x, inputs.has_frequencies)
            is_whole = factors.dim() > 2
            add("key_features", by_rows.mT @ factors.flatten(1, 2) if is_whole else grad.sum(1).mT @ factors)
        if w_y is not None:
            grads["w_y"] += grad_factors.sum((0, 1))
        if w_relative is not None and inputs.has_frequencies:
            _rotation_backward(w_relative, gamma_x, grad_factors, grads, add)
    is_raw = w_relative is not None and not inputs.has_frequencies
    if not is_raw and w_distance is None:
        return
    differences = x.unsqueeze(2) - y.unsqueeze(1)  # [b, t, n_k, s]
    if is_raw:
        grads["w_relative"] += (grad @ differences.to(grad.dtype)).sum((0, 1))
        if needs_positions:
            add("query_positions", grad.sum(3) @ w_relative)
            add("key_positions", -grad.sum(1).mT @ w_relative)
    if w_distance is not None:
        lengths = length(differences).to(grad.dtype).unsqueeze(-1)  # [b, t, n_k, 1]
        grads["w_distance"] += (grad @ lengths).sum((0, 1))
        if needs_positions:
            pull = torch.einsum("btkj,kd->btjd", grad, w_distance)  # [b, t, n_k, 1]
            pull = torch.where(lengths > 0, pull / lengths, 0) * differences  # the gradient of |v| at 0 is 0
            add("query_positions", pull.sum(2))
            add("key_positions", -pull.sum(1))


def _rotation_backward(w_relative: Tensor, gamma_x: Tensor, grad: Tensor, grads: dict[str, Tensor], add) -> None:
    """Through :func:`rotate`, C = [W_c s - W_s c ; W_s s + W_c c], given dL/dC [b, t, w, 2L]."""
    sine, cosine = gamma_x.unsqueeze(2).chunk(2, dim=-1)  # [b or 1, t, 1, L]
    w_sine, w_cosine = w_relative.chunk(2, dim=-1)  # [w, L]
    top, bottom = grad.chunk(2, dim=-1)  # [b, t, w, L]
    # Not einsum: it would make a batch of L matrix-vector products of these.
    parts = (bottom * sine).addcmul_(top, cosine, value=-1), (top * sine).addcmul_(bottom, cosine)
    grads["w_relative"] += torch.cat([part.sum((0, 1)) for part in parts], dim=-1)
    if "query_features" in grads:
        parts = (top * w_cosine).addcmul_(bottom, w_sine), (bottom * w_cosine).addcmul_(top, w_sine, value=-1)
        add("query_features", torch.cat([part.sum(2) for part in parts], dim=-1))
