"""MoBA by hand: blocks of 2 keys, means 2, 0, 0 and 2."""

from __future__ import annotations

from collections.abc import Callable

KEYS = [[[1.0], [3.0], [0.0], [0.0], [5.0], [-5.0], [2.0], [2.0]]]


def test_k_counts_the_own_block_and_each_head_goes_its_own_way(kept: Callable[..., list[list[list[int]]]]) -> None:
    # Head 0 asks 1: logits are the means 2, 0, 0. Head 1 asks -1: -2, 0, 0; of the equal blocks 1 and 2 the lower wins.
    likes, dislikes = kept("moba", [[[1.0]] * 8, [[-1.0]] * 8], KEYS, block_size=2, top_k=2)
    assert likes == [[0], [0], [0, 1], [0, 1], [0, 2], [0, 2], [0, 3], [0, 3]]
    assert dislikes == [[0], [0], [0, 1], [0, 1], [1, 2], [1, 2], [1, 3], [1, 3]]


def test_with_k_1_there_is_the_own_block_alone(kept: Callable[..., list[list[list[int]]]]) -> None:
    (rows,) = kept("moba", [[[1.0]] * 8], KEYS, block_size=2, top_k=1)
    assert rows == [[0], [0], [1], [1], [2], [2], [3], [3]]
