"""Ranking a level's candidates in one program of a decoding step, and handing the best on: to a list, or as the leaves.

A list is one row of `width` nodes: node lo - 1, the kept ones in ascending order, node hi, and -1 behind them, which opens
nothing (`kernels.route_candidates` says why these two are opened). So whoever reads it needs no count of it.
Cost: one read of a score for each candidate, then a threshold by bisection. Bound by latency: about ten dependent rounds, each
with a sum over the program. One warp does a round without a barrier, and up to 2 048 candidates fit its registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pyramidbench.kernels.route_candidates import candidates
from pyramidbench.kernels.top_k import best


@triton.jit
def rank_level(
    score_ptr, list_ptr, out_ptr, count_ptr, places, listed, lo, hi, keep, width, is_leaf,
    SLOTS: tl.constexpr, BRANCHING: tl.constexpr, BY_NODE: tl.constexpr,
):  # fmt: skip
    """Keep the `keep` best of a level's candidates, whose scores lie by node or by place: leaves in out_ptr, others in the list.

    Other programs may have written the scores; the list is this one's.
    """
    slot = tl.arange(0, SLOTS)
    node, allowed = candidates(list_ptr, slot, places, listed, lo, hi, BRANCHING)
    at = score_ptr + node if BY_NODE else score_ptr + slot
    score = tl.load(at, mask=allowed, other=0.0, cache_modifier=".cg")
    chosen = allowed
    if tl.sum(allowed.to(tl.int32)) > keep:
        chosen = best(score, allowed, keep)
    kept, order = tl.sum(chosen.to(tl.int32)), tl.cumsum(chosen.to(tl.int32))
    if is_leaf:
        tl.store(out_ptr + order - 1, node, mask=chosen)
        tl.store(count_ptr, kept)
    else:
        # Every warp has read the list before one changes it.
        tl.debug_barrier()
        tl.store(list_ptr, lo - 1)
        tl.store(list_ptr + order, node, mask=chosen)
        behind = tl.where((slot == kept + 1) & (hi >= lo), hi, -1)
        tl.store(list_ptr + slot, behind, mask=(slot > kept) & (slot < width))
        tl.debug_barrier()


@triton.jit
def rank(
    score_ptr, list_ptr, out_ptr, count_ptr, places, listed, lo, hi, keep, width, is_leaf,
    SLOTS: tl.constexpr, NARROW: tl.constexpr, BRANCHING: tl.constexpr, BY_NODE: tl.constexpr,
):  # fmt: skip
    """`rank_level` with NARROW places where these do, as below the start: a round then looks at fewer."""
    if places <= NARROW:
        rank_level(
            score_ptr, list_ptr, out_ptr, count_ptr, places, listed, lo, hi, keep, width, is_leaf, NARROW, BRANCHING, BY_NODE
        )
    elif SLOTS > NARROW:
        rank_level(
            score_ptr, list_ptr, out_ptr, count_ptr, places, listed, lo, hi, keep, width, is_leaf, SLOTS, BRANCHING, BY_NODE
        )
