"""NSA's selection by hand: blocks of 4 keys, pools of 2 keys one apart; the last of 12 queries asks 1 and keeps K = 1."""

from __future__ import annotations

import math
from collections.abc import Callable

# Weights e^logit of the pools before any normalising, by their keys: (0, 1): 3.5, (1, 2): 3.5, (2, 3): 1, (3, 4): √3, then
# three times 3, and next to nothing from key 7 on.
SPIKE, PLATEAU = 2 * math.log(3.5), math.log(3)
KEYS = [[[x] for x in (0.0, SPIKE, 0.0, 0.0, PLATEAU, PLATEAU, PLATEAU, PLATEAU, -90.0, -90.0, -90.0, -90.0)]]


def test_a_block_adds_up_the_pools_of_its_strides(kept: Callable[..., list[list[list[int]]]]) -> None:
    # Block 0: 3.5 + (3.5 + 3.5) + (3.5 + 1) + (1 + √3) = 17.7.  Block 1: (√3 + 3) + (3 + 3) + (3 + 3) + (3 + 0) = 19.7.
    (rows,) = kept("nsa", [[[1.0]] * 12], KEYS, block_size=4, query_tile=1, top_k=1)
    assert rows[-1] == [1, 2]


def test_a_group_adds_probabilities_and_not_logits(kept: Callable[..., list[list[list[int]]]]) -> None:
    # Pools that are blocks: head 0 gives blocks 0, 1, 2 the shares .8, .19, .01 and head 1 gives them .01, .29, .7. Added:
    # .81, .48, .71; added as logarithms, block 1 would win.
    shares = ((0.8, 0.01), (0.19, 0.29), (0.01, 0.7), (1e-9, 1e-9))
    keys = [[[math.log(one), math.log(other)] for one, other in shares for _ in range(2)]]
    heads = [[[1.0, 0.0]] * 8, [[0.0, 1.0]] * 8]
    (rows,) = kept("nsa", heads, keys, block_size=2, query_tile=1, top_k=1, strides=1, span=1)
    assert rows[-1] == [0, 3]
    (rows,) = kept("nsa", heads, keys, block_size=2, query_tile=1, top_k=2, strides=1, span=1)
    assert rows[-1] == [0, 2, 3]
