"""Ranking a level's candidates in one program of a decoding step, and handing the best on: to a list, or as the leaves.

A list is one row of `width` nodes: node lo - 1, the kept ones in ascending order, node hi, and -1 behind them, which opens
nothing (`kernels.route_candidates` says why these two are opened). So whoever reads it needs no count of it.
Cost: one read of a score for each candidate, a threshold by bisection, a running count. Bound by the instructions of one warp,
which wait for each other: 66 in each of about ten rounds, which need no barrier, and a thousand around them (512 places).
"""

from __future__ import annotations

import triton
import triton.language as tl

from pyramidbench.kernels.top_k import threshold


@triton.jit
def opened(list_ptr, slot, width, starts, lo, hi, BRANCHING: tl.constexpr):
    """Nodes at places of a level's candidates, and whether they may be ranked: the list's children; all where a walk starts.

    The list is read in any case, so that this waits for nothing.
    """
    parent = tl.load(list_ptr + slot // BRANCHING, mask=slot < BRANCHING * width, other=-1)
    node = tl.where(starts, lo + slot, parent * BRANCHING + slot % BRANCHING)
    return node, (node >= lo) & (node < hi)


@triton.jit
def _best(score, allowed, keep):
    """Which of the places are the best `keep`, ties to the lower one; more must be allowed."""
    order, low, above = threshold(score, allowed, keep)
    chosen = order > low
    if above > keep:
        tied = order == low + 1
        sure = order > low + 1
        chosen = sure | (tied & (tl.cumsum(tied.to(tl.int32)) <= keep - tl.sum(sure.to(tl.int32))))
    return chosen


@triton.jit
def _rank(
    score_ptr, list_ptr, out_ptr, count_ptr, starts, lo, hi, keep, width, is_leaf,
    SLOTS: tl.constexpr, BRANCHING: tl.constexpr, BY_NODE: tl.constexpr,
):  # fmt: skip
    slot = tl.arange(0, SLOTS)
    node, allowed = opened(list_ptr, slot, width, starts, lo, hi, BRANCHING)
    at = score_ptr + node if BY_NODE else score_ptr + slot
    score = tl.load(at, mask=allowed, other=0.0, cache_modifier=".cg")
    chosen = allowed
    kept = tl.sum(allowed.to(tl.int32))
    if kept > keep:
        chosen = _best(score, allowed, keep)
        kept = keep
    place = tl.cumsum(chosen.to(tl.int32))
    if is_leaf:
        tl.store(out_ptr + place - 1, node, mask=chosen)
        tl.store(count_ptr, kept)
    else:
        # Every warp has read the list before one changes it.
        tl.debug_barrier()
        tl.store(list_ptr, lo - 1)
        tl.store(list_ptr + place, node, mask=chosen)
        behind = tl.where((slot == kept + 1) & (hi >= lo), hi, -1)
        tl.store(list_ptr + slot, behind, mask=(slot > kept) & (slot < width))
        tl.debug_barrier()


@triton.jit
def rank(
    score_ptr, list_ptr, out_ptr, count_ptr, starts, lo, hi, keep, width, is_leaf,
    SLOTS: tl.constexpr, NARROW: tl.constexpr, BRANCHING: tl.constexpr, BY_NODE: tl.constexpr,
):  # fmt: skip
    """Keep the `keep` best of a level's candidates, scored by node or by place: leaves in out_ptr, others in the list.

    Other programs may have written the scores; the list is this one's. NARROW places do below the start, SLOTS at it.
    """
    if (hi - lo <= NARROW) | (starts == 0):
        _rank(score_ptr, list_ptr, out_ptr, count_ptr, starts, lo, hi, keep, width, is_leaf, NARROW, BRANCHING, BY_NODE)
    elif SLOTS > NARROW:
        _rank(score_ptr, list_ptr, out_ptr, count_ptr, starts, lo, hi, keep, width, is_leaf, SLOTS, BRANCHING, BY_NODE)
