"""Exact Top-K by hand: one large weight against several middling ones."""

from __future__ import annotations

import math
from collections.abc import Callable


def test_the_blocks_with_the_most_mass(kept: Callable[..., list[list[list[int]]]]) -> None:
    # Weights 3, 3 | 5, 0 | 2, 2 | 1, 1 of 17: block masses 6/17, 5/17, 4/17 and, forced, 2/17.
    keys = [[[math.log(max(weight, 1e-9))] for weight in (3, 3, 5, 0, 2, 2, 1, 1)]]
    for top_k, blocks in ((1, [0, 3]), (2, [0, 1, 3]), (3, [0, 1, 2, 3])):
        (rows,) = kept("exact_topk", [[[1.0]] * 8], keys, block_size=2, query_tile=1, top_k=top_k)
        assert rows[-1] == blocks
