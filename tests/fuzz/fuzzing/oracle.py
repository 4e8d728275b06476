r"""The operator in float64, by the equations of the paper alone: nothing here imports the package.

    z_ij   = [gamma(x_i); gamma(y_j); gamma(x_i - y_j); |x_i - y_j|; u_i; u_j; u_i * u_j]      Eq. kernel_input
    K_ij   = reshape(W2 GELU(W1 z_ij + b1) + b2)                                                Eq. kernel_mlp
    out_i  = sum_j omega_ij K_ij u_j,    omega_ij = omega_j, or omega_j / sum_{j visible} omega_j if causal

Every function takes a :class:`Rounding`, which makes the errors that arithmetic of a lower precision would: the spread
of results under it is what an implementation is allowed.
"""

import itertools
import math

import torch
from torch import Tensor

GROUPS = ("x", "y", "x-y", "distance", "u_x", "u_y", "u_x*u_y")


class Rounding:
    """Random relative errors of the given size in everything that is computed; 0 computes exactly.

    ``positions`` is the size of errors in coordinates, which are kept in a higher precision than features.
    """

    def __init__(self, size: float = 0.0, positions: float = 0.0, seed: int = 0):
        self.size, self.position_size = size, positions
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, tensor: Tensor) -> Tensor:
        return self._disturbed(tensor, self.size)

    def coordinate(self, tensor: Tensor) -> Tensor:
        """A coordinate that is as exact as ``positions`` says, while what flows back through it is not."""
        return self.backward(self._disturbed(tensor, self.position_size))

    def backward(self, tensor: Tensor) -> Tensor:
        """The tensor itself, and errors in its gradient: of sums whose terms cancel."""
        if self.size == 0:
            return tensor
        error = self(tensor) - tensor
        return tensor + (error - error.detach())

    def _disturbed(self, tensor: Tensor, size: float) -> Tensor:
        if size == 0:
            return tensor
        return tensor * (1 + size * torch.randn(tensor.shape, generator=self.generator, dtype=tensor.dtype))


EXACT = Rounding()


def gelu(x: Tensor, r: Rounding = EXACT) -> Tensor:
    """x Phi(x). Far below 0 the sum cancels: float32 leaves 1e-7 of x, which is far more than 1e-7 of the result."""
    return 0.5 * x * (1 + r(torch.erf(x / math.sqrt(2))))


def gamma(x: Tensor, frequencies: Tensor) -> Tensor:
    """[sin 2 pi B x; cos 2 pi B x]; the coordinates themselves without frequencies."""
    if frequencies.shape[0] == 0:
        return x
    angle = 2 * math.pi * (x.unsqueeze(-2) * frequencies).sum(-1)
    return torch.cat([torch.sin(angle), torch.cos(angle)], -1)


def length(v: Tensor) -> Tensor:
    """|v|, with the gradient 0 at 0."""
    square = (v * v).sum(-1, keepdim=True)
    return torch.where(square > 0, square.where(square > 0, 1).sqrt(), 0)


def pair_inputs(u_x: Tensor, u_y: Tensor, x: Tensor, y: Tensor, frequencies: Tensor, inputs, r: Rounding) -> Tensor:
    """z of pairs: u_x, u_y [B, n_q, n_k, H, d], x, y [B, n_q, n_k, s] -> [B, n_q, n_k, H, columns]."""
    x, y = r.coordinate(x), r.coordinate(y)
    groups = {
        "x": lambda: gamma(x, frequencies),
        "y": lambda: gamma(y, frequencies),
        "x-y": lambda: gamma(x - y, frequencies),
        "distance": lambda: length(x - y),
        "u_x": lambda: u_x,
        "u_y": lambda: u_y,
        "u_x*u_y": lambda: u_x * u_y,
    }
    columns = []
    for name in GROUPS:
        if name in inputs:
            group = groups[name]()
            columns.append(r(group if name.startswith("u_") else group.unsqueeze(3).expand(*u_x.shape[:4], -1)))
    return torch.cat(columns, -1) if columns else u_x.new_zeros(*u_x.shape[:4], 0)


DIRECTIONS = "w2_directions", "b2_directions"


def kernel_values(u_x, u_y, x, y, weights: dict, inputs, r: Rounding) -> Tensor:
    """K_ij u_j of pairs, as in :func:`pair_inputs`: [B, n_q, n_k, H, d]."""
    z = pair_inputs(u_x, u_y, x, y, weights["fourier"], inputs, r)
    hidden = r(gelu(r(torch.einsum("...c,kc->...k", z, r(weights["w1"])) + r(weights["b1"])), r))
    if weights.get("w_mid") is not None:
        hidden = r(gelu(r(torch.einsum("...c,kc->...k", hidden, r(weights["w_mid"])) + r(weights["b_mid"])), r))
    heads, size = u_x.shape[-2:]
    w2, b2 = (r(t.expand(heads, *t.shape[1:])) for t in (weights["w2"], weights["b2"]))
    matrices = torch.einsum("bijhk,hok->bijho", hidden, w2) + b2  # row-major d x d
    if weights.get("w2_directions") is not None:
        displacement = r.coordinate(x) - r.coordinate(y)  # [B, n_q, n_k, s]
        for k in range(displacement.shape[-1]):
            w2, b2 = (r(weights[name][:, k].expand(heads, *weights[name].shape[2:])) for name in DIRECTIONS)
            own = torch.einsum("bijhk,hok->bijho", hidden, w2) + b2
            matrices = matrices + displacement[..., k, None, None] * own
    return r(torch.einsum("bijhac,bijhc->bijha", r(matrices.unflatten(-1, (size, size))), u_y))


def pair_measure(measure: Tensor, num_queries: int, is_causal: bool, r: Rounding = EXACT) -> Tensor:
    """omega_ij [B, n_q, n_k]: query i sees the keys j <= i + n_k - n_q of a causal operator."""
    batch, num_keys = measure.shape
    if not is_causal:
        return measure[:, None].expand(batch, num_queries, num_keys)
    rows = []
    for i in range(num_queries):
        seen = i + num_keys - num_queries + 1
        mass = r.backward(measure[:, :seen]).sum(1, keepdim=True)
        part = torch.where(mass > 0, r.backward(measure[:, :seen]) / mass.where(mass > 0, 1), 0)
        rows.append(torch.cat([part, torch.zeros_like(measure[:, seen:])], 1))
    return torch.stack(rows, 1)


def over_pairs(tensor: Tensor, batch: int, axis: int, count: int) -> Tensor:
    """[n, ...] or [B or 1, n, ...] repeated along the other axis of pairs: [B, n_q, n_k, ...]."""
    tensor = tensor.unsqueeze(0) if tensor.dim() == 2 else tensor
    tensor = tensor.expand(batch, *tensor.shape[1:]).unsqueeze(axis)
    shape = list(tensor.shape)
    shape[axis] = count
    return tensor.expand(shape)


def transform(t: dict, inputs, is_causal: bool, r: Rounding = EXACT, pairs: Tensor | None = None) -> Tensor:
    """The integral operator: tensors u, positions, measure (or None), queries, query_positions and the weights.

    ``pairs`` [B or 1, n_q, n_k] says which pairs count; None is all of them.
    """
    u, x_k = t["u"], t["positions"]
    u_q, x_q = (u, x_k) if t.get("queries") is None else (t["queries"], t["query_positions"])
    batch, num_keys, num_queries = u.shape[0], u.shape[1], u_q.shape[1]
    measure = u.new_full((batch, num_keys), 1 / num_keys) if t.get("measure") is None else t["measure"]
    values = kernel_values(
        over_pairs(r(u_q), batch, 2, num_keys),
        over_pairs(r(u), batch, 1, num_queries),
        over_pairs(x_q, batch, 2, num_keys),
        over_pairs(x_k, batch, 1, num_queries),
        t,
        inputs,
        r,
    )
    omega = pair_measure(measure, num_queries, is_causal, r)
    omega = omega if pairs is None else omega * pairs
    return r(torch.einsum("bij,bijha->biha", r(omega), values))


def listed(t: dict, inputs, indices: Tensor, r: Rounding = EXACT) -> Tensor:
    """K_ij u_j of listed keys j = indices[i, m] only: [B, n_q, M, H, d]."""
    u, x_k = t["u"], t["positions"]
    u_q, x_q = (u, x_k) if t.get("queries") is None else (t["queries"], t["query_positions"])
    batch, count = u.shape[0], indices.shape[2]
    x_k = x_k.expand(batch, *x_k.shape[-2:])
    rows = torch.arange(batch)[:, None, None]
    return kernel_values(
        over_pairs(r(u_q), batch, 2, count),
        r(u)[rows, indices],
        over_pairs(x_q, batch, 2, count),
        x_k[rows, indices],
        t,
        inputs,
        r,
    )


def low_rank(u, phi, psi, bias, omega, r: Rounding = EXACT, decay: Tensor | None = None) -> Tensor:
    """sum_j omega_ij (Phi_i^T Psi_j + bias) u_j: phi [B, n_q, H, r, d], psi [B, n, H, r, d], omega [B, n_q, n].

    ``decay`` [B, n_q, n, H, r] is multiplied to the terms of Phi_i^T Psi_j.
    """
    terms = torch.einsum("bihra,bjhrc->bijhrac", r(phi), r(psi))
    kernels = (terms if decay is None else decay[..., None, None] * terms).sum(-3)
    kernels = kernels if bias is None else kernels + r(bias)
    return r(torch.einsum("bij,bijhac,bjhc->biha", r(omega), kernels, r(u)))


def low_rank_matrix(u, f, g, matrices, bias, omega, r: Rounding = EXACT, decay: Tensor | None = None) -> Tensor:
    """sum_j omega_ij (sum_r f_i[r] g_j[r] M_r + bias) u_j: f, g [B, n, H, r], matrices [H, r, d, d]."""
    products = torch.einsum("bihr,bjhr->bijhr", r(f), r(g))
    products = products if decay is None else decay * products
    kernels = torch.einsum("bijhr,hrac->bijhac", products, r(matrices)) + r(bias)
    return r(torch.einsum("bij,bijhac,bjhc->biha", r(omega), kernels, r(u)))


def windows(layout, real: Tensor, size: int, is_causal: bool) -> Tensor:
    """Which keys are near on grids, one after the other: [B, n, n], by the rules of docs/integration.md, one by one.

    ``real`` [B, n] are the positions that exist; a shape of () is [CLS], which sees everything and lies in the middle
    of the planes.
    """
    rows = []
    for exists in real:
        places = []  # of every position: its grid, and where it is in it
        for number, shape in enumerate(layout):
            if len(shape) == 1:
                begin = len(places)
                places += [(number, (int(exists[begin : begin + k].sum()),)) for k in range(shape[0])]
            else:
                places += [(number, place) for place in itertools.product(*map(range, shape))]
        table = torch.zeros(len(places), len(places), dtype=torch.float64)
        for i, (grid, x) in enumerate(places):
            side = math.isqrt(size) if len(x) == 2 else size
            back, ahead = (size - 1, 0) if is_causal else (side // 2, side // 2)
            for j, (other, y) in enumerate(places):
                if not x:
                    near = True
                elif not y:
                    near = len(x) == 2 and all(
                        2 * abs(k - n / 2 + 0.5) <= side for k, n in zip(x, layout[grid], strict=True)
                    )
                else:
                    near = grid == other and all(-ahead <= a - b <= back for a, b in zip(x, y, strict=True))
                table[i, j] = float(near and bool(exists[j]))
        rows.append(table)
    return torch.stack(rows)
