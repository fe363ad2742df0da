"""The axis grammar: what it reads, what it refuses, and that written lengths read back."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyramidbench.axes import (
    LARGEST,
    MOST_POINTS,
    Keep,
    format_length,
    parse_axis,
    parse_duration,
    parse_heads,
    parse_keep,
    parse_levels,
    parse_sparsity,
)
from pyramidbench.errors import UserError

LENGTHS = st.integers(1, 1 << 24)
repeatable = settings(deadline=None, derandomize=True)


@pytest.mark.parametrize(
    ("value", "points"),
    [
        ("4k..64k", [4096, 8192, 16384, 32768, 65536]),
        ("4k..20k", [4096, 8192, 16384]),
        ("4k..256k:x4", [4096, 16384, 65536, 262144]),
        ("4k..16k:+4k", [4096, 8192, 12288, 16384]),
        ("2^12..2^14", [4096, 8192, 16384]),
        ("1k..16k:n=3", [1024, 4096, 16384]),
        ("1000..2000:n=3", [1000, 1414, 2000]),
        ("1k,4k..32k,100000", [1024, 4096, 8192, 16384, 32768, 100000]),
        ("8k,4k,8k", [8192, 4096]),
        ("2m", [2 << 20]),
        ("4K .. 8K", [4096, 8192]),
        ("7..7", [7]),
        (4096, [4096]),
        ([1024, "4k..8k", "2k,1k"], [1024, 4096, 8192, 2048]),
        ((1, 64), [1, 64]),
    ],
)
def test_an_axis_reads_as_written(value: object, points: list[int]) -> None:
    assert list(parse_axis(value, "seq")) == points


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("", "empty"),
        ([], "empty"),
        ("4k,,8k", "an item of the list is empty"),
        ("8k..4k", "reversed"),
        ("0", "0 is below 1"),
        ("-4k", "-4096 is below 1"),
        ("-4..4", "does not lead from -4 to 4"),
        ("-4..4:+1", "-4 is below 1"),
        ("0..8:+4", "0 is below 1"),
        ("4k..8k:x1", "does not lead from"),
        ("4k..8k:x-2", "does not lead from"),
        ("4k..8k:+0", "does not lead from"),
        ("4k..8k:+-4", "does not lead from"),
        ("4k..8k:n=1", ":n="),
        ("4k..8k:n=x", ":n="),
        ("-4..8:n=3", ":n="),
        ("4k..8k:2", "unknown step"),
        ("4k..8k:", "not a whole number"),
        ("4k..", "not a whole number"),
        ("..4k", "not a whole number"),
        ("1k..2k..4k", "not a whole number"),
        ("1.5k", "not a whole number"),
        ("4g", "not a whole number"),
        ("0x10", "not a whole number"),
        (4.0, "not a whole number"),
        ("2^99", "over 2^40"),
        ("999^999", "over 2^40"),
        ("1..1m:+1", f"more than {MOST_POINTS} points"),
        (True, "neither text nor a number"),
        (None, "neither text nor a number"),
        ([[1024]], "neither text nor a number"),
        ({"from": 1}, "neither text nor a number"),
    ],
)
def test_a_refusal_says_what_was_given_and_what_is_accepted(value: object, why: str) -> None:
    with pytest.raises(UserError, match=re.escape(why)) as caught:
        parse_axis(value, "--seq")
    message = str(caught.value)
    assert message.startswith("--seq '")
    assert "accepted: " in message
    assert "4k..256k" in message
    assert "\n" not in message


def test_zero_is_a_point_only_where_the_axis_allows_it() -> None:
    assert parse_axis("0,8", "top_k", minimum=0) == (0, 8)
    assert parse_axis("0..8:+4", "top_k", minimum=0) == (0, 4, 8)
    with pytest.raises(UserError, match="does not lead from 0 to 8"):
        parse_axis("0..8", "top_k", minimum=0)


@repeatable
@given(st.integers(1, LARGEST))
def test_a_written_length_reads_back(length: int) -> None:
    assert parse_axis(format_length(length), "seq") == (length,)


@repeatable
@given(st.lists(LENGTHS, min_size=1, max_size=20))
def test_a_list_keeps_its_order_and_drops_repeats(lengths: list[int]) -> None:
    text = ",".join(map(format_length, lengths))
    assert parse_axis(text, "seq") == tuple(dict.fromkeys(lengths)) == parse_axis(lengths, "seq")


@repeatable
@given(LENGTHS, LENGTHS, st.integers(2, 9))
def test_a_geometric_range_multiplies_and_stays_inside(one: int, other: int, factor: int) -> None:
    first, last = sorted((one, other))
    points = parse_axis(f"{first}..{last}:x{factor}", "seq")
    assert points[0] == first
    assert points[-1] <= last < points[-1] * factor
    assert all(later == earlier * factor for earlier, later in pairwise(points))


@repeatable
@given(LENGTHS, st.integers(0, 200), st.integers(1, 5000), st.integers(0, 4999))
def test_an_arithmetic_range_adds_and_stays_inside(first: int, count: int, step: int, rest: int) -> None:
    last = first + count * step + rest % step
    assert parse_axis(f"{first}..{last}:+{step}", "seq") == tuple(range(first, last + 1, step))


@repeatable
@given(LENGTHS, LENGTHS, st.integers(2, 64))
def test_spaced_points_ascend_between_exact_ends(one: int, other: int, count: int) -> None:
    first, last = sorted((one, other))
    points = parse_axis(f"{first}..{last}:n={count}", "seq")
    assert (points[0], points[-1]) == (first, last)
    assert list(points) == sorted(set(points))
    assert len(points) <= count
    if len(points) == count > 2:
        ratio = (last / first) ** (1 / (count - 1))
        assert all(abs(point - first * ratio**index) <= 0.5 + 1e-6 * point for index, point in enumerate(points))


@repeatable
@given(st.text(max_size=30))
def test_any_text_is_either_points_in_bounds_or_a_user_error(text: str) -> None:
    try:
        points = parse_axis(text, "seq")
    except UserError:
        return
    assert points
    assert all(1 <= point <= LARGEST for point in points)


@repeatable
@given(st.from_regex(r"[0-9]{1,5}[km]?\.\.[0-9^]{1,5}[km]?(:([x+]|n=)-?[0-9]{1,4})?", fullmatch=True))
def test_any_range_is_either_ascending_or_a_user_error(text: str) -> None:
    try:
        points = parse_axis(text, "seq")
    except UserError:
        return
    assert list(points) == sorted(set(points))


def test_levels_mix_words_and_numbers() -> None:
    assert parse_levels("1,2,full,auto,2") == (1, 2, "full", "auto")
    assert parse_levels([1, "2..8", "full"]) == (1, 2, 4, 8, "full")
    assert parse_levels("auto") == ("auto",)


@pytest.mark.parametrize("value", ["ful", "0", "", [], None, "1..auto", True])
def test_levels_refuse_other_words(value: object) -> None:
    with pytest.raises(UserError, match=r"levels .*accepted: "):
        parse_levels(value)


@pytest.mark.parametrize(
    ("text", "keep", "blocks"),
    [
        ("2048tok", Keep(2048, "tok"), 32),
        ("2ktok", Keep(2048, "tok"), 32),
        ("64blk", Keep(64, "blk"), 64),
        ("5%", Keep(5, "%"), 10),
        ("0.1%", Keep(0.1, "%"), 1),
        ("100%", Keep(100, "%"), 200),
    ],
)
def test_keep_comes_to_blocks(text: str, keep: Keep, blocks: int) -> None:
    assert parse_keep(text) == keep == parse_keep(str(keep))
    assert keep.blocks(block_size=64, total=200) == blocks


@pytest.mark.parametrize("value", ["", "5", 5, "0%", "101%", "0blk", "-1blk", "1.5blk", "64 blocks", "%", "tok", None])
def test_keep_refuses_other_budgets(value: object) -> None:
    with pytest.raises(UserError, match="2048tok, 64blk or 5%"):
        parse_keep(value)


def test_kept_tokens_are_whole_blocks() -> None:
    with pytest.raises(UserError, match=r"'100tok'.*blocks of 64 keys.*such as 64tok"):
        parse_keep("100tok").blocks(block_size=64, total=200)
    with pytest.raises(UserError, match="such as 64tok"):
        parse_keep("10tok").blocks(block_size=64, total=200)


@pytest.mark.parametrize(("value", "heads"), [("32:8", (32, 8)), ("16", (16, 16)), (16, (16, 16)), ("9:3", (9, 3))])
def test_heads(value: object, heads: tuple[int, int]) -> None:
    assert parse_heads(value) == heads


@pytest.mark.parametrize("value", ["9:2", "0", "8:0", "2:8", "", "8:", "a", -1, True, 1.0, None, "8:4:2"])
def test_heads_that_cannot_be_shared_are_refused(value: object) -> None:
    with pytest.raises(UserError, match=r"heads '.*accepted: .*32:8"):
        parse_heads(value)


def test_sparsity_is_a_list_of_shares() -> None:
    assert parse_sparsity(0.9) == parse_sparsity("0.9") == (0.9,)
    assert parse_sparsity("0,.5,0.90,0.9") == (0.0, 0.5, 0.9)


@pytest.mark.parametrize("value", ["1", 1, -0.1, "90%", "nan", "", True])
def test_sparsity_refuses_what_is_no_share(value: object) -> None:
    with pytest.raises(UserError, match=r"sparsity .*such as 0\.9"):
        parse_sparsity(value)


@pytest.mark.parametrize(
    ("value", "seconds"), [("90s", 90), ("10m", 600), ("1.5h", 5400), ("500ms", 0.5), ("60", 60), (60, 60), (0.5, 0.5)]
)
def test_durations_are_seconds(value: object, seconds: float) -> None:
    assert parse_duration(value, "--cell-budget") == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("value", ["", "0s", "-1s", "10 parsecs", "s", True, None])
def test_durations_are_above_zero_and_have_known_units(value: object) -> None:
    with pytest.raises(UserError, match=r"--cell-budget .*such as 90s, 10m"):
        parse_duration(value, "--cell-budget")


@pytest.mark.parametrize("parse", [parse_axis, parse_levels, parse_keep, parse_heads, parse_sparsity, parse_duration])
@repeatable
@given(value=st.one_of(st.text(max_size=12), st.floats(), st.integers(), st.none(), st.lists(st.text(max_size=3))))
def test_no_value_breaks_a_parser(parse: Callable[[object, str], object], value: object) -> None:
    """Anything that is not accepted is a UserError of one line that names the axis."""
    message = "--name '"
    try:
        parse(value, "--name")
    except UserError as error:
        message = str(error)
    assert message.startswith("--name '")
    assert "\n" not in message
