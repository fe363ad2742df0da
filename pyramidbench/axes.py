"""The words of a sweep's axes: lengths and ranges such as 4k..256k, budgets such as 5%, heads such as 32:8, durations.

    axis   = item {"," item}
    item   = number | number ".." number [":" step]
    number = digits ["k" | "m"] | digits "^" digits          k = 1024, m = 1024²
    step   = "x" digits | "+" number | "n=" digits           without a step each point doubles the one before

A stepped range ends at its last point that does not pass the end; ":n=" spaces points geometrically and hits both ends.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from pyramidbench.errors import UserError

LARGEST = 1 << 40
MOST_POINTS = 4096
SUFFIXES = {"": 1, "k": 1 << 10, "m": 1 << 20}
SECONDS = {"ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0}
Levels = int | Literal["auto", "full"]

AXIS = "a number (k = 1024), a range such as 4k..256k, 4k..256k:x4, 4k..32k:+4k or 4k..256k:n=9, or a list 1k,4k..32k"
LEVELS = "a number of levels, 'auto', 'full', or a list such as 1,2,4,full"
KEEP = "tokens, blocks or a share, such as 2048tok, 64blk or 5%"
HEADS = "query heads and the key/value heads that they share, such as 32:8, or one number for both, such as 16"
SPARSITY = "a share of pairs left out, at least 0 and below 1, such as 0.9"
DURATION = "a time such as 90s, 10m or 1h"

_NUMBER = re.compile(r"(-?\d{1,15})([km]?)")
_POWER = re.compile(r"(\d{1,3})\^(\d{1,3})")
_RANGE = re.compile(r"([^.:]+)\.\.([^.:]+)(?::(.+))?")
_KEEP = re.compile(r"(?:([^%]+)(tok|blk)|(\d+(?:\.\d+)?)%)")
_DURATION = re.compile(r"(\d+(?:\.\d+)?) ?(ms|s|m|h|)")


@dataclass(frozen=True)
class Keep:
    """A budget in tokens ("tok"), blocks ("blk") or per cent of all blocks ("%")."""

    amount: float
    unit: Literal["tok", "blk", "%"]

    def blocks(self, block_size: int, total: int) -> int:
        """K for `total` blocks of `block_size` keys; a share is rounded and keeps at least one block.

        Raises:
            UserError: the tokens are no whole number of blocks.
        """
        if self.unit == "blk":
            return int(self.amount)
        if self.unit == "%":
            return max(1, round(total * self.amount / 100))
        if self.amount % block_size:
            below = int(self.amount // block_size * block_size)
            raise UserError(
                f"keep '{self}': not a whole number of blocks of {block_size} keys; "
                f"accepted: a multiple of block_size, such as {below or block_size}tok."
            )
        return int(self.amount // block_size)

    def __str__(self) -> str:
        return f"{self.amount:.15g}{self.unit}"


def parse_axis(value: object, name: str, minimum: int = 1) -> tuple[int, ...]:
    """The points of an axis, in the order given and without repeats.

    `value` is text in this module's grammar, a whole number, or a list of both; `name` is what messages call the axis.

    Raises:
        UserError: not the grammar, an empty or reversed range, or a point below `minimum`.
    """
    points: dict[int, None] = {}
    for item in split_list(value, name, AXIS):
        for point in _points(item, name):
            if point < minimum:
                raise _refused(name, item, f"{point} is below {minimum}", AXIS)
            points[point] = None
            if len(points) > MOST_POINTS:
                raise _refused(name, item, f"more than {MOST_POINTS} points", AXIS)
    return tuple(points)


def parse_levels(value: object, name: str = "levels") -> tuple[Levels, ...]:
    """The values of the `levels` axis, in the order given and without repeats: numbers from 1, "auto" and "full"."""
    levels: dict[Levels, None] = {}
    for item in split_list(value, name, LEVELS):
        if item == "auto":
            levels["auto"] = None
        elif item == "full":
            levels["full"] = None
        elif item.isalpha():
            raise _refused(name, item, "not a known word", LEVELS)
        else:
            levels.update(dict.fromkeys(parse_axis(item, name)))
    return tuple(levels)


def parse_keep(value: object, name: str = "keep") -> Keep:
    """One budget: "2048tok", "64blk" or "5%" (above 0, at most 100 %)."""
    match = _KEEP.fullmatch(value.strip().lower()) if isinstance(value, str) else None
    if match is None:
        raise _refused(name, value, "not a budget", KEEP)
    number, unit, share = match.groups()
    if share is not None:
        if not 0 < float(share) <= 100:
            raise _refused(name, value, "a share is above 0% and at most 100%", KEEP)
        return Keep(float(share), "%")
    amount = _number(number, name, value, KEEP)
    if amount < 1:
        raise _refused(name, value, "keeps nothing", KEEP)
    return Keep(amount, "tok" if unit == "tok" else "blk")


def parse_sparsity(value: object, name: str = "sparsity") -> tuple[float, ...]:
    """Shares of pairs left out, 0 ≤ share < 1, in the order given and without repeats."""
    shares: dict[float, None] = {}
    for item in split_list(value, name, SPARSITY):
        if not re.fullmatch(r"\d*\.?\d+", item) or float(item) >= 1:
            raise _refused(name, item, "not such a share", SPARSITY)
        shares[float(item)] = None
    return tuple(shares)


def parse_heads(value: object, name: str = "heads") -> tuple[int, int]:
    """Query heads and key/value heads of "32:8"; "16" has as many of both.

    Raises:
        UserError: not two numbers from 1, or query heads that the key/value heads do not divide.
    """
    text = str(value).strip() if isinstance(value, str | int) and not isinstance(value, bool) else ""
    match = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", text)
    if match is None:
        raise _refused(name, value, "not a number of heads", HEADS)
    heads, kv_heads = int(match[1]), int(match[2] or match[1])
    if heads < 1 or kv_heads < 1:
        raise _refused(name, value, "0 heads", HEADS)
    if heads % kv_heads:
        raise _refused(name, value, f"{heads} query heads cannot be shared evenly by {kv_heads}", HEADS)
    return heads, kv_heads


def parse_duration(value: object, name: str) -> float:
    """Seconds of "90s", "10m", "1h" or "500ms"; a number without a unit is seconds. Above 0."""
    text = str(value).strip().lower() if not isinstance(value, bool) else ""
    match = _DURATION.fullmatch(text)
    if match is None or float(match[1]) == 0:
        raise _refused(name, value, "not a time above 0", DURATION)
    return float(match[1]) * SECONDS[match[2]]


def format_length(length: int) -> str:
    """A length as people write it: 4096 is "4k", 1048576 is "1m", 100000 is "100000"."""
    for suffix in ("m", "k"):
        if length and length % SUFFIXES[suffix] == 0:
            return f"{length // SUFFIXES[suffix]}{suffix}"
    return str(length)


def split_list(value: object, name: str, accepted: str) -> list[str]:
    """The items of a value: text is split at commas, a list is flattened, a number stands for itself.

    Raises:
        UserError: nothing in it, an empty item, or something that is neither text nor a number.
    """
    parts = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    items: list[str] = []
    for part in parts:
        if isinstance(part, bool) or not isinstance(part, str | int | float):
            raise _refused(name, part, "neither text nor a number", accepted)
        items += [item.strip() for item in str(part).split(",")]
    if not items or "" in items:
        raise _refused(name, value, "empty" if not any(items) else "an item of the list is empty", accepted)
    return items


def _points(item: str, name: str) -> Iterator[int]:
    """The points of one number or range, ascending."""
    item = item.lower()
    match = _RANGE.fullmatch(item)
    if match is None:
        yield _number(item, name, item, AXIS)
        return
    first, last = (_number(match[group], name, item, AXIS) for group in (1, 2))
    if first > last:
        raise _refused(name, item, "the range is reversed", AXIS)
    step = match[3] or "x2"
    if step.startswith("n="):
        yield from _spaced(first, last, step, name, item)
        return
    if step[0] not in "x+":
        raise _refused(name, item, f"unknown step ':{step}'", AXIS)
    size = _number(step[1:], name, item, AXIS)
    if size < (2 if step[0] == "x" else 1) or (step[0] == "x" and first < 1):
        raise _refused(name, item, f"step ':{step}' does not lead from {first} to {last}", AXIS)
    while first <= last:
        yield first
        first = first * size if step[0] == "x" else first + size


def _spaced(first: int, last: int, step: str, name: str, item: str) -> Iterator[int]:
    """`step` is "n=9": that many points, spaced geometrically, rounded, with exact ends."""
    if not re.fullmatch(r"n=\d{1,4}", step) or not 2 <= int(step[2:]) <= MOST_POINTS or first < 1:
        raise _refused(name, item, f":n= spaces 2 to {MOST_POINTS} points geometrically from a start above 0", AXIS)
    count = int(step[2:])
    ratio = math.log(last / first)
    yield first
    for index in range(1, count - 1):
        yield min(last, max(first, round(first * math.exp(ratio * index / (count - 1)))))
    yield last


def _number(text: str, name: str, given: object, accepted: str) -> int:
    text = text.strip()
    if match := _NUMBER.fullmatch(text):
        number = int(match[1]) * SUFFIXES[match[2]]
    elif match := _POWER.fullmatch(text):
        number = int(match[1]) ** int(match[2])
    else:
        raise _refused(name, given, f"'{text}' is not a whole number", accepted)
    if number > LARGEST:
        raise _refused(name, given, f"'{text}' is over 2^40", accepted)
    return number


def _refused(name: str, given: object, why: str, accepted: str) -> UserError:
    one_line = " ".join(f"{name} '{given}': {why}; accepted: {accepted}.".split())
    return UserError(one_line)
