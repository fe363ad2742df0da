"""The table of how time grows: slopes by stage and the crossover with dense, as texts."""

from __future__ import annotations

from pyramidbench.scaling import STAGES, Crossover, Scaling, Slope
from pyramidbench.units import integer, significant, tokens

HEADERS = (
    "method", "tile", "K", "lengths", "time", *STAGES, "faster than dense from",
)  # fmt: skip
MEANING = (
    "Slopes are exponents of the length (1 linear, 2 quadratic) with their 95 % interval; the length from which on a method "
    "is faster than the fastest dense one is read between the lengths measured."
)


def scaling_rows(found: list[Scaling]) -> list[list[str]]:
    """A row of texts under HEADERS for each method; empty where a stage has no slope."""
    return [
        [
            one.label,
            integer(one.query_tile),
            integer(one.top_k),
            f"{tokens(one.shortest)}-{tokens(one.longest)}",
            _slope(one.time),
            *(_slope(one.stages.get(stage)) for stage in STAGES),
            "" if one.crossover is None else _crossover(one.crossover),
        ]
        for one in found
    ]


def _slope(slope: Slope | None) -> str:
    if slope is None:
        return ""
    if slope.low is None or slope.high is None:
        return f"{slope.value:.2f}"
    return f"{slope.value:.2f} [{slope.low:.2f}, {slope.high:.2f}]"


def _crossover(crossover: Crossover) -> str:
    """The length with its interval; an end outside of the lengths measured is left open."""
    if crossover.length is None:
        return crossover.outcome
    if crossover.low is None and crossover.high is None:
        return _length(crossover.length)
    low, high = ("..." if end is None else _length(end) for end in (crossover.low, crossover.high))
    return f"{_length(crossover.length)} [{low}, {high}]"


def _length(keys: float) -> str:
    """A length that was read off a line: two digits."""
    return significant(keys, 2) if keys < 1000 else f"{significant(keys / 1024, 2)}k"
