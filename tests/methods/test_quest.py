"""Quest by hand: pages of 2 keys, ranked by Σ_d max(q_d·min_d, q_d·max_d)."""

from __future__ import annotations

from collections.abc import Callable

KEYS = [[[4.0, 0.0], [0.0, 4.0], [3.0, 3.0], [3.0, 3.0], [0.0, -5.0], [-5.0, 0.0], [0.0, 0.0], [0.0, 0.0]]]
# Page 0 lies in [0, 4] × [0, 4], page 1 is (3, 3), page 2 lies in [-5, 0] × [-5, 0].


def test_the_bound_ranks(kept: Callable[..., list[list[list[int]]]]) -> None:
    # Row 6 asks (1, 1): bounds 4 + 4, 3 + 3, 0 + 0. No key of page 0 has more than 4, but the bound says 8.
    # Row 7 asks (1, -1): 4 + 0, 3 - 3, 0 + 5.
    queries = [[[0.0, 0.0]] * 6 + [[1.0, 1.0], [1.0, -1.0]]]
    (rows,) = kept("quest", queries, KEYS, block_size=2, query_tile=1, top_k=1)
    assert rows[6:] == [[0, 3], [2, 3]]
    (rows,) = kept("quest", queries, KEYS, block_size=2, query_tile=1, top_k=2)
    assert rows[6:] == [[0, 1, 3], [0, 2, 3]]


def test_a_single_query_decodes(kept: Callable[..., list[list[list[int]]]]) -> None:
    assert kept("quest", [[[1.0, -1.0]]], KEYS, block_size=2, query_tile=1, top_k=1) == [[[2, 3]]]
