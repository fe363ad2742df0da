"""Medians and their bootstrap intervals."""

from __future__ import annotations

import numpy as np
import pytest

from pyramidbench.stats import Interval, median_interval, paired_ratio, spread


def test_relative_half_width_is_half_the_interval_over_the_median() -> None:
    assert Interval(median=2.0, low=1.5, high=2.5).relative_half_width == 0.25
    assert Interval(median=0.0, low=0.0, high=0.0).relative_half_width == 0.0


def test_no_samples_is_an_error() -> None:
    with pytest.raises(ValueError, match="no samples"):
        median_interval([])


@pytest.mark.parametrize(
    ("samples", "expected"),
    [([3.0], (3.0, 3.0, 3.0)), ([3.0, 1.0], (2.0, 1.0, 3.0)), ([2.0] * 40, (2.0, 2.0, 2.0))],
    ids=["one", "two", "constant"],
)
def test_few_or_equal_samples_give_their_range(samples: list[float], expected: tuple[float, float, float]) -> None:
    interval = median_interval(samples)
    assert (interval.median, interval.low, interval.high) == expected


def test_the_interval_holds_the_median_and_is_the_same_every_time() -> None:
    samples = np.random.default_rng(0).lognormal(size=31).tolist()
    interval = median_interval(samples)
    assert interval.low < interval.median < interval.high
    assert interval.median == sorted(samples)[15]
    assert median_interval(samples) == interval


def test_the_interval_scales_with_the_unit() -> None:
    samples = np.random.default_rng(1).normal(10, 1, size=25)
    one, two = median_interval(samples.tolist()), median_interval((2 * samples).tolist())
    assert (two.median, two.low, two.high) == (2 * one.median, 2 * one.low, 2 * one.high)


def test_one_outlier_hardly_moves_it() -> None:
    samples = np.random.default_rng(2).normal(10, 0.1, size=30).tolist()
    quiet, loud = median_interval(samples), median_interval([*samples, 1e6])
    assert loud.high - quiet.high < 0.1


def test_more_samples_make_it_narrower() -> None:
    samples = np.random.default_rng(3).normal(10, 1, size=900).tolist()
    assert median_interval(samples).relative_half_width < 0.4 * median_interval(samples[:30]).relative_half_width


def test_it_covers_the_true_median_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(4)
    intervals = [median_interval(rng.exponential(size=31).tolist()) for _ in range(150)]
    covered = sum(interval.low <= np.log(2) <= interval.high for interval in intervals) / len(intervals)
    assert 0.89 <= covered <= 0.995


def test_a_paired_ratio_is_above_one_where_the_first_takes_longer() -> None:
    ratio = paired_ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert (ratio.median, ratio.low, ratio.high) == (2.0, 2.0, 2.0)
    assert paired_ratio([1.0, 2.0, 3.0], [2.0, 4.0, 6.0]).median == 0.5


def test_pairs_cancel_drift_that_medians_of_each_do_not() -> None:
    """The second half of the session runs at half speed, and `a` has more samples in it."""
    rng = np.random.default_rng(5)
    pace = np.repeat([1.0, 2.0], 40)
    a = (pace * rng.normal(1.05, 0.005, 80)).tolist()
    b = (pace * rng.normal(1.0, 0.005, 80)).tolist()
    ratio = paired_ratio(a, b)
    assert ratio.low <= 1.05 <= ratio.high
    assert ratio.high - ratio.low < 0.01
    assert median_interval(a).high / median_interval(b).low > 1.5


def test_samples_without_a_partner_are_left_out() -> None:
    assert paired_ratio([1.0, 1.0, 1.0, 50.0], [1.0, 1.0, 1.0]) == Interval(1.0, 1.0, 1.0)


@pytest.mark.parametrize(("a", "b"), [([], [1.0]), ([1.0], []), ([0.0], [1.0]), ([1.0], [-1.0]), ([1.0], [np.nan])])
def test_what_cannot_be_paired_is_an_error(a: list[float], b: list[float]) -> None:
    with pytest.raises(ValueError, match=r"at least one of each|not positive"):
        paired_ratio(a, b)


def test_the_inverse_is_the_ratio_of_the_other() -> None:
    rng = np.random.default_rng(6)
    a, b = rng.lognormal(size=(2, 40)).tolist()
    assert paired_ratio(a, b).inverse.median == pytest.approx(paired_ratio(b, a).median, rel=0.1)
    assert Interval(2.0, 1.0, 4.0).inverse == Interval(0.5, 0.25, 1.0)


def test_equal_distributions_are_rarely_called_different() -> None:
    rng = np.random.default_rng(7)
    ratios = [paired_ratio(*rng.lognormal(sigma=0.1, size=(2, 40)).tolist()) for _ in range(500)]
    assert sum(ratio.low > 1 or ratio.high < 1 for ratio in ratios) / len(ratios) <= 0.08


def test_spread_gives_quartiles_and_tails() -> None:
    assert spread([float(i) for i in range(101)]) == {"p5": 5.0, "q1": 25.0, "q3": 75.0, "p95": 95.0}
    assert spread([2.0]) == {"p5": 2.0, "q1": 2.0, "q3": 2.0, "p95": 2.0}
    with pytest.raises(ValueError, match="no samples"):
        spread([])
