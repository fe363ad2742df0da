"""By how much cells differ: ratios against known values, coverage of the intervals, adjustment over many cells."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pyramidbench.comparing.changes import Change, adjusted, quality_changes, ratio_of_medians, time_change
from pyramidbench.record import Record
from pyramidbench.stats import Interval


def record(latency_s: float | None = 1.0, **columns: Any) -> Record:
    return Record(cell="c", status="ok", method="flat", latency_s=latency_s, **columns)


def test_the_ratio_is_that_of_b_to_a() -> None:
    a, b = np.full(5, 2.0), np.full(5, 3.0)
    change = time_change(record(2.0), record(3.0), a, b, in_turns=False)
    assert change == Change(Interval(1.5, 1.5, 1.5), 0.0, "bootstrap")
    assert time_change(record(2.0), record(3.0), a, b, in_turns=True) == Change(Interval(1.5, 1.5, 1.5), 0.0, "paired")
    assert time_change(record(None), record(3.0), None, b, in_turns=False) is None


def test_pairs_are_used_only_where_the_samples_are_pairs() -> None:
    """Both halve their speed midway: as pairs their ratio is known well, as two sets of samples hardly."""
    rng = np.random.default_rng(0)
    pace = np.repeat([1.0, 2.0], 30)
    a, b = pace * rng.normal(1, 0.003, 60), pace * rng.normal(1.05, 0.003, 60)
    paired = time_change(record(), record(), a, b, in_turns=True)
    apart = time_change(record(), record(), a, b, in_turns=False)
    assert paired is not None
    assert apart is not None
    assert paired.value.low > 1.04
    assert paired.p is not None
    assert paired.p < 1e-6
    assert apart.value.low < 1 < apart.value.high


def test_the_bootstrap_of_two_runs_covers_the_true_ratio() -> None:
    rng = np.random.default_rng(1)
    found = [ratio_of_medians(1.1 * rng.lognormal(0, 0.05, 40), rng.lognormal(0, 0.05, 40)) for _ in range(200)]
    covered = sum(value.low <= 1.1 <= value.high for value in found) / len(found)
    assert 0.9 <= covered <= 1


def test_equal_runs_are_rarely_told_apart() -> None:
    rng = np.random.default_rng(2)
    changes = [
        time_change(record(), record(), rng.lognormal(0, 0.05, 40), rng.lognormal(0, 0.05, 40), in_turns=False)
        for _ in range(200)
    ]
    raw = [change.p for change in changes if change and change.p is not None]
    assert sum(p <= 0.05 for p in raw) / 200 <= 0.08
    assert sum(p <= 0.05 for p in adjusted(changes)) <= 2


def test_without_samples_the_cells_own_intervals_are_joined() -> None:
    a = record(1.0, latency_low_s=1 / 1.03, latency_high_s=1.03)
    b = record(2.0, latency_low_s=2 / 1.04, latency_high_s=2 * 1.04)
    change = time_change(a, b, None, np.ones(3), in_turns=True)
    assert change is not None
    assert change.how == "intervals"
    half = np.exp(np.hypot(np.log(1.03), np.log(1.04)))
    assert change.value.high == pytest.approx(2 * half)
    assert change.value.low == pytest.approx(2 / half)


def test_a_time_without_any_interval_proves_nothing() -> None:
    change = time_change(record(1.0), record(9.0), None, None, in_turns=False)
    assert change == Change(Interval(9.0, 0.0, float("inf")), 1.0, "intervals")


def test_benjamini_hochberg_by_hand_and_gaps_stay_gaps() -> None:
    """p sorted .005, .01, .2: times 3/1, 3/2, 3/3, then no larger than the next one."""
    value = Interval(1.0, 1.0, 1.0)
    changes = [Change(value, 0.01), None, Change(value, 0.2), Change(value), Change(value, 0.005)]
    assert adjusted(changes) == pytest.approx([0.015, 1.0, 0.2, 1.0, 0.015])
    assert adjusted([None]) == [1.0]


def test_quality_is_a_difference_with_an_interval_over_heads() -> None:
    a = record(
        recall=0.8, recall_by_head=[0.7, 0.8, 0.9], mass_kept=0.9, mass_kept_by_head=[0.9, 0.9], output_error=0.1
    )
    b = record(
        recall=0.7, recall_by_head=[0.62, 0.69, 0.79], mass_kept=0.8, mass_kept_by_head=[0.8, 0.8], output_error=0.3
    )
    changes = quality_changes(a, b)
    assert changes["recall"].value.median == pytest.approx(-0.1)
    # Differences -.08, -.11, -.11: mean -.1, standard error .01, t with 2 degrees of freedom 4.3027.
    assert changes["recall"].value.low == pytest.approx(-0.1 - 0.043027, abs=1e-5)
    assert changes["recall"].how == "heads"
    assert changes["mass_kept"].value.low == changes["mass_kept"].value.high == pytest.approx(-0.1)
    assert changes["output_error"] == Change(Interval(*[pytest.approx(0.2)] * 3))
    assert quality_changes(record(), b) == {}


def test_heads_without_a_number_are_left_out_and_other_heads_are_no_pairs() -> None:
    a = record(recall=0.8, recall_by_head=[0.8, None, 0.8, 0.7])
    assert quality_changes(a, record(recall=0.7, recall_by_head=[0.7, 0.7, None, 0.65]))["recall"].how == "heads"
    assert quality_changes(a, record(recall=0.7, recall_by_head=[0.7, 0.7]))["recall"].how is None
