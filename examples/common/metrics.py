"""Metrics by `evaluate`: those of its Hub, or the same ones as local classes that need no network."""

import datasets
import evaluate
import numpy as np
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import f1_score, matthews_corrcoef


class LocalMetric(evaluate.Metric):
    """A metric of numbers against numbers. Subclasses name themselves and compute."""

    kind = "int64"

    def __init__(self, **kwargs):
        super().__init__(keep_in_memory=True, **kwargs)

    def _info(self) -> evaluate.MetricInfo:
        value = datasets.Value(self.kind)
        return evaluate.MetricInfo(
            description=type(self).__doc__,
            citation="",
            inputs_description="predictions and references, one number each per sample",
            features=datasets.Features({"predictions": value, "references": value}),
        )


class Accuracy(LocalMetric):
    """Share of predictions that equal their reference."""

    def _compute(self, predictions, references) -> dict[str, float]:
        return {"accuracy": float(np.mean(np.asarray(predictions) == np.asarray(references)))}


class F1(LocalMetric):
    """Harmonic mean of precision and recall of class 1."""

    def _compute(self, predictions, references) -> dict[str, float]:
        return {"f1": float(f1_score(references, predictions, zero_division=0.0))}


class MatthewsCorrelation(LocalMetric):
    """Correlation of two binary labels."""

    def _compute(self, predictions, references) -> dict[str, float]:
        return {"matthews_correlation": float(matthews_corrcoef(references, predictions))}


class Spearman(LocalMetric):
    """Rank correlation; 0 if the predictions are all the same."""

    kind = "float32"

    def _compute(self, predictions, references) -> dict[str, float]:
        return {"spearmanr": _correlation(spearmanr, predictions, references)}


class Pearson(LocalMetric):
    """Linear correlation; 0 if the predictions are all the same."""

    kind = "float32"

    def _compute(self, predictions, references) -> dict[str, float]:
        return {"pearsonr": _correlation(pearsonr, predictions, references)}


def _correlation(function, predictions, references) -> float:
    if np.ptp(predictions) == 0:
        return 0.0
    return float(function(predictions, references).statistic)


METRICS = {
    "accuracy": Accuracy,
    "f1": F1,
    "matthews_correlation": MatthewsCorrelation,
    "spearmanr": Spearman,
    "pearsonr": Pearson,
}


def load_metric(name: str, from_hub: bool = False) -> evaluate.EvaluationModule:
    """A metric by the name that it has on the Hub."""
    if name not in METRICS:
        raise ValueError(f"`name` ({name!r}) must be one of {', '.join(METRICS)}")
    return evaluate.load(name) if from_hub else METRICS[name]()


def class_metrics(*names: str, from_hub: bool = False):
    """A `compute_metrics` for the Trainer that scores the class with the highest logit."""
    metrics = [load_metric(name, from_hub) for name in names]

    def compute(prediction) -> dict[str, float]:
        classes = prediction.predictions.argmax(-1)
        labels = prediction.label_ids
        labels = labels.argmax(-1) if labels.ndim == 2 else labels  # one-hot or soft targets
        results = {}
        for metric in metrics:
            results |= metric.compute(predictions=classes.tolist(), references=labels.tolist())
        return results

    return compute


def value_metrics(*names: str, from_hub: bool = False):
    """A `compute_metrics` for the Trainer that compares one number per sample with its target."""
    metrics = [load_metric(name, from_hub) for name in names]

    def compute(prediction) -> dict[str, float]:
        values, labels = prediction.predictions.reshape(-1), prediction.label_ids.reshape(-1)
        results = {}
        for metric in metrics:
            results |= metric.compute(predictions=values.tolist(), references=labels.tolist())
        return results

    return compute
