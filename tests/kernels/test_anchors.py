"""k-means anchors: what they cover, that nothing is random, and that padding does not exist for them."""

import pytest
import torch

from itnet_kernels import cluster_measure, kmeans_anchors


def cloud(n=40, batch=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(batch, n, 2, generator=generator), torch.rand(batch, n, generator=generator)


def test_every_position_belongs_to_the_nearest_of_its_clusters_means():
    positions, measure = cloud()
    indices, clusters = kmeans_anchors(positions, measure, 6)
    for x, omega, own, anchors in zip(positions, measure, clusters, indices, strict=True):
        centres = torch.stack([(omega[own == c] @ x[own == c]) / omega[own == c].sum() for c in range(6)])
        distances = torch.cdist(x, centres)
        # Ten steps need not have converged: almost all positions are where they belong.
        assert (distances.argmin(1) == own).float().mean() > 0.9
        for c in range(6):
            assert own[anchors[c]] == c


def test_clusters_are_better_than_random_ones():
    positions, measure = cloud(200, 1)
    indices, _ = kmeans_anchors(positions, measure, 10)
    spread = torch.cdist(positions[0], positions[0, indices[0]]).amin(1).mean()
    generator = torch.Generator().manual_seed(0)
    random = [
        torch.cdist(positions[0], positions[0, torch.randperm(200, generator=generator)[:10]]).amin(1).mean()
        for _ in range(20)
    ]
    assert spread < min(random)


def test_the_measure_of_the_clusters_is_that_of_the_domain():
    positions, measure = cloud()
    _, clusters = kmeans_anchors(positions, measure, 6)
    torch.testing.assert_close(cluster_measure(measure, clusters, 6).sum(1), measure.sum(1))


def test_as_many_as_positions_are_all_positions():
    positions, measure = cloud(12)
    indices, clusters = kmeans_anchors(positions, measure, 12)
    assert torch.equal(indices.sort(1).values, torch.arange(12).expand(3, 12))
    torch.testing.assert_close(cluster_measure(measure, clusters, 12), measure.gather(1, indices))


def test_more_than_distinct_positions_leave_empty_clusters():
    positions = torch.tensor([[0.0], [1.0], [1.0], [2.0], [1.0]])
    measure = torch.tensor([[0.1, 0.2, 0.2, 0.4, 0.1]])
    _, clusters = kmeans_anchors(positions, measure, 4)
    weights = cluster_measure(measure, clusters, 4)
    torch.testing.assert_close(weights.sort().values, torch.tensor([[0.0, 0.1, 0.4, 0.5]]))


def test_positions_that_coincide_are_all_anchors_if_there_are_enough():
    """As many anchors as positions are exact, with padding or without."""
    positions = torch.tensor([[9.0], [0.0], [1.0], [1.0], [2.0], [9.0]])
    measure = torch.tensor([[0.0, 0.1, 0.2, 0.3, 0.4, 0.0]])
    indices, clusters = kmeans_anchors(positions, measure, 4)
    assert indices.tolist() == [[1, 2, 3, 4]]
    torch.testing.assert_close(cluster_measure(measure, clusters, 4), measure[:, 1:5])


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(side):
    line = torch.arange(1, 31)[None, :, None] / 30  # regular: full of ties
    measure = torch.full((1, 30), 1 / 30)
    indices, clusters = kmeans_anchors(line, measure, 7)
    pads = (line.new_full((1, 9, 1), 0.37), measure.new_zeros(1, 9))
    order = (lambda a, b: (b, a)) if side == "left" else (lambda a, b: (a, b))
    padded = torch.cat(order(line, pads[0]), dim=1), torch.cat(order(measure, pads[1]), dim=1)
    shift = 9 if side == "left" else 0
    padded_indices, padded_clusters = kmeans_anchors(*padded, 7)
    assert torch.equal(padded_indices - shift, indices)
    assert torch.equal(padded_clusters[:, shift : shift + 30], clusters)


def test_batch_mates_change_nothing():
    positions, measure = cloud()
    together = kmeans_anchors(positions, measure, 5)
    alone = kmeans_anchors(positions[1:2], measure[1:2], 5)
    for a, b in zip(together, alone, strict=True):
        assert torch.equal(a[1:2], b)


def test_it_can_be_compiled():
    positions, measure = cloud()
    compiled = torch.compile(lambda x, m: kmeans_anchors(x, m, 4), backend="eager", fullgraph=True)
    for a, b in zip(compiled(positions, measure), kmeans_anchors(positions, measure, 4), strict=True):
        assert torch.equal(a, b)


def test_errors():
    positions, measure = cloud()
    with pytest.raises(ValueError, match=r"`count` \(0\) must be at least 1"):
        kmeans_anchors(positions, measure, 0)
    with pytest.raises(ValueError, match=r"`measure` .* must be"):
        kmeans_anchors(positions, measure[:, :5], 2)
