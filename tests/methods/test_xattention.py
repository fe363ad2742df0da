"""XAttention by hand: squares of 2 × 2 that are a block and a tile each; the last tile's queries ask 1 and 2."""

from __future__ import annotations

from collections.abc import Callable

import pytest

QUERIES = [[[0.0]] * 6 + [[1.0], [2.0]]]
KEYS = [[[1.0], [0.0], [0.0], [1.0], [1.0], [1.0], [0.0], [0.0]]]
# Antidiagonal of a square: (last query × first key + first query × last key) ÷ 2. Block 0: (2·1 + 1·0)/2 = 1,
# block 1: (2·0 + 1·1)/2 = 0.5, block 2: (2·1 + 1·1)/2 = 1.5. Softmax: .307, .186, .506. (The main diagonal would put block 1
# before block 0.)
SIZES = {"block_size": 2, "query_tile": 2, "stride": 2}


@pytest.mark.parametrize(("top_p", "blocks"), [(0.5, [2, 3]), (0.6, [0, 2, 3]), (0.82, [0, 1, 2, 3]), (0.0, [3])])
def test_the_fewest_blocks_that_reach_p(
    top_p: float, blocks: list[int], kept: Callable[..., list[list[list[int]]]]
) -> None:
    (tiles,) = kept("xattention", QUERIES, KEYS, top_p=top_p, **SIZES)
    assert tiles[-1] == blocks


@pytest.mark.parametrize(("top_p", "blocks"), [(0.55, [0, 2, 3]), (0.6, [0, 1, 2, 3])])
def test_p_is_a_share_of_all_rows_of_squares(
    top_p: float, blocks: list[int], kept: Callable[..., list[list[list[int]]]]
) -> None:
    # A tile of the last four queries overlaps blocks 2 and 3. Its first two rows ask 0: .5 each for blocks 0 and 1; its last
    # two give the antidiagonals 1 and 0.5, softmax .62 and .38. Together block 0 has 1.12 of 2, a share of .56.
    (tiles,) = kept("xattention", QUERIES, KEYS, top_p=top_p, **{**SIZES, "query_tile": 4})
    assert tiles[-1] == blocks


@pytest.mark.parametrize(("top_k", "blocks"), [(1, [2, 3]), (2, [0, 2, 3])])
def test_the_k_best_blocks(top_k: int, blocks: list[int], kept: Callable[..., list[list[list[int]]]]) -> None:
    (tiles,) = kept("xattention:top_k", QUERIES, KEYS, top_k=top_k, **SIZES)
    assert tiles[-1] == blocks


def test_what_the_forced_blocks_hold_counts_towards_p(kept: Callable[..., list[list[list[int]]]]) -> None:
    # The sink, block 0, holds .307: .5 needs block 2 besides, .3 nothing.
    (tiles,) = kept("xattention", QUERIES, KEYS, top_p=0.5, **{**SIZES, "sink_blocks": 1})
    assert tiles[-1] == [0, 2, 3]
    (tiles,) = kept("xattention", QUERIES, KEYS, top_p=0.3, **{**SIZES, "sink_blocks": 1})
    assert tiles[-1] == [0, 3]
