"""Statistics of repeated timings: median, bootstrap interval, and when to stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

RESAMPLES = 1000


@dataclass(frozen=True)
class Interval:
    """A median in seconds, with the ends of its 95 % bootstrap interval."""

    median: float
    low: float
    high: float

    @property
    def relative_half_width(self) -> float:
        """Half of the interval's width ÷ the median."""
        return (self.high - self.low) / (2 * self.median) if self.median else 0.0


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
