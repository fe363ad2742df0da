"""What makes a comparison fail: `--fail-on slower:5%`, `memory:10%`, `quality:0.01`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from pyramidbench.comparing.verdicts import Difference, is_slower, is_worse, judge_memory
from pyramidbench.errors import UserError

Measure = Literal["slower", "memory", "quality"]
ACCEPTED = "slower:5%, memory:10% or quality:0.01, comma-separated"


@dataclass(frozen=True)
class Threshold:
    """A measure, and the change from which on it is a regression: a share of time or memory, a difference of quality."""

    measure: Measure
    limit: float

    def broken_by(self, difference: Difference) -> bool:
        """Whether a cell got clearly worse by more than the limit, or gave no number any more."""
        if difference.presence is not None:
            return difference.presence == "lost"
        if self.measure == "slower":
            return difference.time is not None and is_slower(difference.time, difference.time_p, self.limit)
        if self.measure == "memory":
            return judge_memory(difference.pair.a, difference.pair.b, self.limit) == "more"
        return any(
            is_worse(name, change, difference.quality_p[name], self.limit)
            for name, change in difference.quality.items()
        )

    def __str__(self) -> str:
        limit = f"{self.limit:g}" if self.measure == "quality" else f"{100 * self.limit:g}%"
        return f"{self.measure}:{limit}"


def parse_share(text: str, name: str) -> float:
    """A share of "2%" or "0.02", from 0 and below 1.

    Raises:
        UserError: anything else.
    """
    match = re.fullmatch(r"(\d*\.?\d+)\s*(%?)", text.strip())
    value = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    if not 0 <= value < 1:
        raise UserError(f"{name} '{text}': not a share; accepted: 2% or 0.02, from 0 and below 1.")
    return value


def parse_thresholds(texts: Iterable[str]) -> tuple[Threshold, ...]:
    """The thresholds of `--fail-on`, each text one or several.

    Raises:
        UserError: an unknown measure, or a limit that is no share.
    """
    parts = [part.strip() for text in texts for part in text.split(",") if part.strip()]
    return tuple(_threshold(part) for part in parts)


def _threshold(text: str) -> Threshold:
    name, colon, limit = text.partition(":")
    measure = next((measure for measure in get_args(Measure) if measure == name), None)
    if measure is None or not colon:
        raise UserError(f"--fail-on '{text}': accepted: {ACCEPTED}.")
    return Threshold(measure, parse_share(limit, f"--fail-on {name}:"))
