"""Exact Top-p by hand: the last query gives its keys the weights 1, 1, 5, 1, 1, 1 of 10, in blocks of 2."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

KEYS = [[[math.log(weight)] for weight in (1, 1, 5, 1, 1, 1)]]


@pytest.mark.parametrize(("top_p", "blocks"), [(0.1, [2]), (0.3, [1, 2]), (0.79, [1, 2]), (0.81, [0, 1, 2])])
def test_the_fewest_blocks_that_hold_p(
    top_p: float, blocks: list[int], kept: Callable[..., list[list[list[int]]]]
) -> None:
    # Block masses .2, .6 and, forced, .2.
    (rows,) = kept("exact_topp", [[[1.0]] * 6], KEYS, block_size=2, query_tile=1, top_p=top_p)
    assert rows[-1] == blocks


def test_the_heads_of_a_group_are_averaged(kept: Callable[..., list[list[list[int]]]]) -> None:
    # The second head asks 0: 1/3 each. Mean masses .267, .467 and, forced, .267: .7 is reached with block 1, .8 is not.
    heads = [[[1.0]] * 6, [[0.0]] * 6]
    (rows,) = kept("exact_topp", heads, KEYS, block_size=2, query_tile=1, top_p=0.7)
    assert rows[-1] == [1, 2]
    (rows,) = kept("exact_topp", heads, KEYS, block_size=2, query_tile=1, top_p=0.8)
    assert rows[-1] == [0, 1, 2]
