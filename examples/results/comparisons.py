"""Paired comparisons of models over seeds and over test samples, corrected for how many are made."""

from typing import NamedTuple

import numpy as np
from scipy import stats


class Comparison(NamedTuple):
    """The first model against the second, by errors of which less is better."""

    ratio: float  # mean error of the first over that of the second
    seeds: float  # p of a paired t-test over seeds: runs of one seed have seen the same batches
    samples: float  # p of Wilcoxon's signed ranks over test samples, of errors averaged over seeds

    @property
    def p(self) -> float:
        """The larger of the two: a difference has to survive other seeds and other samples."""
        return max(self.seeds, self.samples)


def compare(first: np.ndarray, second: np.ndarray) -> Comparison:
    """Errors [seeds, samples] of two models, row by row of the same seed and column by column of the same sample."""
    first, second = np.asarray(first, float), np.asarray(second, float)
    if first.shape != second.shape or first.ndim != 2 or min(first.shape) < 2:
        raise ValueError(
            "errors must be [seeds, samples] of the same runs, two or more of each, got "
            f"{first.shape} and {second.shape}"
        )
    ratio = first.mean() / second.mean()
    difference = first - second
    if not difference.any():
        return Comparison(ratio, 1.0, 1.0)
    seeds, samples = difference.mean(1), difference.mean(0)
    spread = seeds.std(ddof=1)
    by_seed = stats.ttest_1samp(seeds, 0.0).pvalue if spread > 0 else float(not seeds.any())
    return Comparison(float(ratio), float(by_seed), float(stats.wilcoxon(samples).pvalue))


def holm(values: list[float]) -> list[float]:
    """p-values corrected for their number m by Holm's method: the k-th smallest times m − k + 1, never falling."""
    corrected, largest = [0.0] * len(values), 0.0
    for rank, index in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        largest = max(largest, min(1.0, (len(values) - rank) * values[index]))
        corrected[index] = largest
    return corrected
