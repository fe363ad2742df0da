"""StreamingLLM's window by hand: six blocks of 2 keys; the sink, the own block and one before it are forced."""

from __future__ import annotations

from collections.abc import Callable


def test_the_window_ends_at_the_query_and_the_sinks_stay(kept: Callable[..., list[list[list[int]]]]) -> None:
    zeros = [[[0.0]] * 12]
    sizes = {"block_size": 2, "query_tile": 1, "sink_blocks": 1, "local_blocks": 2}
    (rows,) = kept("sliding_window", zeros, zeros, top_k=1, **sizes)
    assert rows[::2] == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 2, 3, 4], [0, 3, 4, 5]]
    (rows,) = kept("sliding_window", zeros, zeros, top_k=0, **sizes)
    assert rows[-1] == [0, 4, 5]
