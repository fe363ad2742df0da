"""Statistics of repeated timings: medians, quantiles and paired ratios, with bootstrap intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

RESAMPLES = 1000
SPREAD = {"p5": 5, "q1": 25, "q3": 75, "p95": 95}
"""The percentiles that are reported beside a median."""


@dataclass(frozen=True)
class Interval:
    """A median (of seconds, or of ratios), with the ends of its 95 % bootstrap interval."""

    median: float
    low: float
    high: float

    @property
    def relative_half_width(self) -> float:
        """Half of the interval's width ÷ the median."""
        return (self.high - self.low) / (2 * self.median) if self.median else 0.0

    @property
    def inverse(self) -> Interval:
        """The interval of 1 ÷ the ratio, which is what the other one of the pair has."""
        return Interval(1 / self.median, 1 / self.high, 1 / self.low)


def median_interval(samples: Sequence[float]) -> Interval:
    """Median and 95 % percentile-bootstrap interval (seeded); under three samples the interval is the range."""
    if len(samples) == 0:
        raise ValueError("no samples: a median needs at least one")
    values = np.asarray(samples, dtype=float)
    median = float(np.median(values))
    if len(values) < 3 or bool((values == values[0]).all()):
        return Interval(median, float(values.min()), float(values.max()))
    result = stats.bootstrap(
        (values,), np.median, n_resamples=RESAMPLES, method="percentile", rng=np.random.default_rng(0)
    )
    return Interval(median, float(result.confidence_interval.low), float(result.confidence_interval.high))


def paired_ratio(a: Sequence[float], b: Sequence[float]) -> Interval:
    """Median of a[i] ÷ b[i], with its 95 % bootstrap interval: above 1 where `a` takes longer.

    Samples are paired by their order. Of two methods that were measured in turns, a pair lies in one round, so that drift
    and load that last longer than a round cancel. Samples beyond the shorter of the two have no partner and are left out.

    Raises:
        ValueError: one of them is empty, or a time is not positive.
    """
    count = min(len(a), len(b))
    if count == 0:
        raise ValueError(f"{len(a)} and {len(b)} samples: a paired ratio needs at least one of each")
    above, below = np.asarray(a[:count], dtype=float), np.asarray(b[:count], dtype=float)
    if not (bool((above > 0).all()) and bool((below > 0).all())):
        raise ValueError("a sample is not positive: times that can be compared are above 0")
    return median_interval((above / below).tolist())


def spread(samples: Sequence[float]) -> dict[str, float]:
    """The percentiles of SPREAD by name; between two samples they are interpolated.

    Raises:
        ValueError: no samples.
    """
    if len(samples) == 0:
        raise ValueError("no samples: a percentile needs at least one")
    return {name: float(np.percentile(samples, percent)) for name, percent in SPREAD.items()}
