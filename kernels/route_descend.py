"""The walk through scores that `kernels.route_scores` left for a window of tiles, and the one pass of flat selection.

`_descend` is the walk of `kernels.route_walk` (the same candidates, the same order), reading each candidate's score.
`_scan` is its one-level case for any number of blocks, a streaming Top-K: blocks that pass the lowest of the best K so
far join a list, which is thinned to its best K when it is full and at the end.
A level's candidates are the children of the nodes that were kept and of the two open ones at the ends. Of the latter's one
each may be ranked: EDGED holds these two apart, so that βK = 128 nodes have 256 children and not 260, which would take 512
places (H200, 256k keys, K 64: 0.65 ms with β 2 where β 1, with 256 places, took 0.30).
Tiling: one program = one tile; its candidates fit into registers, its list into a slice of scratch. Cost: 4 bytes per
candidate, and about twenty comparisons of each to find the threshold. Bound by latency and by these comparisons.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pyramidbench.kernels.route_call import Call, slots
from pyramidbench.kernels.route_candidates import candidates
from pyramidbench.kernels.route_tile import rankable_blocks, write_choice
from pyramidbench.kernels.route_window import Levels, Window, room, visible
from pyramidbench.kernels.top_k import LOWEST, best, best_with_edges

FEWEST_PLACES = 256
PLACES_PER_WARP = 1024


@triton.jit
def _edges(lo, hi, lo_above, hi_above):
    """1 where the open node before the list above has a child that may be ranked (`lo`), and the one behind (`hi - 1`)."""
    first = tl.where((lo < hi) & (lo == 2 * lo_above - 1), 1, 0)
    last = tl.where((lo < hi) & (hi_above >= lo_above) & (hi == 2 * hi_above + 1), 1, 0)
    return first, last


@triton.jit
def _descend(
    score_ptr, list_ptr, out_ptr, count_ptr, first_tile, window_tiles, limit, columns, tiles, seq_len_q, seq_len_kv, levels,
    root_span, inner_width, list_width, last_width, sink_blocks, local_blocks, out_width,
    QUERY_TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BRANCHING: tl.constexpr, SLOTS: tl.constexpr,
    IS_CAUSAL: tl.constexpr, WITH_FORCED: tl.constexpr, FORCED_IN_BUDGET: tl.constexpr, EDGED: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    tile = first_tile + (program % window_tiles).to(tl.int32)
    item = program // window_tiles * tiles + tile
    score_ptr += program * columns
    list_ptr += program * list_width
    slot = tl.arange(0, SLOTS)
    blocks = tl.cdiv(seq_len_kv, BLOCK_SIZE)
    complete, sink_end, local_start, forced = rankable_blocks(
        tile, QUERY_TILE, seq_len_q, seq_len_kv, BLOCK_SIZE, sink_blocks, local_blocks, IS_CAUSAL
    )
    kept = 0
    span = root_span
    offset = columns
    # Above the start nothing is open: these make no edge.
    lo_above = -1
    hi_above = -2
    for step in range(levels):
        # The level's scores start at `offset` of the row; [lo, hi) of its nodes may be ranked.
        size = tl.cdiv(blocks, span)
        offset -= room(visible(limit, span, IS_CAUSAL))
        lo = tl.cdiv(sink_end, span)
        hi = complete // span if IS_CAUSAL else size
        keep = inner_width
        if step == levels - 1:
            keep = last_width
            if FORCED_IN_BUDGET:
                keep = tl.maximum(last_width - forced, 0)
        # At the start there is no list yet: all that may be ranked is a candidate.
        opened = kept if EDGED else kept + 2
        listed = tl.where(step == 0, 0, BRANCHING * opened)
        parents_ptr = list_ptr + 1 if EDGED else list_ptr
        node, allowed = candidates(parents_ptr, slot, tl.where(step == 0, hi - lo, listed), listed, lo, hi, BRANCHING)
        has_first, has_last = 0, 0
        if EDGED:
            has_first, has_last = _edges(lo, hi, lo_above, hi_above)
        chosen, with_first, with_last = allowed, has_first, has_last
        if tl.sum(allowed.to(tl.int32)) + has_first + has_last > keep:
            scores = tl.load(score_ptr + offset + node, mask=allowed, other=0.0)
            if EDGED:
                first = tl.load(score_ptr + offset + lo, mask=has_first > 0, other=0.0)
                last = tl.load(score_ptr + offset + hi - 1, mask=has_last > 0, other=0.0)
                chosen, with_first, with_last = best_with_edges(scores, allowed, first, has_first, last, has_last, keep)
            else:
                chosen = best(scores, allowed, keep)
        order = tl.cumsum(chosen.to(tl.int32)) + with_first
        kept = tl.sum(chosen.to(tl.int32)) + with_first
        tl.debug_barrier()
        # The list: the open node before all that may be ranked, the nodes that are kept, the open node behind.
        tl.store(list_ptr, lo - 1)
        tl.store(list_ptr + order, node, mask=chosen)
        if EDGED:
            tl.store(list_ptr + 1, lo, mask=with_first > 0)
            tl.store(list_ptr + kept + 1, hi - 1, mask=with_last > 0)
            kept += with_last
        tl.store(list_ptr + kept + 1, tl.where(hi >= lo, hi, -1))
        tl.debug_barrier()
        lo_above, hi_above = lo, hi
        span = span // BRANCHING
    node = tl.load(list_ptr + 1 + slot, mask=slot < kept, other=0)
    write_choice(
        out_ptr + item * out_width, count_ptr + item, node, slot < kept, slot + 1, kept, sink_end, local_start, forced,
        out_width, WITH_FORCED,
    )  # fmt: skip


@triton.jit
def _thin(score_ptr, list_ptr, slot, kept, keep):
    """Leave the best `keep` of a list's `kept` blocks, ascending; returns how many are left and the lowest score of them."""
    node = tl.load(list_ptr + slot, mask=slot < kept, other=0)
    score = tl.load(score_ptr + node, mask=slot < kept, other=0.0)
    chosen = best(score, slot < kept, keep)
    tl.debug_barrier()
    tl.store(list_ptr + tl.cumsum(chosen.to(tl.int32)) - 1, node, mask=chosen)
    tl.debug_barrier()
    score = tl.where(score > LOWEST, score, LOWEST)
    return keep, tl.min(tl.where(chosen, score, float("inf")))


@triton.jit
def _scan(
    score_ptr, list_ptr, out_ptr, count_ptr, first_tile, window_tiles, columns, tiles, seq_len_q, seq_len_kv, width,
    sink_blocks, local_blocks, out_width,
    QUERY_TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, SLOTS: tl.constexpr, IS_CAUSAL: tl.constexpr,
    WITH_FORCED: tl.constexpr, FORCED_IN_BUDGET: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    tile = first_tile + (program % window_tiles).to(tl.int32)
    item = program // window_tiles * tiles + tile
    score_ptr += program * columns
    list_ptr += program * SLOTS
    row_ptr = out_ptr + item * out_width
    slot = tl.arange(0, SLOTS)
    SEGMENT: tl.constexpr = SLOTS // 2
    hi, sink_end, local_start, forced = rankable_blocks(
        tile, QUERY_TILE, seq_len_q, seq_len_kv, BLOCK_SIZE, sink_blocks, local_blocks, IS_CAUSAL
    )
    keep = width
    if FORCED_IN_BUDGET:
        keep = tl.maximum(width - forced, 0)
    kept = 0
    floor = float("-inf")
    for start in range(sink_end, hi, SEGMENT):
        # What does not pass the lowest of the best so far needs no place.
        node = start + tl.arange(0, SEGMENT)
        score = tl.load(score_ptr + node, mask=node < hi, other=0.0)
        passed = (node < hi) & (tl.where(score > LOWEST, score, LOWEST) > floor)
        order = tl.cumsum(passed.to(tl.int32))
        tl.store(list_ptr + kept + order - 1, node, mask=passed)
        kept += tl.sum(passed.to(tl.int32))
        tl.debug_barrier()
        if kept > SEGMENT:
            kept, floor = _thin(score_ptr, list_ptr, slot, kept, keep)
    if kept > keep:
        kept, floor = _thin(score_ptr, list_ptr, slot, kept, keep)
    node = tl.load(list_ptr + slot, mask=slot < kept, other=0)
    write_choice(
        row_ptr,
        count_ptr + item,
        node,
        slot < kept,
        slot + 1,
        kept,
        sink_end,
        local_start,
        forced,
        out_width,
        WITH_FORCED,
    )


def scan_places(width: int) -> int:
    """Places of the list that holds the best `width` blocks so far and those that wait to be compared with them."""
    return max(FEWEST_PLACES, 2 * triton.next_power_of_2(max(1, width)))


class Descent:
    """Chooses the nodes of windows of tiles from their scores on some levels.

    out [.., width] and counts take each tile's best `width` nodes of the lowest level, forced blocks among them where
    these are the final lists (`is_last`).
    """

    def __init__(self, call: Call, levels: Levels, out: Tensor, counts: Tensor, width: int, *, is_last: bool) -> None:
        self.call, self.levels = call, levels
        self.out, self.counts, self.width = out, counts, width
        self.is_scan = levels.top == 1
        self.places = scan_places(width) if self.is_scan else slots(call.rules, call.tiling)
        apart = slots(call.rules, call.tiling, opened=0)
        self.is_edged = call.rules.branching == 2 and not self.is_scan and width <= apart < self.places
        if self.is_edged:
            self.places = apart
        names = ("QUERY_TILE", "BLOCK_SIZE", "IS_CAUSAL")
        self.shape = {name: call.shape[name] for name in names} | {"SLOTS": self.places, "WITH_FORCED": is_last}
        self.shape |= {"FORCED_IN_BUDGET": call.rules.forced_in_budget and is_last}
        self.shape |= {"num_warps": max(1, self.places // PLACES_PER_WARP)}

    @property
    def list_width(self) -> int:
        """Places of scratch that each tile of a window needs."""
        return self.places if self.is_scan else max(self.call.rules.inner_width(), self.width) + 2

    def choose(self, window: Window, scores: Tensor, lists: Tensor) -> None:
        """The nodes of a window's tiles; lists: int32 scratch of list_width a tile."""
        call, rules = self.call, self.call.rules
        grid = (call.items // call.tiling.tiles * window.tiles,)
        where = (window.first_tile, window.tiles)
        sizes = (window.columns, *call.sizes[3:])
        edge = (self.width, rules.sink_blocks, rules.local_blocks, self.out.shape[-1])
        if self.is_scan:
            _scan[grid](scores, lists, self.out, self.counts, *where, *sizes, *edge, **self.shape)
            return
        depth = (len(self.levels.spans), self.levels.spans[-1], rules.inner_width(), self.list_width)
        _descend[grid](
            scores,
            lists,
            self.out,
            self.counts,
            *where,
            window.limit,
            *sizes,
            *depth,
            *edge,
            BRANCHING=rules.branching,
            EDGED=self.is_edged,
            **self.shape,
        )
