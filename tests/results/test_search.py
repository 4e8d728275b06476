"""Searches: equal budgets, no winner at an end, the same way from the same logs; corrected paired tests."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

LADDER = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
KNOBS = {"scale": (1.0, 0.5, 2.0), "weight_decay": (1e-4, 1e-2), "inputs": ("all", "relative")}


@pytest.fixture(scope="module")
def script(load_script):
    return load_script("search")


@pytest.fixture(scope="module")
def comparisons(load_script):
    return load_script("comparisons")


@pytest.fixture
def space(script):
    return script.Space(LADDER, (1e-3, 3e-3, 1e-2), KNOBS)


def bowl(rate, scale=2.0, decay=1e-2):
    """A loss with one minimum, of factors that do not depend on each other."""

    def loss(point):
        far = abs(math.log(point.rate / rate)) + abs(math.log(point.values[0] / scale))
        return far + (point.values[1] != decay) + (point.values[2] != "relative")

    return loss


@pytest.mark.parametrize("rate", [3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1])
def test_the_minimum_of_a_separable_loss_is_found(script, space, rate):
    found = script.search(space, 14, bowl(rate))
    assert found.best == script.Point(rate, (2.0, 1e-2, "relative"))
    assert not found.at_an_end
    assert len(found.losses) == 14


def test_budgets_are_kept_whatever_the_losses_are(script, space):
    for seed, budget in itertools.product(range(8), (4, 9, 12)):
        draws = np.random.default_rng(seed)
        losses = {}
        found = script.search(space, budget, lambda point, d=draws, seen=losses: seen.setdefault(point, d.random()))
        assert len(found.losses) == len(losses) == budget
        assert found.losses[found.best] == min(losses.values())
        again = script.search(space, budget, losses.__getitem__)  # all from what is known
        assert list(again.losses) == list(found.losses)
    assert len(script.search(script.Space(LADDER, (1e-3, 3e-3), {}), 50, lambda point: point.rate).losses) == 4


def test_ends_are_extended_before_knobs_are_tried(script, space):
    tried = []
    script.search(space, 6, lambda point: tried.append(point.rate) or -point.rate)
    assert tried == [1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1]
    found = script.search(space, 4, lambda point: -point.rate)
    assert found.at_an_end  # the budget was gone


def test_divergence_loses(script, space):
    found = script.search(
        space, 8, lambda point: None if point.rate > 2e-3 else math.nan if point.values[0] > 1 else 1
    )
    assert found.best.rate == 1e-3
    with pytest.raises(ValueError, match=r"none of 3 trials converged: rate-0.001, rate-0.003, rate-0.01"):
        script.search(script.Space(LADDER, (1e-3, 3e-3, 1e-2), {}), 3, lambda point: None)


def test_points_have_names(script, space):
    assert space.name(script.Point(1e-3, space.start)) == "rate-0.001"
    assert space.name(script.Point(1e-2, (2.0, 1e-4, "relative"))) == "rate-0.01.scale-2.inputs-relative"
    with pytest.raises(ValueError, match="must be neighbours on the ladder"):
        script.Space(LADDER, (1e-3, 1e-2), {})
    with pytest.raises(ValueError, match="knob 'scale' must have at least one value"):
        script.Space(LADDER, (1e-3,), {"scale": ()})


def test_comparisons_are_paired_tests(comparisons):
    generator = np.random.default_rng(0)
    base = generator.random((5, 40)) + 1
    first, second = base + 0.01 * generator.random((5, 40)), base + 0.02 + 0.01 * generator.random((5, 40))
    found = comparisons.compare(first, second)
    assert found.ratio == pytest.approx(first.mean() / second.mean())
    assert found.seeds == pytest.approx(stats.ttest_rel(first.mean(1), second.mean(1)).pvalue)
    assert found.samples == pytest.approx(stats.wilcoxon(first.mean(0), second.mean(0)).pvalue)
    assert found.p == max(found.seeds, found.samples) < 1e-3
    assert comparisons.compare(first, first).p == 1
    with pytest.raises(ValueError, match=r"got \(5, 40\) and \(5, 39\)"):
        comparisons.compare(first, second[:, 1:])


def test_holm_is_the_step_down_of_bonferroni(comparisons):
    """By its definition: p_(k) is rejected at α if p_(i) ≤ α / (m − i + 1) for all i ≤ k."""
    values = [0.01, 0.04, 0.03, 0.005]
    assert comparisons.holm(values) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    draws = np.random.default_rng(1).random(9) ** 3
    corrected, ranked = comparisons.holm(list(draws)), np.sort(draws)
    for alpha in np.linspace(0.01, 0.99, 30):
        passed = ranked <= alpha / (9 - np.arange(9))
        count = 9 if passed.all() else int(np.argmin(passed))
        assert sorted(draws[np.array(corrected) <= alpha]) == pytest.approx(list(ranked[:count]))
