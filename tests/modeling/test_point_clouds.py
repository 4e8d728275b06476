"""Point clouds: the encoder against its formula, neighbours against a brute-force loop, symmetries, the processor."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from modeling_itnet import ITNetForPointCloudClassification, ITNetModel, ITNetPointCloudProcessor
from modeling_itnet.encoders.point_cloud import nearest_neighbors


def assert_same(actual, expected, atol=1e-5):
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


class TestNeighbors:
    @pytest.mark.parametrize("count", [1, 4, 30, 50])
    def test_against_a_loop(self, count):
        points = torch.randn(2, 30, 3)
        index, is_real = nearest_neighbors(points, count)
        assert index.shape == (2, 30, min(count, 30))
        assert is_real is None
        for b in range(2):
            for i in range(30):
                distances = [(math.dist(points[b, i], points[b, j]), j) for j in range(30)]
                assert index[b, i].tolist() == [j for _, j in sorted(distances)[:count]]

    def test_padding_is_nobodys_neighbor(self):
        points = torch.zeros(1, 6, 3)
        points[0, :3] = torch.eye(3)
        mask = torch.tensor([[1, 1, 1, 0, 0, 0]])
        index, is_real = nearest_neighbors(points, 5, mask)
        assert is_real[0, :3].sum(1).tolist() == [3, 3, 3]
        assert all(set(index[0, i][is_real[0, i]].tolist()) == {0, 1, 2} for i in range(3))

    @pytest.mark.parametrize("padding", [0, 1, 8, 64])
    def test_equal_distances(self, padding):
        """A voxel grid, where ties decide: by distance, then coordinates, then features, whatever the order."""
        points, extra = voxels(4, scale=0.25), torch.randint(3, (64, 1)).float()
        points, extra = torch.cat([points, points[:9]]), torch.cat([extra, extra[:9] + 0.5])  # some points twice
        order = torch.randperm(len(points))
        points, extra = points[order], extra[order]
        rows = [tuple(row) for row in torch.cat([points, extra], dim=1).tolist()]
        expected = []
        for i, row in enumerate(rows):
            others = sorted((math.dist(row[:3], other[:3]), other, j) for j, other in enumerate(rows) if j != i)
            expected.append([i] + [j for *_, j in others[:3]])
        mask = (torch.arange(len(points) + padding) < len(points)).long().unsqueeze(0)
        padded, features = (F.pad(t, (0, 0, 0, padding)).unsqueeze(0) for t in (points, extra))
        index, is_real = nearest_neighbors(padded, 4, mask, features)
        assert index[0, : len(points)].tolist() == expected
        assert is_real[0, : len(points)].all()


def voxels(side, scale=1.0):
    """The side^3 points of a cubic grid; powers of two keep all coordinates and their differences exact."""
    return scale * torch.cartesian_prod(*[torch.arange(side)] * 3).float()


class TestEncoder:
    @pytest.mark.parametrize("feature_size", [0, 2])
    @pytest.mark.parametrize("embedding", ["fourier", "raw"])
    def test_features(self, tiny_config, shake, embedding, feature_size):
        config = tiny_config(
            "point_cloud", point_embedding=embedding, point_feature_size=feature_size, local_neighbors=0
        )
        model = shake(ITNetModel(config)).eval()
        points, extra = torch.randn(2, 9, 3), torch.randn(2, 9, feature_size) if feature_size else None
        inputs = points
        if embedding == "fourier":
            angles = 2 * math.pi * points.double() @ model.fourier.frequencies.double().T
            inputs = torch.cat([angles.sin(), angles.cos()], dim=-1).float()
        if extra is not None:
            inputs = torch.cat([inputs, extra], dim=-1)
        layer = model.encoder.embedding
        signal = model.encoder(model.fourier, points=points, **({"point_features": extra} if feature_size else {}))
        assert_same(signal.features, inputs @ layer.weight.T + layer.bias)
        assert torch.equal(signal.positions, points)  # raw coordinates go to the kernel
        assert_same(signal.measure, torch.full((2, 9), 1 / 9))

    def test_local_features_against_a_loop(self, tiny_config, shake):
        config = tiny_config("point_cloud", point_feature_size=2, local_neighbors=4)
        model = shake(ITNetModel(config)).eval()
        local = model.encoder.local
        points, extra = torch.randn(2, 9, 3), torch.randn(2, 9, 2)
        mask = torch.ones(2, 9)
        mask[1, 3:] = 0  # fewer than 4 points are left
        inputs = torch.cat([points, extra], dim=-1)
        actual = local(points, extra, mask)
        for b in range(2):
            real = [j for j in range(9) if mask[b, j]]
            for i in real:
                nearest = sorted(real, key=lambda j, b=b, i=i: math.dist(points[b, i], points[b, j]))[:4]
                best = torch.full((16,), -torch.inf)
                for j in nearest:
                    hidden = F.gelu(F.linear(inputs[b, j] - inputs[b, i], local.expand.weight, local.expand.bias))
                    best = torch.maximum(best, F.linear(hidden, local.contract.weight, local.contract.bias))
                assert_same(actual[b, i], best)

    def test_local_extraction_can_be_turned_off(self, tiny_config):
        assert ITNetModel(tiny_config("point_cloud", local_neighbors=0)).encoder.local is None

    def test_initialisation(self, tiny_config):
        """W_pc is Xavier uniform, the local MLP N(0, 0.02^2) (App. init)."""
        encoder = ITNetModel(tiny_config("point_cloud", hidden_size=256, num_fourier_features=32)).encoder
        bound = math.sqrt(6 / (64 + 256))
        weight = encoder.embedding.weight
        assert weight.abs().max() <= bound
        assert weight.abs().max() > 0.98 * bound
        for layer in (encoder.local.expand, encoder.local.contract):
            assert 0.018 < layer.weight.std() < 0.022
            assert not layer.bias.any()


class TestSymmetry:
    @pytest.mark.parametrize("mode", ["exact", "low_rank"])
    def test_order_of_the_points(self, tiny_config, shake, mode):
        config = tiny_config("point_cloud", local_neighbors=4, integration_mode=mode, rank=4)
        model = shake(ITNetForPointCloudClassification(config), 0.1).eval()
        points = torch.randn(2, 40, 3)
        order = torch.randperm(40)
        output = model(points=points, output_hidden_states=True)
        permuted = model(points=points[:, order], output_hidden_states=True)
        assert_same(permuted.logits, output.logits)
        for state, other in zip(output.hidden_states, permuted.hidden_states, strict=True):
            assert_same(other, state[:, order])

    @pytest.mark.parametrize("padding", [0, 1, 8, 64])
    @pytest.mark.parametrize("before", [False, True], ids=["right", "left"])
    def test_voxels(self, tiny_config, shake, padding, before):
        """Equal distances everywhere: neither padding nor the order of the points changes anything."""
        model = shake(ITNetForPointCloudClassification(tiny_config("point_cloud", local_neighbors=4)), 0.3).eval()
        points = voxels(4, scale=0.25).unsqueeze(0)
        expected = model(points=points).logits
        order = torch.randperm(64)
        pad = (0, 0, padding, 0) if before else (0, 0, 0, padding)
        mask = F.pad(torch.ones(1, 64).long(), pad[2:])
        actual = model(points=F.pad(points[:, order], pad, value=0.25), attention_mask=mask).logits
        assert_same(actual, expected, atol=1e-4)

    def test_the_points_matter(self, tiny_config, shake):
        model = shake(ITNetForPointCloudClassification(tiny_config("point_cloud", local_neighbors=4)), 0.1).eval()
        points = torch.randn(2, 40, 3)
        assert (model(points=points).logits - model(points=points * 1.1).logits).abs().max() > 1e-3


class TestErrors:
    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"points": torch.randn(2, 5, 2)}, r"`points` \[2, 5, 2\] must be \[batch, points, 3\]"),
            ({"points": torch.randn(2, 0, 3)}, "at least one point"),
            ({"points": torch.full((1, 2, 3), torch.nan)}, "not finite"),
            ({"points": torch.randn(1, 2, 3), "point_features": torch.randn(1, 2, 1)}, "`point_feature_size` is 0"),
            ({"points": torch.randn(1, 2, 3), "input_ids": torch.ones(1, 2).long()}, r"\['input_ids'\] was given"),
        ],
    )
    def test_bad_input(self, tiny_config, given, message):
        with pytest.raises(ValueError, match=message):
            ITNetModel(tiny_config("point_cloud"))(**given)


class TestProcessor:
    def cloud(self, count=50, seed=0):
        return np.random.default_rng(seed).normal(size=(count, 3)) * 5 + 3

    def test_unit_sphere(self):
        batch = ITNetPointCloudProcessor(num_points=None)([self.cloud(), self.cloud(20, 1)], return_tensors="pt")
        assert batch["attention_mask"].sum(1).tolist() == [50, 20]
        for points, count in zip(batch["points"], (50, 20), strict=True):
            assert points[:count].mean(0).abs().max() < 1e-6
            assert abs(points[:count].norm(dim=1).max() - 1) < 1e-6
            assert not points[count:].any()

    def test_sampling_takes_points_of_the_cloud(self):
        cloud = self.cloud(200)
        processor = ITNetPointCloudProcessor(num_points=64, do_normalize=False)
        points = processor(cloud)["points"][0]
        assert points.shape == (64, 3)
        assert len(np.unique(points, axis=0)) == 64
        rows = {tuple(row) for row in cloud.astype(np.float32)}
        assert all(tuple(row) in rows for row in points)
        np.testing.assert_array_equal(points, processor(cloud)["points"][0])  # evaluation repeats itself

    def test_features_follow_their_points(self):
        cloud = self.cloud(200)
        batch = ITNetPointCloudProcessor(num_points=64, do_normalize=False)(cloud, cloud * 2)
        np.testing.assert_allclose(batch["point_features"], batch["points"] * 2, rtol=1e-6)

    def test_rotation_keeps_height_and_distances(self):
        cloud = self.cloud()
        processor = ITNetPointCloudProcessor(None, scale_range=(1, 1), jitter_std=0.0, features_are_normals=True)
        plain = processor(cloud, cloud)["points"][0]
        turned = processor(cloud, plain[None], augment=True)
        points = turned["points"][0]
        np.testing.assert_allclose(points[:, 2], plain[:, 2], atol=1e-6)
        np.testing.assert_allclose(np.linalg.norm(points, axis=1), np.linalg.norm(plain, axis=1), atol=1e-6)
        assert np.abs(points - plain).max() > 1e-2
        np.testing.assert_allclose(turned["point_features"][0], points, atol=1e-5)  # normals turn along

    def test_scale_and_jitter(self):
        cloud, generator = self.cloud(2000), np.random.default_rng(0)
        scaled = ITNetPointCloudProcessor(None, jitter_std=0.0, do_rotate=False)
        plain = scaled(cloud)["points"][0]
        factors = [(scaled(cloud, augment=True, generator=generator)["points"][0] / plain)[0, 0] for _ in range(200)]
        assert 0.8 <= min(factors) < 0.85
        assert 1.2 < max(factors) <= 1.25
        jittered = ITNetPointCloudProcessor(None, scale_range=(1, 1), do_rotate=False)
        noise = jittered(cloud, augment=True, generator=generator)["points"][0] - plain
        assert abs(noise.std() - 0.01) < 5e-4

    def test_save_and_load(self, tmp_path):
        processor = ITNetPointCloudProcessor(num_points=8, gravity_axis=1, jitter_std=0.5)
        processor.save_pretrained(tmp_path)
        loaded = ITNetPointCloudProcessor.from_pretrained(tmp_path)
        assert loaded.to_dict() == processor.to_dict()
        np.testing.assert_array_equal(loaded(self.cloud())["points"], processor(self.cloud())["points"])

    @pytest.mark.parametrize(
        ("points", "message"),
        [
            (np.zeros((0, 3)), "`points` of cloud 0 is empty"),
            ([np.ones((4, 3)), np.full((2, 3), np.nan)], "`points` of cloud 1 are not finite, at point 0 of 2"),
            (np.zeros((4, 2)), r"must be \[points, 3\], got \[4, 2\]"),
            (np.array([["a", "b", "c"]]), "must hold numbers"),
            (np.zeros(3), r"`points` \[3\] must be \[points, 3\]"),
        ],
    )
    def test_bad_clouds(self, points, message):
        with pytest.raises(ValueError, match=message):
            ITNetPointCloudProcessor()(points)

    def test_bad_features(self):
        with pytest.raises(ValueError, match=r"must be \[4, features\], got \[3, 1\]"):
            ITNetPointCloudProcessor()(np.ones((4, 3)), np.ones((3, 1)))

    def test_bad_settings(self):
        with pytest.raises(ValueError, match="`num_points`"):
            ITNetPointCloudProcessor(num_points=0)
        with pytest.raises(ValueError, match="`gravity_axis`"):
            ITNetPointCloudProcessor(gravity_axis=3)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"num_point": 12}, "`num_point` is no argument of ITNetPointCloudProcessor; .* `num_points`"),
            ({"scale_range": (1.25, 0.8)}, r"`scale_range` \(\(1.25, 0.8\)\) must be \(lowest, highest\)"),
            ({"scale_range": 1.1}, r"`scale_range` \(1.1\) must be \(lowest, highest\)"),
            ({"scale_range": (0, 1)}, "`scale_range`"),
            ({"jitter_std": -1}, r"`jitter_std` \(-1\) must be zero or more"),
            ({"jitter_std": np.nan}, r"`jitter_std` \(nan\)"),
        ],
    )
    def test_bad_arguments(self, settings, message):
        with pytest.raises(ValueError, match=message):
            ITNetPointCloudProcessor(**settings)

    def test_features_that_are_not_finite(self, tiny_config):
        features = np.zeros((4, 1))
        features[2] = np.nan
        with pytest.raises(ValueError, match="`point_features` of cloud 0 are not finite, at point 2 of 4"):
            ITNetPointCloudProcessor()(np.ones((4, 3)), features)
        with pytest.raises(ValueError, match="`point_features` holds numbers that are not finite"):
            ITNetModel(tiny_config("point_cloud", point_feature_size=1))(
                points=torch.zeros(1, 4, 3), point_features=torch.from_numpy(features).unsqueeze(0)
            )
