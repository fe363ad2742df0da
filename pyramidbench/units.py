"""Units: SI numbers as people read them. Only where text is made; files and code keep SI."""

from __future__ import annotations

import math
import re

from pyramidbench.axes import format_length

MISSING = "–"
"""What a missing number looks like: never 0, never an empty cell."""


def is_missing(value: object) -> bool:
    """Whether a value of a dataframe stands for 'not there'."""
    return value is None or value != value or str(value) == "<NA>"


def significant(value: float, digits: int = 3) -> str:
    """A number with so many significant digits and no exponent: 0.0123, 1.23, 123, 12345."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])
    decimals = digits - 1 - exponent
    return f"{value:.{max(0, decimals)}f}"


def tokens(value: float | None) -> str:
    """A token count as the command line takes it: 8k, 1m, 1000."""
    return MISSING if value is None or is_missing(value) else format_length(int(value))


def integer(value: float | None) -> str:
    return MISSING if value is None or is_missing(value) else f"{int(value)}"


def milliseconds(seconds: float | None) -> str:
    return MISSING if seconds is None or is_missing(seconds) else significant(1e3 * seconds)


def interval(seconds: float | None, low: float | None, high: float | None, sign: str = "±") -> str:
    """A time in ms with half the width of its interval: '12.3 ±0.4'; without an interval '12.3'."""
    text = milliseconds(seconds)
    if seconds is None or is_missing(seconds) or low is None or high is None or is_missing(low) or is_missing(high):
        return text
    decimals = len(text.partition(".")[2])
    half = 500 * (high - low)
    shown = f"{half:.{decimals}f}" if half >= 0.5 * 10**-decimals else significant(half, 1)
    return f"{text} {sign}{shown}"


def mebibytes(size: float | None) -> str:
    return MISSING if size is None or is_missing(size) else significant(size / 2**20)


def gibibytes(size: float) -> str:
    return f"{size / 2**30:.3g} GiB"


def share(value: float | None) -> str:
    """A share between 0 and 1 with three decimals; below 0.001 but not 0 as '<0.001'."""
    if value is None or is_missing(value):
        return MISSING
    return "<0.001" if 0 < value < 0.0005 else f"{value:.3f}"


def percent(value: float) -> str:
    """A share in per cent with one decimal, never rounded up to 100."""
    return f"{min(100 * value, 99.9) if value < 1 else 100:.1f}".removesuffix(".0") + " %"


def ratio(value: float | None, sign: str = "×") -> str:
    return MISSING if value is None or is_missing(value) else f"{significant(value)}{sign}"


def ratio_interval(value: float | None, low: float | None, high: float | None) -> str:
    """A ratio with half the width of its interval: '2.31× ±0.04'; without an interval, or of 1 with itself, '2.31×'."""
    text = ratio(value, "")
    if value is None or is_missing(value):
        return text
    if low is None or high is None or is_missing(low) or is_missing(high) or low == high:
        return f"{text}×"
    half = (high - low) / 2
    decimals = len(text.partition(".")[2])
    return f"{text}× ±{half:.{decimals}f}" if half >= 0.5 * 10**-decimals else f"{text}× ±{significant(half, 1)}"


def duration(seconds: float | None) -> str:
    """A span that a person waits: '0.4 s', '90 s', '12 min', '3.1 h'."""
    if seconds is None or is_missing(seconds):
        return MISSING
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{significant(seconds / size, 2)} {unit}"
    return f"{significant(seconds, 2)} s"


def one_line(text: object) -> str:
    """Text from a run with line breaks and unprintable characters (a terminal would obey them) made blanks."""
    return re.sub(r" +", " ", "".join(c if c.isprintable() else " " for c in str(text))).strip()
