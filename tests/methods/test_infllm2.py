"""InfLLM-V2 by hand, on the keys of the example for NSA: here the best pool decides, and so the other block wins."""

from __future__ import annotations

import math
from collections.abc import Callable

# Weights e^logit of the pools of 2 keys, one apart: (0, 1): 3.5, (1, 2): 3.5, (2, 3): 1, (3, 4): √3, then three times 3, and
# next to nothing from key 7 on.
SPIKE, PLATEAU = 2 * math.log(3.5), math.log(3)
KEYS = [[[x] for x in (0.0, SPIKE, 0.0, 0.0, PLATEAU, PLATEAU, PLATEAU, PLATEAU, -90.0, -90.0, -90.0, -90.0)]]


def test_a_block_is_as_good_as_its_best_pool(kept: Callable[..., list[list[list[int]]]]) -> None:
    # Block 0 is touched by the pools 3.5, 3.5, 1 and √3, block 1 by √3, 3, 3, 3 and one near 0.
    (rows,) = kept("infllm2", [[[1.0]] * 12], KEYS, block_size=4, query_tile=1, top_k=1)
    assert rows[-1] == [0, 2]


def test_a_pool_counts_for_both_blocks_that_it_touches(kept: Callable[..., list[list[list[int]]]]) -> None:
    # Keys 3 and 4, of blocks 0 and 1, make the one strong pool: the blocks are equal, and the lower comes first. With K = 1
    # that is block 0; block 2, with weights near 0, is left out with K = 2 as well.
    keys = [[[x] for x in (0.0, 0.0, 0.0, 5.0, 5.0, 0.0, 0.0, 0.0, -90.0, -90.0, -90.0, -90.0, 0.0, 0.0, 0.0, 0.0)]]
    (rows,) = kept("infllm2", [[[1.0]] * 16], keys, block_size=4, query_tile=1, top_k=1)
    assert rows[-1] == [0, 3]
    (rows,) = kept("infllm2", [[[1.0]] * 16], keys, block_size=4, query_tile=1, top_k=2)
    assert rows[-1] == [0, 1, 3]


def test_init_and_window_are_kept_besides(kept: Callable[..., list[list[list[int]]]]) -> None:
    (rows,) = kept("infllm2", [[[1.0]] * 12], KEYS, block_size=4, query_tile=1, top_k=0, sink_blocks=1, local_blocks=2)
    assert rows[-1] == [0, 1, 2]
