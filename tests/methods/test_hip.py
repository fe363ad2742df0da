"""HiP by hand: eight blocks of 2 keys, each node spoken for by its middle key; the last query asks 1 and keeps K = 1."""

from __future__ import annotations

from collections.abc import Callable

# Key 3, the middle of block 1, is the best middle of any block, and no node above block 1 is spoken for by it: a single pass
# over the blocks would keep block 1, the stages never come to it.
KEYS = [[[x] for x in (9.0, 0.0, 1.0, 5.0, 0.0, 0.0, 3.0, 1.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.5, 0.0, 0.0)]]


def test_each_stage_halves_the_nodes_that_are_left(kept: Callable[..., list[list[list[int]]]]) -> None:
    # Start: two nodes of 8 keys; the second holds the own block 7 and is opened, the first is the one candidate.
    # Nodes of 4 keys: 0, 1 and 2, with the middle keys 2, 6 and 10: logits 1, 3, 2, so node 1 (keys 4 to 7) is kept.
    # Blocks 2, 3 and 6, with the middle keys 5, 7 and 13: logits 0, 1, 0.5, so block 3 is kept. Key 0 speaks for nobody.
    (rows,) = kept("hip", [[[1.0]] * 16], KEYS, block_size=2, query_tile=1, top_k=1)
    assert rows[-1] == [3, 7]


def test_a_larger_budget_starts_lower(kept: Callable[..., list[list[list[int]]]]) -> None:
    # K = 2 starts with the four nodes of 4 keys: of 0, 1, 2 (logits 1, 3, 2) it keeps 1 and 2. Their blocks 2, 3, 4, 5 and the
    # own node's 6 have the middle keys 5, 7, 9, 11, 13: logits 0, 1, 0, 0, 0.5.
    (rows,) = kept("hip", [[[1.0]] * 16], KEYS, block_size=2, query_tile=1, top_k=2)
    assert rows[-1] == [3, 6, 7]
