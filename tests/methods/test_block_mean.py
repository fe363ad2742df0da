"""Mean query × mean key by hand: what one row alone asks for is lost in the mean."""

from __future__ import annotations

from collections.abc import Callable

KEYS = [[[9.0, 0.0], [9.0, 0.0], [0.0, 1.0], [0.0, 3.0], [0.0, -1.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]]
QUERIES = [[[0.0, 0.0]] * 6 + [[1.0, 0.0], [-1.0, 2.0]]]


def test_the_mean_query_ranks(kept: Callable[..., list[list[list[int]]]]) -> None:
    # The last tile's mean query is (0, 1); the mean keys (9, 0), (0, 2), (0, -0.5) give the logits 0, 2, -0.5.
    (tiles,) = kept("block_mean", QUERIES, KEYS, block_size=2, query_tile=2, top_k=1)
    assert tiles[-1] == [1, 3]
    # Row by row, the first query's logit with block 0 is 9, and more than anything else.
    (tiles,) = kept("flat", QUERIES, KEYS, block_size=2, query_tile=2, top_k=1)
    assert tiles[-1] == [0, 3]


def test_each_head_keeps_its_own_unless_a_group_shares(kept: Callable[..., list[list[list[int]]]]) -> None:
    # Logits of head 0: 9, 0, 0; of head 1: 0, 4, -1; added: 9, 4, -1.
    heads = [[[1.0, 0.0]] * 8, [[0.0, 2.0]] * 8]
    budget = {"block_size": 2, "query_tile": 2, "top_k": 1}
    assert [tiles[-1] for tiles in kept("block_mean", heads, KEYS, **budget)] == [[0, 3], [1, 3]]
    assert [tiles[-1] for tiles in kept("block_mean", heads, KEYS, head_reduce="sum_lse", **budget)] == [[0, 3]]
