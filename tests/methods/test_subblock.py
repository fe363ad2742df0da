"""SubBlock by hand: blocks of 4 keys and tiles of 4 queries, in 2 parts each; the last tile keeps K of three blocks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

# Means of the parts, by block: (4, 0) and (-4, 0); (0, 3) and (0, 3); (0, 0) twice; the last block is the tile's own.
KEYS = [
    [[5.0, 0.0], [3.0, 0.0], [-5.0, 0.0], [-3.0, 0.0]]
    + [[0.0, 1.0], [0.0, 5.0], [0.0, 2.0], [0.0, 4.0]]
    + [[0.0, 0.0]] * 8
]
# The last tile's parts ask (1, 0), the mean of (2, 0) and (0, 0), and (-1, 1), so that the whole tile asks (0, 0.5).
QUERIES = [[[0.0, 0.0]] * 12 + [[2.0, 0.0], [0.0, 0.0], [-2.0, 1.0], [0.0, 1.0]]]
SIZES = {"block_size": 4, "query_tile": 4, "parts": 2}


def test_every_part_of_the_tile_meets_every_part_of_a_block(kept: Callable[..., list[list[list[int]]]]) -> None:
    # Block 0: 4, -4 and -4, 4: LogSumExp 4.69. Block 1: 0, 0 and 3, 3: ln(2 + 2e³) = 3.74. Block 2: ln 4 = 1.39.
    for top_k, blocks in ((1, [0, 3]), (2, [0, 1, 3])):
        (tiles,) = kept("subblock", QUERIES, KEYS, top_k=top_k, **SIZES)
        assert tiles[-1] == blocks
    # In one part each, block 0's mean is 0 and block 1's is (0, 3), which the tile's mean asks for: 0 and 1.5.
    (tiles,) = kept("subblock", QUERIES, KEYS, top_k=1, block_size=4, query_tile=4, parts=1)
    assert tiles[-1] == [1, 3]


@pytest.mark.parametrize(("reduce", "blocks"), [("none", [[0, 3], [1, 3]]), ("sum_lse", [[1, 3]])])
def test_heads_choose_apart_or_add_their_scores(
    reduce: str, blocks: list[list[int]], kept: Callable[..., list[list[list[int]]]]
) -> None:
    # The second head asks (0, 2): 0 four times, ln 4 = 1.39, in block 0, and 6 four times, 7.39, in block 1. Added to the first
    # head's 4.69 and 3.74: 6.08 and 11.13.
    heads = [*QUERIES, [[0.0, 2.0]] * 16]
    found = kept("subblock", heads, KEYS, top_k=1, head_reduce=reduce, **SIZES)
    assert [tiles[-1] for tiles in found] == blocks


def test_a_tile_shorter_than_a_part_is_one_part(kept: Callable[..., list[list[list[int]]]]) -> None:
    # Row 15 alone asks (0, 1): logits 0 in block 0, 3 and 3 in block 1. Row 12 asks (2, 0): 8 and -8, then 0.
    (rows,) = kept("subblock", QUERIES, KEYS, top_k=1, block_size=4, query_tile=1, parts=2)
    assert (rows[15], rows[12]) == ([1, 3], [0, 3])


def test_the_ragged_end_counts_what_is_there(kept: Callable[..., list[list[list[int]]]]) -> None:
    # Eleven rows: the last tile's parts are the rows 8 and 9, which ask 0, and row 10 alone, which asks 3 (not 1.5). Block 0
    # has the means 0 and 1: 3 + e³ = 23.1. Block 1 has .7 twice: 2 + 2·e^2.1 = 18.3. With 1.5 it would be 7.5 and 7.7.
    keys = [[[x] for x in (0.0, 0.0, 1.0, 1.0, 0.7, 0.7, 0.7, 0.7, 0.0, 0.0, 0.0)]]
    (tiles,) = kept("subblock", [[[0.0]] * 10 + [[3.0]]], keys, top_k=1, **SIZES)
    assert tiles == [[0], [0, 1], [0, 2]]
