"""HISA by hand: eight blocks of 2 keys in four groups of 2 blocks; all queries ask 1."""

from __future__ import annotations

from collections.abc import Callable

KEYS = [[[x] for x in (0.0, 0.0, 0.0, 6.0, 2.0, 2.0, 3.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)]]
# Group means: 1.5, 2, 0; the last group holds the last query's own block 7. Blocks by LogSumExp: 0: 0.69, 1: 6.00, 2: 2.69,
# 3: 3.13, 4 to 6: 0.69.


def test_groups_by_mean_then_blocks_by_their_keys(kept: Callable[..., list[list[list[int]]]]) -> None:
    budget = {"block_size": 2, "query_tile": 1, "branching": 2}
    # K = 1 opens group 1, and the own group: of blocks 2, 3 and 6, block 3 is best. Block 1, the best of all, is never seen.
    (rows,) = kept("hisa", [[[1.0]] * 16], KEYS, top_k=1, **budget)
    assert rows[-1] == [3, 7]
    # K = 2 opens the groups 1 and 0: blocks 1 and 3.
    (rows,) = kept("hisa", [[[1.0]] * 16], KEYS, top_k=2, **budget)
    assert rows[-1] == [1, 3, 7]
    # So does a beam of 2 with K = 1, which then keeps block 1.
    (rows,) = kept("hisa", [[[1.0]] * 16], KEYS, top_k=1, beam=2, **budget)
    assert rows[-1] == [1, 7]
