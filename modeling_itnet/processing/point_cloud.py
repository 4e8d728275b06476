# SPDX-License-Identifier: Apache-2.0
"""Turns point clouds into padded batches: it samples, normalises, and augments as in Table hp_modelnet."""

from typing import Any

import numpy as np
from transformers.feature_extraction_utils import BatchFeature, FeatureExtractionMixin

from .common import CheckedSettings, as_array, stack, stack_mask


class ITNetPointCloudProcessor(CheckedSettings, FeatureExtractionMixin):
    """
    Turns point clouds into the inputs of ITNet models with `modality="point_cloud"`.

    Args:
        num_points: Larger clouds are thinned out to this many points, chosen at random. Smaller ones keep all of
            theirs and are padded. `None` keeps every point.
        do_normalize: Move the mean of each cloud to 0 and its farthest point to distance 1.
        scale_range: Range of the random scale factor, one per cloud.
        jitter_std: Standard deviation of the noise added to every coordinate.
        do_rotate: Rotate each cloud about the gravity axis by a random angle.
        gravity_axis: The axis that points up: 0, 1 or 2 for x, y, z.
        features_are_normals: The first three point features are a vector that turns with the cloud.
    """

    model_input_names = ["points", "point_features", "attention_mask"]

    def __init__(
        self,
        num_points: int | None = 1024,
        do_normalize: bool = True,
        scale_range: tuple[float, float] = (0.8, 1.25),
        jitter_std: float = 0.01,
        do_rotate: bool = True,
        gravity_axis: int = 2,
        features_are_normals: bool = False,
        **kwargs,
    ):
        self.check_settings(kwargs)
        if num_points is not None and num_points < 1:
            raise ValueError(f"`num_points` ({num_points}) must be at least 1, or None for all points")
        if gravity_axis not in (0, 1, 2):
            raise ValueError(f"`gravity_axis` ({gravity_axis}) must be 0, 1 or 2")
        if np.shape(scale_range) != (2,) or not 0 < scale_range[0] <= scale_range[1] < np.inf:
            raise ValueError(f"`scale_range` ({scale_range}) must be (lowest, highest), both positive and finite")
        if not 0 <= jitter_std < np.inf:
            raise ValueError(f"`jitter_std` ({jitter_std}) must be zero or more, and finite")
        self.num_points, self.do_normalize = num_points, do_normalize
        self.scale_range, self.jitter_std = list(scale_range), jitter_std
        self.do_rotate, self.gravity_axis = do_rotate, gravity_axis
        self.features_are_normals = features_are_normals
        super().__init__(**kwargs)

    def __call__(
        self,
        points: Any,
        point_features: Any = None,
        augment: bool = False,
        generator: np.random.Generator | None = None,
        return_tensors: str | None = None,
    ) -> BatchFeature:
        """
        Args:
            points: Coordinates `[n, 3]` of one cloud, or a list (or array `[B, n, 3]`) of clouds.
            point_features: What points carry beside their coordinates, `[n, c]` each, in the form of `points`.
            augment: Scale, jitter and rotate, for training.
            generator: Source of all randomness. Without one, augmentation differs from call to call, and the choice of
                points without augmentation is always the same.
            return_tensors: `"pt"` or `"np"`.

        Returns:
            `points` `[B, n, 3]`, `attention_mask` `[B, n]`, and `point_features` `[B, n, c]` if given.
        """
        clouds = _as_clouds(points, "points")
        if point_features is None:
            features = [np.zeros((len(cloud), 0)) for cloud in clouds]
        else:
            features = _as_clouds(point_features, "point_features")
        if len(features) != len(clouds):
            raise ValueError(f"`point_features` holds {len(features)} clouds, but `points` {len(clouds)}")
        generator = generator or np.random.default_rng(None if augment else 0)
        done = []
        for index, (cloud, feature) in enumerate(zip(clouds, features, strict=True)):
            _check(cloud, [None, 3], f"`points` of cloud {index}")
            _check(feature, [len(cloud), None], f"`point_features` of cloud {index}")
            done.append(self._process(cloud.astype(np.float64), feature, augment, generator))
        clouds, features = zip(*done, strict=True)
        data = {"points": stack(clouds), "attention_mask": stack_mask(clouds)}
        if point_features is not None:
            data["point_features"] = stack(features)
        return BatchFeature(data, tensor_type=return_tensors)

    def _process(self, points: np.ndarray, features: np.ndarray, augment: bool, generator):
        """Returns one cloud [n, 3] and its features [n, c], which may be none (c = 0), as the model gets them."""
        if self.num_points is not None and len(points) > self.num_points:
            chosen = generator.choice(len(points), self.num_points, replace=False)
            points, features = points[chosen], features[chosen]
        if self.do_normalize:
            points = points - points.mean(axis=0)
            points = points / max(np.linalg.norm(points, axis=1).max(), np.finfo(np.float32).tiny)
        if augment:
            points = points * generator.uniform(*self.scale_range)
            if self.do_rotate:
                rotation = _rotation(generator.uniform(0, 2 * np.pi), self.gravity_axis)
                points = points @ rotation.T
                if self.features_are_normals and features.size:
                    features = np.concatenate([features[:, :3] @ rotation.T, features[:, 3:]], axis=1)
            points = points + self.jitter_std * generator.standard_normal(points.shape)
        return points.astype(np.float32), features.astype(np.float32)


def _rotation(angle: float, axis: int) -> np.ndarray:
    """Returns the rotation matrix [3, 3] about a coordinate axis."""
    cosine, sine = np.cos(angle), np.sin(angle)
    about_z = np.array([[cosine, -sine, 0], [sine, cosine, 0], [0, 0, 1]])
    return np.roll(about_z, axis + 1, axis=(0, 1))


def _as_clouds(values: Any, name: str) -> list[np.ndarray]:
    """Makes a list of arrays [n, c] out of one, of a list of them, or of an array [B, n, c]."""
    if isinstance(values, (list, tuple)) and len(values) and np.ndim(values[0]) == 2:
        return [as_array(cloud, f"`{name}` of cloud {index}") for index, cloud in enumerate(values)]
    array = as_array(values, f"`{name}`")
    if array.ndim == 2:
        return [array]
    if array.ndim != 3 or len(array) == 0:
        size = 3 if name == "points" else "features"
        raise ValueError(f"`{name}` {list(array.shape)} must be [points, {size}], or a list of such arrays")
    return list(array)


def _check(array: np.ndarray, shape: list[int | None], name: str) -> None:
    """Says what is wrong with an array [points, numbers] that must have this shape, where None is any number."""
    if array.ndim != 2 or any(size not in (None, given) for size, given in zip(shape, array.shape, strict=True)):
        expected = ", ".join(str(size or word) for size, word in zip(shape, ("points", "features"), strict=True))
        raise ValueError(f"{name} must be [{expected}], got {list(array.shape)}")
    if len(array) == 0:
        raise ValueError(f"{name} is empty; at least one point is needed")
    bad = np.flatnonzero(~np.isfinite(array).all(axis=1))
    if len(bad):
        raise ValueError(f"{name} are not finite, at point {bad[0]} of {len(array)}")
