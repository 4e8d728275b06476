# SPDX-License-Identifier: Apache-2.0
"""The encoder of point clouds: points lie in space (s = 3), in any order."""

import torch
from torch import Tensor, nn

from configuration_itnet import ITNetConfig
from itnet_kernels.measure import uniform_measure
from itnet_kernels.transforms import may_look_at

from ..checks import check_mask, check_shape, input_dtype
from ..domain import Domain, Signal
from ..operator import ITNetFourierFeatures

_INFINITY_BITS = 0x7F800000  # of a float32


class ITNetPointCloudEncoder(nn.Module):
    """u(p_k) = W_pc [e(p_k); f_k] + b + local_k, at the raw coordinates p_k; uniform measure over the real points.

    e(p) is gamma(p), or p itself with ``point_embedding="raw"``; f_k are the ``point_feature_size`` features of a
    point beside its coordinates; local_k is :class:`ITNetLocalExtraction`, absent if ``local_neighbors`` is 0.
    """

    required = ("points",)
    optional = ("point_features", "attention_mask")
    main_input_name = "points"

    def __init__(self, config: ITNetConfig, position_size: int):
        super().__init__()
        self.uses_fourier = config.point_embedding == "fourier"
        self.feature_size = config.point_feature_size
        coordinate_size = position_size if self.uses_fourier else config.position_dim
        self.embedding = nn.Linear(coordinate_size + self.feature_size, config.hidden_size)
        self.embedding.initialization = "xavier"
        self.local = ITNetLocalExtraction(config) if config.local_neighbors else None
        self.dropout = nn.Dropout(config.embedding_dropout_prob)

    def input_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(
        self,
        fourier: ITNetFourierFeatures,
        points: Tensor,  # [B, n, 3]
        point_features: Tensor | None = None,  # [B, n, c]
        attention_mask: Tensor | None = None,  # [B, n]
    ) -> Signal:
        check_shape(points, "points", ["batch", "points", 3], note=" with at least one point")
        expected = [*points.shape[:2], self.feature_size] if self.feature_size else None
        given = None if point_features is None else list(point_features.shape)
        if given != expected:
            note = f"`point_feature_size` is {self.feature_size}"
            raise ValueError(f"`point_features` {given} must be {expected}: {note}")
        if point_features is not None and may_look_at(point_features) and not bool(point_features.isfinite().all()):
            raise ValueError("`point_features` holds numbers that are not finite")
        points, dtype = points.float(), input_dtype(self.embedding)
        mask = check_mask(attention_mask, *points.shape[:2])
        domain = Domain(points, uniform_measure(points, mask), fourier.frequencies, is_padded=mask is not None)
        features = domain.gamma(torch.float32) if self.uses_fourier else points
        if point_features is not None:
            features = torch.cat([features, point_features.float()], dim=-1)
        features = self.embedding(features.to(dtype))
        if self.local is not None:
            features = features + self.local(points, point_features, mask)
        return Signal(self.dropout(features), domain)


class ITNetLocalExtraction(nn.Module):
    """local_k = max over the K nearest points j of MLP([p_j - p_k; f_j - f_k]), each feature on its own: [B, n, d].

    A point is its own first neighbour; :func:`nearest_neighbors` says who follows among equals. Padding is nobody's
    neighbour; a cloud of fewer than K points uses them all. The MLP has one hidden layer of d units.
    """

    def __init__(self, config: ITNetConfig):
        super().__init__()
        self.num_neighbors = config.local_neighbors
        self.expand = nn.Linear(config.position_dim + config.point_feature_size, config.hidden_size)
        self.contract = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = nn.GELU()

    def forward(self, points: Tensor, point_features: Tensor | None, mask: Tensor | None) -> Tensor:
        """Turns points [B, n, 3] in float32, point_features [B, n, c] and a mask [B, n] into features [B, n, d]."""
        if point_features is not None:
            point_features = point_features.float()
        index, is_real = nearest_neighbors(points, self.num_neighbors, mask, point_features)  # [B, n, K]
        inputs = points if point_features is None else torch.cat([points, point_features], dim=-1)
        sample = torch.arange(points.shape[0], device=points.device)[:, None, None]
        differences = inputs[sample, index] - inputs.unsqueeze(2)  # [B, n, K, 3 + c]
        hidden = self.activation(self.expand(differences.to(input_dtype(self.expand))))
        local = self.contract(hidden)
        if is_real is not None:
            local = local.masked_fill(~is_real.unsqueeze(-1), torch.finfo(local.dtype).min)
        return local.amax(2)


def nearest_neighbors(
    points: Tensor, count: int, mask: Tensor | None = None, point_features: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Returns indices [B, n, K] of the K = min(count, n) points nearest to each of ``points``, the nearest first.

    A point comes before all others in its own list. Equal distances are settled by the coordinates of the points, and
    then by ``point_features`` [B, n, c]: the smaller first coordinate, then the second, and so on. So neither padding
    nor the order of the points decides who is a neighbour: what is left to the order are points that are the same.

    The second result [B, n, K] says which of them are real points by ``mask`` [B, n]; None if there is no mask.
    """
    points = points.detach().float()
    distances = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")  # [B, n, n]
    itself = torch.eye(points.shape[1], dtype=torch.bool, device=points.device)
    distances = distances.masked_fill(itself, -1.0)
    if mask is not None:
        distances = distances.masked_fill(mask.unsqueeze(1) == 0, torch.inf)
    # The bits of positive floats are in the order of the floats. With the rank of the point below them no two keys are
    # equal, and it does not matter which of equal values topk prefers.
    rank = lexicographic_rank(points if point_features is None else torch.cat([points, point_features], dim=-1))
    keys = (distances.view(torch.int32).long() << 32) + rank.unsqueeze(1)
    nearest = keys.topk(min(count, points.shape[1]), dim=-1, largest=False)
    return nearest.indices, None if mask is None else nearest.values < _INFINITY_BITS << 32


def lexicographic_rank(rows: Tensor) -> Tensor:
    """Returns the rank of every row [B, n, c] among its sample's, sorted by column 0, then 1, ...: [B, n]."""
    order = torch.arange(rows.shape[1], device=rows.device).expand(rows.shape[:2])
    for column in reversed(rows.unbind(-1)):
        order = order.gather(1, column.gather(1, order).argsort(dim=1, stable=True))
    return order.argsort(dim=1)
