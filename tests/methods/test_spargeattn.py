"""SpargeAttn by hand: blocks and tiles of 2; block 1 holds opposite keys, for which no mean can stand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

KEYS = [[[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [2.0, 0.0], [2.0, 0.0], [0.0, 0.0], [0.0, 0.0]]]
ALIKE = [[[1.0, 0.0]] * 8]
# Mean cosines: block 0: 1, block 1: (1 + 1 - 1 - 1)/4 = 0, block 2: 1. Logits of the alike blocks 0 and 2: 1 and 2, so shares
# 1/(1 + e) = .27 and .73.
SIZES = {"block_size": 2, "query_tile": 2}


@pytest.mark.parametrize(("top_p", "blocks"), [(0.7, [1, 2, 3]), (0.8, [0, 1, 2, 3]), (0.0, [1, 3])])
def test_p_of_the_alike_blocks_and_all_others(
    top_p: float, blocks: list[int], kept: Callable[..., list[list[list[int]]]]
) -> None:
    (tiles,) = kept("spargeattn", ALIKE, KEYS, top_p=top_p, **SIZES)
    assert tiles[-1] == blocks


def test_a_tile_whose_rows_differ_keeps_everything(kept: Callable[..., list[list[list[int]]]]) -> None:
    opposite = [[[1.0, 0.0]] * 6 + [[1.0, 0.0], [-1.0, 0.0]]]
    (tiles,) = kept("spargeattn", opposite, KEYS, top_p=0.1, **SIZES)
    assert tiles[-1] == [0, 1, 2, 3]
    # The third tile's rows agree: block 0 is all that p needs, and block 1 is unlike.
    assert tiles[2] == [0, 1, 2]


def test_similarity_says_what_is_alike(kept: Callable[..., list[list[list[int]]]]) -> None:
    # Block 1's keys (1, 0) and (0, 1) have a mean cosine of (1 + 1)/4 = .5. Alike, its mean (.5, .5) has
    # the logit .5: shares .23, .14, .63, of which p = .7 takes blocks 2 and 0. Unlike, it is kept, and p takes block 2 alone.
    keys = [[*KEYS[0][:3], [0.0, 1.0], *KEYS[0][4:]]]
    (tiles,) = kept("spargeattn", ALIKE, keys, top_p=0.7, similarity=0.51, **SIZES)
    assert tiles[-1] == [1, 2, 3]
    (tiles,) = kept("spargeattn", ALIKE, keys, top_p=0.7, similarity=0.49, **SIZES)
    assert tiles[-1] == [0, 2, 3]


@pytest.mark.parametrize(("top_k", "blocks"), [(1, [1, 3]), (2, [1, 2, 3])])
def test_with_a_budget_unlike_blocks_come_first(
    top_k: int, blocks: list[int], kept: Callable[..., list[list[list[int]]]]
) -> None:
    (tiles,) = kept("spargeattn:top_k", ALIKE, KEYS, top_k=top_k, **SIZES)
    assert tiles[-1] == blocks
