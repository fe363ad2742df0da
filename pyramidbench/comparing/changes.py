"""By how much two cells differ in time and in quality, with 95 % intervals and p-values; B is measured against A.

docs/measuring.md, "Comparing", says which statistics these are and what they do not cover.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from pyramidbench.record import Record
from pyramidbench.stats import RESAMPLES, Interval, paired_ratio

Samples = NDArray[np.float64]
How = Literal["paired", "bootstrap", "intervals", "heads"]
CONFIDENCE = 0.95
QUALITY = {"recall": 1.0, "mass_kept": 1.0, "output_error": -1.0}
"""Columns of quality, and the sign of what is better."""
BY_HEAD = {"recall": "recall_by_head", "mass_kept": "mass_kept_by_head"}


@dataclass(frozen=True)
class Change:
    """B against A in one measure: a ratio (time) or a difference (quality), with its interval and its p-value.

    `how`: what the interval is made of: pairs of samples, a bootstrap of two sets of samples, the intervals of the two
    cells, or the heads. None where there is a single measurement, which has neither interval nor p-value.
    """

    value: Interval
    p: float | None = None
    how: How | None = None


def time_change(a: Record, b: Record, before: Samples | None, after: Samples | None, in_turns: bool) -> Change | None:
    """Time of B ÷ time of A; None where one of them has no time. `before` and `after`: the raw times of A and of B, seconds;
    `in_turns`: whether those of one place belong together."""
    if a.latency_s is None or b.latency_s is None:
        return None
    how: How = "paired" if in_turns else "bootstrap"
    if before is None or after is None:
        ratio, how = _ratio_of_intervals(a, b), "intervals"
    elif in_turns:
        ratio = paired_ratio(after.tolist(), before.tolist())
    else:
        ratio = ratio_of_medians(after, before)
    return Change(ratio, _p_of_ratio(ratio), how)


def ratio_of_medians(a: Samples, b: Samples) -> Interval:
    """Median of a ÷ median of b, with its 95 % percentile-bootstrap interval (seeded); a and b are resampled apart."""
    ratio = float(np.median(a) / np.median(b))
    if bool((a == a[0]).all()) and bool((b == b[0]).all()):
        return Interval(ratio, ratio, ratio)
    result = stats.bootstrap(
        (a, b), lambda x, y, axis=-1: np.median(x, axis=axis) / np.median(y, axis=axis),
        n_resamples=RESAMPLES, confidence_level=CONFIDENCE, method="percentile", rng=np.random.default_rng(0), batch=100,
    )  # fmt: skip
    return Interval(ratio, float(result.confidence_interval.low), float(result.confidence_interval.high))


def quality_changes(a: Record, b: Record) -> dict[str, Change]:
    """B − A of each column of QUALITY that both have; recall and mass with an interval over heads."""
    changes = {}
    for name in QUALITY:
        before, after = getattr(a, name), getattr(b, name)
        if before is not None and after is not None:
            changes[name] = _difference(after - before, _heads(a, b, name))
    return changes


def adjusted(changes: Sequence[Change | None]) -> list[float]:
    """p-values after Benjamini and Hochberg, over all changes that have one; 1 for the others."""
    known = [(place, change.p) for place, change in enumerate(changes) if change is not None and change.p is not None]
    result = [1.0] * len(changes)
    if known:
        for (place, _), p in zip(known, stats.false_discovery_control([p for _, p in known])):
            result[place] = float(p)
    return result


def _ratio_of_intervals(a: Record, b: Record) -> Interval:
    """The ratio of two medians of which only the intervals are known: in log space half widths add up in squares."""
    assert a.latency_s is not None
    assert b.latency_s is not None
    ratio, before, after = b.latency_s / a.latency_s, _log_half_width(a), _log_half_width(b)
    if before is None or after is None:
        return Interval(ratio, 0.0, float("inf"))
    half = float(np.hypot(before, after))
    return Interval(ratio, ratio * float(np.exp(-half)), ratio * float(np.exp(half)))


def _log_half_width(record: Record) -> float | None:
    if not record.latency_low_s or not record.latency_high_s:
        return None
    return float(np.log(record.latency_high_s / record.latency_low_s)) / 2


def _p_of_ratio(ratio: Interval) -> float:
    if ratio.low <= 0:
        return 1.0
    return _p(float(np.log(ratio.median)), float(np.log(ratio.high / ratio.low)) / 2)


def _p(centre: float, half_width: float) -> float:
    """Two-sided p-value that the true centre is 0, by the normal distribution that has this 95 % interval."""
    if half_width == 0:
        return 1.0 if centre == 0 else 0.0
    deviation = half_width / float(stats.norm.ppf((1 + CONFIDENCE) / 2))
    return float(2 * stats.norm.sf(abs(centre) / deviation))


def _heads(a: Record, b: Record, name: str) -> Samples | None:
    """B − A head by head, where both have the same heads."""
    column = BY_HEAD.get(name)
    before, after = (getattr(record, column) if column else None for record in (a, b))
    if not before or not after or len(before) != len(after):
        return None
    pairs = [(x, y) for x, y in zip(before, after) if x is not None and y is not None]
    return np.array([y - x for x, y in pairs]) if len(pairs) > 1 else None


def _difference(value: float, heads: Samples | None) -> Change:
    """A difference with the interval of Student's t over heads. Without heads, or where all moved alike, it is exact: both
    sides have the same tensors."""
    if heads is None or bool((heads == heads[0]).all()):
        return Change(Interval(value, value, value))
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(heads) - 1) * stats.sem(heads))
    return Change(Interval(value, value - half, value + half), float(stats.ttest_1samp(heads, 0.0).pvalue), "heads")
