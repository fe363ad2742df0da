"""Whether a difference counts, and what makes a comparison fail."""

from __future__ import annotations

from typing import Any

import pytest

from pyramidbench.comparing.changes import Change
from pyramidbench.comparing.matching import Pair
from pyramidbench.comparing.thresholds import Threshold, parse_share, parse_thresholds
from pyramidbench.comparing.verdicts import (
    Difference,
    Margins,
    differences,
    judge_memory,
    judge_quality,
    judge_time,
)
from pyramidbench.errors import UserError
from pyramidbench.record import Record
from pyramidbench.stats import Interval

MIB = 1 << 20
CUDA = "CUDA events, cold L2"


def record(status: str = "ok", **columns: Any) -> Record:
    return Record(**({"cell": "c", "status": status, "method": "flat"} | columns))


@pytest.mark.parametrize(
    ("ratio", "p", "verdict"),
    [
        ((1.00, 0.99, 1.01), 0.9, "same"),
        ((1.015, 1.01, 1.02), 0.0, "same"),
        ((1.10, 1.05, 1.15), 0.001, "slower"),
        ((0.90, 0.85, 0.95), 0.001, "faster"),
        ((1.10, 1.05, 1.15), 0.06, "unclear"),
        ((1.10, 0.99, 1.20), 0.001, "unclear"),
        ((1.015, 1.005, 1.03), 0.001, "unclear"),
        ((0.985, 0.97, 0.995), 0.001, "unclear"),
    ],
)
def test_time_needs_margin_interval_and_evidence(ratio: tuple[float, float, float], p: float, verdict: str) -> None:
    assert judge_time(Change(Interval(*ratio)), p, 0.02) == verdict


def test_no_time_has_no_verdict() -> None:
    assert judge_time(None, 1.0, 0.02) == "none"


@pytest.mark.parametrize(
    ("a", "b", "verdict"),
    [
        (100, 101, "same"), (100, 110, "more"), (100, 90, "less"), (100, None, "none"), (1, 2, "same"), (0, 9, "more"),
    ],
)  # fmt: skip
def test_memory_by_the_margin_and_at_least_a_mebibyte(a: int | None, b: int | None, verdict: str) -> None:
    sizes = [record(peak_memory_bytes=None if size is None else size * MIB, clock=CUDA) for size in (a, b)]
    assert judge_memory(sizes[0], sizes[1], 0.02) == verdict


@pytest.mark.parametrize(
    ("clock", "verdict"), [(CUDA, "more"), ("perf_counter, cold cache", "same")], ids=["GPU", "CPU"]
)
def test_resident_memory_moves_by_more_than_an_allocators(clock: str, verdict: str) -> None:
    before, after = (record(peak_memory_bytes=size * MIB, clock=clock) for size in (3, 6))
    assert judge_memory(before, after, 0.02) == verdict
    assert judge_memory(before, record(peak_memory_bytes=9 * MIB, clock=clock), 0.02) == "more"


@pytest.mark.parametrize(
    ("name", "value", "how", "p", "verdict"),
    [
        ("recall", (-0.05, -0.05, -0.05), None, 1.0, "worse"),
        ("recall", (0.05, 0.05, 0.05), None, 1.0, "better"),
        ("output_error", (0.05, 0.05, 0.05), None, 1.0, "worse"),
        ("output_error", (-0.05, -0.05, -0.05), None, 1.0, "better"),
        ("mass_kept", (-0.005, -0.009, -0.001), "heads", 0.0, "same"),
        ("mass_kept", (-0.05, -0.08, -0.02), "heads", 0.01, "worse"),
        ("mass_kept", (-0.05, -0.12, 0.02), "heads", 0.2, "unclear"),
        ("mass_kept", (-0.05, -0.08, -0.02), "heads", 0.2, "unclear"),
    ],
)
def test_quality_by_its_direction(name: str, value: tuple[float, ...], how: Any, p: float, verdict: str) -> None:
    assert judge_quality(name, Change(Interval(*value), p, how), p, 0.01) == verdict


def difference(a: Record, b: Record, ratio: tuple[float, float, float] = (1.0, 1.0, 1.0)) -> Difference:
    return Difference(Pair(a, b), Change(Interval(*ratio)), None, {}, 0.0, {}, Margins())


@pytest.mark.parametrize(
    ("before", "after", "verdict"), [("ok", "oom", "lost"), ("timeout", "low_n", "gained"), ("oom", "oom", "none")]
)
def test_a_cell_that_stops_giving_numbers_is_lost_and_fails_every_threshold(
    before: str, after: str, verdict: str
) -> None:
    found = difference(record(before), record(after))
    assert (found.time_verdict, found.memory_verdict, found.quality_verdict) == (verdict,) * 3
    for threshold in parse_thresholds(["slower:5%,memory:10%,quality:0.01"]):
        assert threshold.broken_by(found) == (verdict == "lost")


@pytest.mark.parametrize(
    ("limit", "ratio", "broken"),
    [(0.05, (1.06, 1.04, 1.08), True), (0.05, (1.04, 1.03, 1.05), False), (0.05, (1.06, 0.99, 1.2), False),
     (0.005, (1.01, 1.005, 1.015), True), (0.05, (0.5, 0.4, 0.6), False)],
)  # fmt: skip
def test_slower_fails_beyond_its_own_limit(limit: float, ratio: tuple[float, float, float], broken: bool) -> None:
    assert Threshold("slower", limit).broken_by(difference(record(), record(), ratio)) == broken


def test_memory_and_quality_fail_beyond_theirs() -> None:
    a = record(peak_memory_bytes=100 * MIB, output_error=0.1, latency_s=1.0)
    b = record(peak_memory_bytes=108 * MIB, output_error=0.15, latency_s=1.0)
    (found,) = differences([Pair(a, b)], lambda _: (None, None, False), Margins())
    assert (found.memory_verdict, found.quality_verdict) == ("more", "worse")
    assert found.memory == 1.08
    assert Threshold("memory", 0.05).broken_by(found)
    assert not Threshold("memory", 0.10).broken_by(found)
    assert Threshold("quality", 0.04).broken_by(found)
    assert not Threshold("quality", 0.06).broken_by(found)


def test_one_clear_cell_among_many_equal_ones_stays_clear() -> None:
    pairs = [Pair(record(latency_s=1.0, latency_low_s=0.99, latency_high_s=1.01),
                  record(latency_s=value, latency_low_s=0.99 * value, latency_high_s=1.01 * value))
             for value in [1.2] + 199 * [1.0]]  # fmt: skip
    found = differences(pairs, lambda _: (None, None, False), Margins())
    assert [pair.time_verdict for pair in found] == ["slower"] + 199 * ["same"]


@pytest.mark.parametrize(("text", "value"), [("2%", 0.02), ("0.5 %", 0.005), ("0.02", 0.02), ("0", 0.0), (".5", 0.5)])
def test_shares(text: str, value: float) -> None:
    assert parse_share(text, "--margin") == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "x", "-1%", "100%", "1", "5%%"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"--margin .* not a share; accepted: 2% or 0\.02"):
        parse_share(text, "--margin")


def test_thresholds_are_read_from_one_text_or_several() -> None:
    assert [str(t) for t in parse_thresholds(["slower:5%,quality:0.01", "memory:10%"])] == [
        "slower:5%", "quality:0.01", "memory:10%",
    ]  # fmt: skip
    for wrong in ("slower", "fast:5%", "slower:", "slower:x"):
        with pytest.raises(UserError, match="accepted"):
            parse_thresholds([wrong])
