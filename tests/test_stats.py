"""Medians and their bootstrap intervals."""

from __future__ import annotations

import numpy as np
import pytest

from pyramidbench.stats import Interval, median_interval


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
