"""Ranking a level's candidates in one program of a decoding step, and handing the best on: to a list, or as the leaves.

A list is one row of `width` nodes: the kept ones in ascending order, and -1 behind them, which opens nothing. So whoever
reads it needs no count of it. Nodes lo - 1 and hi are opened too (`kernels.route_candidates` says why). With two children each,
one of each may be ranked; these two edges follow from lo and hi and are held apart, or 128 kept nodes would need 512 places
and not 256. With more children the list holds the two open nodes at its ends.
Cost: one read of a score for each candidate, a threshold, a count. Bound by the instructions of one warp, which wait for each
other: 77 in each of about six rounds, which need no barrier, and 390 around them (256 places, sm_90, Triton 3.6).
"""

from __future__ import annotations

import triton
import triton.language as tl

from pyramidbench.kernels.top_k import EXCLUDED, chosen_before, front, ordered


@triton.jit
def opened(list_ptr, slot, width, starts, lo, hi, BRANCHING: tl.constexpr):
    """Nodes at places of a level's candidates, and whether they may be ranked: the list's children; all where a walk starts.

    The list is read in any case, so that this waits for nothing.
    """
    parent = tl.load(list_ptr + slot // BRANCHING, mask=(slot >= 0) & (slot < BRANCHING * width), other=-1)
    node = tl.where(starts, lo + slot, parent * BRANCHING + slot % BRANCHING)
    return node, (node >= lo) & (node < hi)


@triton.jit
def edges(starts, lo, hi, BRANCHING: tl.constexpr):
    """The first and the last node that may be ranked where the open nodes above hold them, -1 where not: two children each."""
    first, last = lo * 0 - 1, lo * 0 - 1
    if BRANCHING == 2:
        below = (lo < hi) & (starts == 0)
        first, last = tl.where(below & (lo % 2 == 1), lo, -1), tl.where(below & (hi % 2 == 1), hi - 1, -1)
    return first, last


@triton.jit
def _best(score, allowed, first, has_first, last, has_last, keep):
    """`top_k.best_with_edges`, with a range that shrinks to a third a round: two counts are one sum, of 16 bits each."""
    order = tl.where(allowed, ordered(score), EXCLUDED)
    first, last = tl.where(has_first > 0, ordered(first), EXCLUDED), tl.where(has_last > 0, ordered(last), EXCLUDED)
    low = tl.min(tl.where(allowed, order, 0x7FFFFFFF))
    low = tl.where(has_first > 0, tl.minimum(low, first), low)
    low = tl.where(has_last > 0, tl.minimum(low, last), low) - 1
    high = tl.maximum(tl.max(order), tl.maximum(first, last))
    above = tl.sum(allowed.to(tl.int32)) + has_first + has_last
    # Always: `above` places (at least `keep`) are above low, fewer than `keep` above high.
    while (low + 1 < high) & (above > keep):
        third = (((high - low).to(tl.uint32) + 1) // 3).to(tl.int32)
        lower, upper = low + third, high - third
        counts = tl.sum(_passed(order, lower, upper)) + _passed(first, lower, upper) + _passed(last, lower, upper)
        over_lower, over_upper = counts & 0xFFFF, (counts.to(tl.uint32) >> 16).to(tl.int32)
        high = tl.where(over_upper >= keep, high, tl.where(over_lower >= keep, upper, lower))
        low = tl.where(over_upper >= keep, upper, tl.where(over_lower >= keep, lower, low))
        above = tl.where(over_upper >= keep, over_upper, tl.where(over_lower >= keep, over_lower, above))
    chosen, with_first, with_last = order > low, (first > low).to(tl.int32), (last > low).to(tl.int32)
    if above > keep:
        chosen, with_first, with_last = front(order, first, last, low + 1, keep)
    return chosen, with_first, with_last


@triton.jit
def _passed(order, lower, upper):
    """1 where a place is above `lower`, and 65536 more where it is above `upper`."""
    return tl.where(order > lower, 1, 0) + tl.where(order > upper, 65536, 0)


@triton.jit
def _rank(
    score_ptr, list_ptr, out_ptr, count_ptr, starts, lo, hi, keep, width, is_leaf,
    SLOTS: tl.constexpr, BRANCHING: tl.constexpr, BY_NODE: tl.constexpr,
):  # fmt: skip
    slot = tl.arange(0, SLOTS)
    node, allowed = opened(list_ptr, slot, width, starts, lo, hi, BRANCHING)
    first, last = edges(starts, lo, hi, BRANCHING)
    place, first_at, last_at = slot + 1, score_ptr, score_ptr + 2 * width + 1
    if BY_NODE:
        place, first_at, last_at = node, score_ptr + first, score_ptr + last
    score = tl.load(score_ptr + place, mask=allowed, other=0.0, cache_modifier=".cg")
    first_score = tl.load(first_at, mask=first >= 0, other=0.0, cache_modifier=".cg")
    last_score = tl.load(last_at, mask=last >= 0, other=0.0, cache_modifier=".cg")
    chosen, with_first, with_last = allowed, (first >= 0).to(tl.int32), (last >= 0).to(tl.int32)
    kept = tl.sum(allowed.to(tl.int32)) + with_first + with_last
    if kept > keep:
        chosen, with_first, with_last = _best(score, allowed, first_score, with_first, last_score, with_last, keep)
        kept = keep
    place = with_first + chosen_before(chosen)
    # Lists begin with the open node before all that may be ranked where that cannot be told from lo.
    OPEN: tl.constexpr = 0 if BRANCHING == 2 else 1
    at = list_ptr + OPEN
    if is_leaf:
        at = out_ptr
    # Every warp has read the list before one changes it.
    tl.debug_barrier()
    tl.store(at + place, node, mask=chosen)
    tl.store(at, first, mask=with_first > 0)
    tl.store(at + kept - 1, last, mask=with_last > 0)
    if is_leaf:
        tl.store(count_ptr, kept)
    else:
        if OPEN:
            tl.store(list_ptr, lo - 1)
            tl.store(at + kept, tl.where(hi >= lo, hi, -1))
        # A list that is full, the usual one, has nothing behind.
        if kept + 2 * OPEN < width:
            tl.store(list_ptr + slot, -1, mask=(slot >= kept + 2 * OPEN) & (slot < width))
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
