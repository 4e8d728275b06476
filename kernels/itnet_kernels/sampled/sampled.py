"""The operator over a few chosen keys per query: samples, the edges of a graph, or any other list of pairs.

    out_i = sum_m c_im K_ij u_j,   j = indices[i, m]

reassociated as the exact operator is (integral_transform.py), with the keys gathered per query:

    pre_im[k] = q_i[k] + Q_i[k] . u_j + P_ij[k]
    A_i[k, c] = sum_m GELU(pre_im[k]) c_im u_j[c]
    out_i[a]  = sum_{k,c} W2[(a, c), k] A_i[k, c] + sum_m c_im (b2 u_j)[a]

which costs n M w d_h multiply-adds per head and product. Queries are processed in tiles that the backward evaluates
again, so that memory beyond inputs and output does not grow with n.
"""

import torch
from torch import Tensor
from torch.nn.functional import gelu

from ..backends import Backend, matmul_dtype, resolve_backend
from ..directions import along_directions
from ..first_layer import PositionWeights, position_row, position_term
from ..per_head import by_head
from ..positions import Coordinates
from ..transforms import recomputed
from ..validation import check_indices, check_operands
from ..weights import KernelWeights, split_input_weights
from .list_sum import ListInputs, list_sum

# Elements of one [samples, queries, heads, w, M] tile of pre-activations: 16 MB in float32.
_TILE_ELEMENTS = 2**22


def sampled_transform(
    u: Tensor,
    positions: Tensor | Coordinates,
    weights: KernelWeights,
    *,
    indices: Tensor,
    coefficients: Tensor,
    queries: Tensor | None = None,
    query_positions: Tensor | Coordinates | None = None,
    backend: Backend = "auto",
) -> Tensor:
    r"""Lets each query integrate over its own list of keys, with weights of its own:

        out_i^(h) = sum_m c_im K_{i, j(i,m)}^(h) u_{j(i,m)}^(h)

    The result is ``[B, n_q, H, d_h]`` in the dtype of the queries, and differentiable like that of
    :func:`integral_transform`, and in ``coefficients``.

    Args:
        u, positions, weights, queries, query_positions: as in :func:`integral_transform`.
        indices: keys of each query, ``[B, n_q, M]``, in [0, n). The same key may come twice.
        coefficients: c_im ``[B, n_q, M]``, of either sign; 0 for an entry that does not count.
        backend: as in :func:`integral_transform`; "reference" is "tiled" here.
    """
    settings = {"indices": indices, "coefficients": coefficients, "backend": backend}
    if weights.has_own_hidden:
        parts = by_head(sampled_transform, u, positions, weights, queries, query_positions, **settings)
        return torch.cat(parts, dim=2)
    if weights.w2_directions is not None:
        return along_directions(sampled_transform, u, positions, weights, queries, query_positions, **settings)
    queries, x, y = check_operands(u, positions, weights, queries, query_positions)
    check_indices(indices, u.shape[0], queries.shape[1], u.shape[1], coefficients=coefficients)
    if indices.shape[2] == 0:
        return torch.zeros_like(queries)
    return SampledPairs(queries, u, x, y, weights, backend).transform(indices, coefficients)


@torch.no_grad()
def integrand_norms(
    u: Tensor,
    positions: Tensor | Coordinates,
    weights: KernelWeights,
    *,
    indices: Tensor,
    queries: Tensor | None = None,
    query_positions: Tensor | Coordinates | None = None,
) -> Tensor:
    """Returns |K_ij u_j| over all heads, which the optimal proposal of Eq. app_optimal_proposal is proportional to.

    Arguments as in :func:`sampled_transform`; returns ``[B, n_q, M]``. A norm needs every K_ij u_j by itself, hence
    d_h times the work per pair of the reassociated sum: ask for few queries.
    """
    if weights.has_own_hidden:
        parts = by_head(integrand_norms, u, positions, weights, queries, query_positions, indices=indices)
        return torch.linalg.vector_norm(torch.stack(parts), dim=0)
    queries, x, y = check_operands(u, positions, weights, queries, query_positions)
    check_indices(indices, u.shape[0], queries.shape[1], u.shape[1])
    return SampledPairs(queries, u, x, y, weights).norms(indices)


class SampledPairs:
    """The operands of one call, in the dtype that they are multiplied in. b samples, t queries of a tile."""

    def __init__(
        self, queries: Tensor, keys: Tensor, x: Coordinates, y: Coordinates, weights: KernelWeights,
        backend: str = "tiled",
    ):  # fmt: skip
        self.backend, self.given = resolve_backend(backend, keys, weights), (queries, keys)
        self.operand_dtype = matmul_dtype(queries)
        self.out_dtype, dtype = queries.dtype, torch.promote_types(queries.dtype, torch.float32)
        self.queries, self.keys = queries.to(dtype), keys.to(dtype)
        self.weights = weights.to(dtype)
        self.num_heads, self.head_dim = keys.shape[2:]
        self.columns = split_input_weights(self.weights, self.head_dim)
        self.positions = x.exact, y.exact
        self.features = x.features_in(dtype), y.features_in(dtype)

    def transform(self, indices: Tensor, coefficients: Tensor) -> Tensor:
        coefficients = coefficients.to(self.queries.dtype)
        if self.backend == "triton":
            with torch.autocast(self.queries.device.type, enabled=False):
                inputs = self.list_inputs()._replace(indices=indices, coefficients=coefficients)
                return list_sum(inputs).to(self.out_dtype)
        out = self._by_tiles(self._transform_tile, self.weights.w1.shape[0], indices, coefficients)
        return out.to(self.out_dtype)

    def list_inputs(self) -> ListInputs:
        """Returns the arguments of ``itnet::list_sum`` without the lists. Features keep the dtype they came in."""
        columns, weights = self.columns, self.weights
        queries, keys = self.given
        return ListInputs(
            queries=queries,
            keys=keys,
            row=self._row(self.queries, self.features[0]).expand(*queries.shape[:3], -1),
            coefficients=None,
            query_positions=self.positions[0],
            key_positions=self.positions[1],
            query_features=self.features[0],
            key_features=self.features[1],
            w_y=columns["y"],
            w_relative=columns["x-y"],
            w_distance=columns["distance"],
            w_key=columns["u_y"],
            w_product=columns["u_x*u_y"],
            w2=weights.output_weight(self.head_dim).expand(self.num_heads, -1, -1),
            b2=weights.output_bias(self.head_dim).expand(self.num_heads, -1, -1),
            indices=None,
            has_frequencies=len(weights.fourier) > 0,
            operand_dtype=self.operand_dtype,
        )

    def norms(self, indices: Tensor) -> Tensor:
        return self._by_tiles(self._norms_tile, self.head_dim**2, indices)

    def _by_tiles(self, evaluate, width: int, indices: Tensor, *per_query: Tensor) -> Tensor:
        """Concatenates ``evaluate``, which holds ``width`` numbers of every pair and head, over tiles of queries; the
        backward evaluates them again.

        Everything is split, not sliced: the gradient of a slice is a zero tensor of the size of the whole.
        """
        batch, num_queries = self.queries.shape[:2]
        size = max(1, _TILE_ELEMENTS // (indices.shape[2] * self.num_heads * width))  # (sample, query) pairs
        in_queries = min(size, num_queries)
        in_batch = min(max(1, size // num_queries), batch)

        def by_samples(tensor):
            return tensor.split(in_batch) if tensor.shape[0] == batch else [tensor] * -(-batch // in_batch)

        by_queries = (self.queries, self.positions[0], self.features[0], indices, *per_query)
        by_keys = (self.keys, self.positions[1], self.features[1])
        rows = []
        with torch.autocast(self.queries.device.type, enabled=False):
            for group in zip(*(by_samples(tensor) for tensor in (*by_queries, *by_keys)), strict=True):
                of_queries, of_keys = group[: len(by_queries)], group[len(by_queries) :]
                tiles = zip(*(tensor.split(in_queries, dim=1) for tensor in of_queries), strict=True)
                rows.append(torch.cat([recomputed(evaluate, *tile, *of_keys) for tile in tiles], dim=1))
        return torch.cat(rows)

    def _transform_tile(self, queries, x, gamma_x, indices, coefficients, keys, y, gamma_y) -> Tensor:
        keys = take_keys(keys, indices).transpose(2, 3)  # [b, t, H, M, d_h]
        hidden = self._hidden(queries, x, gamma_x, indices, keys, y, gamma_y)  # [b, t, H, w, M]
        values = keys * coefficients[:, :, None, :, None]
        moments = (hidden @ values).flatten(-2)  # A [b, t, H, w * d_h]
        w2, b2 = self.weights.output_weight(self.head_dim), self.weights.output_bias(self.head_dim)
        per_head = "bthf,hfa->btha"  # heads that share their weights have a leading size of 1
        return torch.einsum(per_head, moments, w2) + torch.einsum(per_head, values.sum(3), b2)

    def _norms_tile(self, queries, x, gamma_x, indices, keys, y, gamma_y) -> Tensor:
        keys = take_keys(keys, indices).transpose(2, 3)
        hidden = self._hidden(queries, x, gamma_x, indices, keys, y, gamma_y).mT  # [b, t, H, M, w]
        matrices = hidden @ self.weights.w2.mT + self.weights.b2.unsqueeze(1)  # [b, t, H, M, d_h^2]
        if self.weights.w2_directions is not None:
            displacements = (x.unsqueeze(2) - take_keys(y, indices)).to(matrices.dtype)  # [b, t, M, s]
            for number, own in enumerate(displacements[:, :, None, :, :, None].unbind(-2)):
                w2, b2 = self.weights.w2_directions[:, number], self.weights.b2_directions[:, number]
                matrices = matrices + own * (hidden @ w2.mT + b2.unsqueeze(1))
        values = matrices.unflatten(-1, (self.head_dim, -1)) @ keys.unsqueeze(-1)  # [b, t, H, M, d_h, 1]
        return torch.linalg.vector_norm(values, dim=(2, 4, 5))

    def _row(self, queries: Tensor, gamma_x: Tensor) -> Tensor:
        """Returns q_i[k]: [b, t, H, w], with sizes of 1 where it is the same."""
        row = position_row(self.weights.b1, self.columns["x"], gamma_x)
        return row if self.columns["u_x"] is None else row + queries @ self.columns["u_x"].T

    def _hidden(self, queries, x, gamma_x, indices, keys, y, gamma_y) -> Tensor:
        """Returns the last hidden layer of the kernel MLP for every drawn pair: [b, t, H, w, M]."""
        columns, weights = self.columns, self.weights
        pre = self._row(queries, gamma_x).unsqueeze(-1)
        y, gamma_y = take_keys(y, indices), take_keys(gamma_y, indices)  # [b, t, M, s], [b, t, M, F]
        position_weights = PositionWeights(columns["y"], columns["x-y"], columns["distance"])
        bias = position_term(x, y, gamma_x, gamma_y, position_weights, len(weights.fourier) > 0)
        if bias is not None:  # [b, t, w, M]
            pre = pre + bias.unsqueeze(2)
        pre = pre.expand(*keys.shape[:3], -1, keys.shape[3])  # [b, t, H, w, M]
        virtual = columns["u_y"]  # Q_i[k]: [w, d_h] for all queries, or [b, t, H, w, d_h]
        if columns["u_x*u_y"] is not None:
            product = columns["u_x*u_y"] * queries.unsqueeze(-2)
            virtual = product if virtual is None else product + virtual
        if virtual is not None:
            virtual = virtual.expand(*keys.shape[:3], -1, -1).flatten(0, 2)
            product = torch.baddbmm(pre.flatten(0, 2), virtual, keys.flatten(0, 2).mT)
            pre = product.unflatten(0, keys.shape[:3])
        hidden = gelu(pre)
        if weights.w_mid is not None:
            hidden = gelu(weights.w_mid @ hidden + weights.b_mid[:, None])
        return hidden


def take_keys(tensor: Tensor, indices: Tensor) -> Tensor:
    """Returns the rows of [b or 1, n, ...] at indices [b, t, M]: [b, t, M, ...]."""
    if tensor.shape[0] > 1:
        offsets = torch.arange(0, tensor.shape[0] * tensor.shape[1], tensor.shape[1], device=indices.device)
        indices = indices + offsets[:, None, None]
    return tensor.flatten(0, 1).index_select(0, indices.flatten()).unflatten(0, indices.shape)
