"""Metrics against values worked out by hand, and the augmentations that change labels."""

import numpy as np
import pytest
import torch
from transformers import EvalPrediction


@pytest.fixture(scope="module")
def metrics(load_script):
    return load_script("common.metrics")


@pytest.mark.parametrize(
    ("name", "predictions", "references", "expected"),
    [
        ("accuracy", [0, 1, 2, 2], [0, 1, 1, 2], 0.75),
        ("f1", [1, 1, 0, 0], [1, 0, 1, 0], 0.5),  # precision 1/2, recall 1/2
        ("matthews_correlation", [1, 1, 0, 0, 0], [1, 0, 0, 0, 1], (1 * 2 - 1 * 1) / 6),  # sqrt(2 * 2 * 3 * 3) = 6
        ("spearmanr", [1.0, 2.0, 3.0], [1.0, 8.0, 27.0], 1.0),
        ("pearsonr", [0.0, 1.0, 2.0], [0.0, 0.0, 3.0], np.sqrt(3) / 2),
        ("pearsonr", [1.0, 1.0, 1.0], [0.0, 0.0, 3.0], 0.0),
    ],
)
def test_values(metrics, name, predictions, references, expected):
    score = metrics.load_metrics((name,))
    assert score(np.array(references), np.array(predictions)) == {name: pytest.approx(expected)}


def test_soft_targets_count_by_their_best_class(metrics):
    logits, targets = np.eye(3)[[0, 1, 1]], np.array([[0.9, 0.1, 0], [0, 1, 0], [0, 0.2, 0.8]])
    assert metrics.class_metrics("accuracy")(EvalPrediction(logits, targets))["accuracy"] == pytest.approx(2 / 3)


def test_unknown_metric(metrics):
    with pytest.raises(ValueError, match="`names` \\('bleu'\\)"):
        metrics.class_metrics("accuracy", "bleu")


def test_the_hubs_metrics_get_the_same_arguments(metrics, monkeypatch):
    """Without a connection: what `evaluate.combine` returns is a stand-in."""
    asked = []

    class Combined:
        def compute(self, references, predictions):
            asked.append((references.tolist(), predictions.tolist()))
            return {"accuracy": 0.5}

    monkeypatch.setattr(metrics.evaluate, "combine", lambda names: asked.append(names) or Combined())
    logits, labels = np.eye(3)[[0, 1]], np.array([0, 2])
    assert metrics.class_metrics("accuracy", from_hub=True)(EvalPrediction(logits, labels)) == {"accuracy": 0.5}
    assert asked == [["accuracy"], ([0, 2], [0, 1])]


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 0.0), (0.0, 1.0)])
def test_labels_follow_the_pixels(load_script, mixup, cutmix):
    """Images of one colour, the class: the share of a class in the label is its share of the pixels."""
    mix = load_script("common.augmentation").MixImages(mixup, cutmix, num_labels=4)
    torch.manual_seed(0)
    labels = torch.arange(4)
    pixels = torch.nn.functional.one_hot(labels, 4).float()[:, :, None, None].expand(4, 4, 16, 16)
    shares = []
    for _ in range(200):
        mixed, targets = mix(pixels, labels)
        torch.testing.assert_close(mixed.mean((2, 3)), targets)
        torch.testing.assert_close(targets.sum(1), torch.ones(4))
        others = [1 - float(row[label]) for row, label in zip(targets, labels, strict=True) if row[label] < 1]
        assert max(others, default=0) == pytest.approx(min(others, default=0), abs=1e-6)  # one share for the batch
        shares += others[:1]
    # Beta(a, a) has the variance 1 / (4 (2a + 1)); that of some 180 draws has a standard error of 7 %.
    alpha = mixup or cutmix
    assert np.mean(shares) == pytest.approx(0.5, abs=0.1)
    assert np.var(shares) == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.25)
