"""Metrics of scikit-learn and SciPy under the names that they have on the Hub, or those of the Hub themselves."""

from collections.abc import Callable

import evaluate
import numpy as np
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef


def _unless_constant(correlation: Callable) -> Callable:
    """Makes a correlation 0, not undefined, if the predictions are all the same."""
    return lambda labels, values: 0.0 if np.ptp(values) == 0 else correlation(labels, values).statistic


#: Each takes labels and predictions, in this order. F1 is that of class 1.
METRICS = {
    "accuracy": accuracy_score,
    "f1": lambda labels, classes: f1_score(labels, classes, zero_division=0.0),
    "matthews_correlation": matthews_corrcoef,
    "spearmanr": _unless_constant(spearmanr),
    "pearsonr": _unless_constant(pearsonr),
}


def load_metrics(names: tuple[str, ...], from_hub: bool = False) -> Callable[[np.ndarray, np.ndarray], dict]:
    """Returns a function from labels [N] and predictions [N] to the metrics by name."""
    unknown = [name for name in names if name not in METRICS]
    if unknown:
        raise ValueError(f"`names` ({unknown[0]!r}) must be of {', '.join(METRICS)}")
    if from_hub:
        combined = evaluate.combine(list(names))
        return lambda labels, predictions: combined.compute(references=labels, predictions=predictions)
    return lambda labels, predictions: {name: float(METRICS[name](labels, predictions)) for name in names}


def class_metrics(*names: str, from_hub: bool = False) -> Callable:
    """Returns a `compute_metrics` for the Trainer that scores the class with the highest logit."""
    score = load_metrics(names, from_hub)

    def compute(prediction) -> dict[str, float]:
        labels = prediction.label_ids
        labels = labels.argmax(-1) if labels.ndim == 2 else labels  # one-hot or soft targets
        return score(labels, prediction.predictions.argmax(-1))

    return compute


def value_metrics(*names: str, from_hub: bool = False) -> Callable:
    """Returns a `compute_metrics` for the Trainer that compares one number per sample with its target."""
    score = load_metrics(names, from_hub)
    return lambda prediction: score(prediction.label_ids.reshape(-1), prediction.predictions.reshape(-1))
