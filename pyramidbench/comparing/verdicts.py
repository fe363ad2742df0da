"""Whether a difference counts: faster, slower, same or unclear, with a practical margin and over many cells at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from pyramidbench.comparing.changes import (
    CONFIDENCE,
    QUALITY,
    Change,
    Samples,
    adjusted,
    quality_changes,
    time_change,
)
from pyramidbench.comparing.matching import Pair
from pyramidbench.record import MEASURED, Record
from pyramidbench.stats import Interval

Verdict = Literal["faster", "slower", "less", "more", "better", "worse", "same", "unclear", "lost", "gained", "none"]
CLOSE_BYTES, CLOSE_RESIDENT_BYTES = 1 << 20, 4 << 20
"""Peaks of memory this near to each other are the same. A CPU's are of the process's resident memory: between two equal sweeps
of six cells that moved by up to 2.0 MiB, 4.5 against 3.1 and 6.2 against 4.2."""
Raw = Callable[[Pair], tuple[Samples | None, Samples | None, bool]]
"""Gives the raw times of both records of a pair, where they are kept, and whether they were taken in turns."""


@dataclass(frozen=True)
class Margins:
    """What is too small to matter: a share of time and of memory, and a difference of quality."""

    time: float = 0.02
    quality: float = 0.01


@dataclass(frozen=True)
class Difference:
    """A pair with its changes, and its verdicts after the adjustment over all pairs.

    `memory` is B's peak ÷ A's. `time_p` and `quality_p` are adjusted. A verdict is "none" where one of the two has no such
    number, "lost" where A was measured and B failed, "gained" the other way round.
    """

    pair: Pair
    time: Change | None
    memory: float | None
    quality: dict[str, Change]
    time_p: float
    quality_p: dict[str, float]
    margins: Margins

    @property
    def presence(self) -> Verdict | None:
        """lost, gained, or none where neither was measured; None where both were."""
        before, after = self.pair.a.status in MEASURED, self.pair.b.status in MEASURED
        if before and after:
            return None
        return "lost" if before else "gained" if after else "none"

    @property
    def time_verdict(self) -> Verdict:
        return self.presence or judge_time(self.time, self.time_p, self.margins.time)

    @property
    def memory_verdict(self) -> Verdict:
        return self.presence or judge_memory(self.pair.a, self.pair.b, self.margins.time)

    @property
    def quality_verdict(self) -> Verdict:
        """The worst that any column says: worse, then unclear, then better, then same."""
        if self.presence:
            return self.presence
        found = {
            judge_quality(name, self.quality[name], self.quality_p[name], self.margins.quality) for name in self.quality
        }
        order: tuple[Verdict, ...] = ("worse", "unclear", "better", "same")
        return next((verdict for verdict in order if verdict in found), "none")


def differences(pairs: Sequence[Pair], raw: Raw, margins: Margins) -> list[Difference]:
    """Every pair judged; p-values are adjusted over all pairs, for time and for each column of quality."""
    times = [time_change(pair.a, pair.b, *raw(pair)) for pair in pairs]
    qualities = [quality_changes(pair.a, pair.b) for pair in pairs]
    time_p = adjusted(times)
    quality_p = {name: adjusted([changes.get(name) for changes in qualities]) for name in QUALITY}
    return [
        Difference(
            pair, times[i], _memory_ratio(pair.a, pair.b), qualities[i], time_p[i],
            {name: values[i] for name, values in quality_p.items()}, margins,
        )
        for i, pair in enumerate(pairs)
    ]  # fmt: skip


def judge_time(change: Change | None, p: float, margin: float) -> Verdict:
    """same: the whole interval lies within the margin. faster or slower: the ratio is past the margin, its interval clears 1,
    and the adjusted p-value is at most 0.05. Everything else is unclear."""
    if change is None:
        return "none"
    if change.value.high <= 1 + margin and change.value.low >= 1 / (1 + margin):
        return "same"
    if is_slower(change, p, margin):
        return "slower"
    is_faster = change.value.high < 1 and change.value.median < 1 / (1 + margin) and p <= 1 - CONFIDENCE
    return "faster" if is_faster else "unclear"


def is_slower(change: Change, p: float, margin: float) -> bool:
    """Whether B clearly takes longer than A by more than a margin."""
    return change.value.low > 1 and change.value.median > 1 + margin and p <= 1 - CONFIDENCE


def judge_memory(a: Record, b: Record, margin: float) -> Verdict:
    """more, less or same: a peak is measured once and has no interval, so the margin decides, and what it is read from."""
    before, after = a.peak_memory_bytes, b.peak_memory_bytes
    if before is None or after is None:
        return "none"
    on_cpu = any((side.clock or "").startswith("perf_counter") for side in (a, b))
    close = CLOSE_RESIDENT_BYTES if on_cpu else CLOSE_BYTES
    if abs(after - before) <= close or 1 / (1 + margin) <= after / max(1, before) <= 1 + margin:
        return "same"
    return "more" if after > before else "less"


def judge_quality(name: str, change: Change, p: float, margin: float) -> Verdict:
    """same: the whole interval lies within the margin. worse or better: the difference is past it, and clear over heads."""
    if change.value.high <= margin and change.value.low >= -margin:
        return "same"
    if is_worse(name, change, p, margin):
        return "worse"
    value = change.value
    mirrored = Change(Interval(-value.median, -value.high, -value.low), change.p, change.how)
    return "better" if is_worse(name, mirrored, p, margin) else "unclear"


def is_worse(name: str, change: Change, p: float, margin: float) -> bool:
    """Whether a column of quality clearly fell (an error: rose) by more than a margin."""
    loss = -QUALITY[name] * change.value.median
    clear = change.how is None or (p <= 1 - CONFIDENCE and not change.value.low <= 0 <= change.value.high)
    return loss > margin and clear


def _memory_ratio(a: Record, b: Record) -> float | None:
    return b.peak_memory_bytes / a.peak_memory_bytes if a.peak_memory_bytes and b.peak_memory_bytes else None
