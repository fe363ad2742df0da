"""How time grows with the length: the slope of log time over log keys, and the length from which on a method beats dense.

A slope of 1 is linear, 2 quadratic. Everything is made from the rows of `frame.summarise`, one method at one budget.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

from pyramidbench.frame import Row, Setting, measured
from pyramidbench.replays import as_replayed
from pyramidbench.units import is_missing

STAGES = ("build", "route", "index", "attend", "backward")
FEWEST_FOR_A_FIT = 3
SHORTEST_STAGE = 1e-6
"""Seconds under which a stage's time is noise, and no slope is given."""


@dataclass(frozen=True)
class Slope:
    """Exponent of the length in the time, with its 95 % interval, over `lengths` different lengths.

    From three lengths on the interval is that of the fitted line (Student's t), so that it also shows where time does not
    follow a power. With two it is what the intervals of the two times allow, and None where they have none.
    """

    value: float
    low: float | None
    high: float | None
    lengths: int


@dataclass(frozen=True)
class Crossover:
    """The length, in keys, from which on a method is faster than the fastest dense one up to the longest measured.

    length: None where there is no such crossing between the lengths measured; `outcome` then says which side the method is
    on. low, high: 95 % interval; None where that end lies outside the lengths measured, or speed-ups have no interval.
    """

    outcome: str
    length: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Scaling:
    """One method at one budget: slopes of the whole call and of its stages, and its crossover with dense; None for dense
    methods, and where no speed-up is known."""

    label: str
    kind: str
    query_tile: float | None
    top_k: float | None
    shortest: float
    longest: float
    time: Slope
    stages: dict[str, Slope]
    crossover: Crossover | None


def scalings(setting: Setting) -> list[Scaling]:
    """The scaling of each method of a setting that was timed at two lengths or more; dense methods first. Steps of decoding
    go by their replays."""
    rows = as_replayed(measured(setting.rows).dropna(subset=["latency_s"]))
    found = [_scaling(group) for group in _curves(rows)]
    return sorted((one for one in found if one is not None), key=lambda one: one.kind != "dense")


def _curves(rows: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Rows of one method at one tile and budget, one row a length: of several level counts, the most levels. A budget that
    was asked for as a share of the keys (5%) is one curve, although its K grows."""
    budget = rows["budget"].where(rows["budget"].notna(), rows["top_k"].astype(str))
    keys = [rows["label"], rows["query_tile"].fillna(-1), budget]
    for _, group in rows.groupby(keys, sort=False, dropna=False):
        ordered = group.sort_values("levels", kind="stable").drop_duplicates("seq_len_kv", keep="last")
        yield ordered.sort_values("seq_len_kv")


def _scaling(rows: pd.DataFrame) -> Scaling | None:
    points: list[Row] = rows.to_dict("records")
    time = slope(
        [row["seq_len_kv"] for row in points],
        [row["latency_s"] for row in points],
        [(row["latency_low_s"], row["latency_high_s"]) for row in points],
    )
    if time is None:
        return None
    budgets = rows["top_k"].dropna().unique()
    return Scaling(
        label=points[0]["label"],
        kind=points[0]["kind"],
        query_tile=points[0]["query_tile"],
        top_k=float(budgets[0]) if len(budgets) == 1 else None,
        shortest=points[0]["seq_len_kv"],
        longest=points[-1]["seq_len_kv"],
        time=time,
        stages=dict(_stage_slopes(points)),
        crossover=None if points[0]["kind"] == "dense" else _crossover(points),
    )


def _stage_slopes(points: list[Row]) -> Iterator[tuple[str, Slope]]:
    for stage in STAGES:
        known = [row for row in points if not is_missing(row[f"{stage}_s"]) and row[f"{stage}_s"] > SHORTEST_STAGE]
        found = slope([row["seq_len_kv"] for row in known], [row[f"{stage}_s"] for row in known])
        if found is not None:
            yield stage, found


def slope(
    lengths: Sequence[float], seconds: Sequence[float], intervals: Sequence[tuple[float | None, float | None]] = ()
) -> Slope | None:
    """The slope of log seconds over log length; None for fewer than two lengths. `intervals` are those of the times."""
    count = len(set(lengths))
    if count < 2:
        return None
    x, y = np.log(np.asarray(lengths, dtype=float)), np.log(np.asarray(seconds, dtype=float))
    if count < FEWEST_FOR_A_FIT:
        return _slope_of_two(x, y, intervals)
    fit = stats.linregress(x, y)
    # Of times that are all equal scipy knows no error; it is 0.
    half = float(stats.t.ppf(0.975, len(x) - 2) * np.nan_to_num(fit.stderr))
    return Slope(float(fit.slope), float(fit.slope) - half, float(fit.slope) + half, count)


def _slope_of_two(x: np.ndarray, y: np.ndarray, intervals: Sequence[tuple[float | None, float | None]]) -> Slope:
    first, last = int(x.argmin()), int(x.argmax())
    width = float(x[last] - x[first])
    value = float(y[last] - y[first]) / width
    ends = [end for pair in intervals for end in pair]
    if not ends or any(is_missing(end) for end in ends):
        return Slope(value, None, None, 2)
    (first_low, first_high), (last_low, last_high) = np.log(
        np.asarray([intervals[first], intervals[last]], dtype=float)
    )
    return Slope(value, float(last_low - first_high) / width, float(last_high - first_low) / width, 2)


def _crossover(points: list[Row]) -> Crossover | None:
    known = [row for row in points if not is_missing(row["speedup"])]
    if len(known) < 2:
        return None
    lengths = [float(row["seq_len_kv"]) for row in known]
    ends = {name: [row[name] for row in known] for name in ("speedup", "speedup_low", "speedup_high")}
    if not any(is_missing(value) for name in ("speedup_low", "speedup_high") for value in ends[name]):
        return crossover(lengths, ends["speedup"], ends["speedup_low"], ends["speedup_high"])
    return crossover(lengths, ends["speedup"])


def crossover(
    lengths: Sequence[float],
    speedups: Sequence[float],
    lows: Sequence[float] | None = None,
    highs: Sequence[float] | None = None,
) -> Crossover:
    """The last length at which the speed-up rises through 1, between the two lengths around it on a line of logarithms.

    `lengths` ascend. The interval's ends are where the upper and the lower ends of the speed-ups rise through 1.
    """
    if speedups[-1] <= 1:
        return Crossover("none in range: slower at the longest length")
    at = _rises_through_one(lengths, speedups)
    if at is None:
        return Crossover("none in range: faster at every length")
    early = None if highs is None else _rises_through_one(lengths, highs)
    late = None if lows is None else _rises_through_one(lengths, lows)
    return Crossover("faster from here on", at, early, late)


def _rises_through_one(lengths: Sequence[float], speedups: Sequence[float]) -> float | None:
    """Where the last rise through 1 is; None where the values never pass it, or end below."""
    if speedups[-1] <= 1:
        return None
    before = next((i for i in range(len(speedups) - 1, -1, -1) if speedups[i] <= 1), None)
    if before is None:
        return None
    x0, x1 = math.log(lengths[before]), math.log(lengths[before + 1])
    y0, y1 = math.log(speedups[before]), math.log(speedups[before + 1])
    return math.exp(x0 - y0 * (x1 - x0) / (y1 - y0))
