"""The walk of one decoding step on the GPU, coarse to fine, for every new query; `kernels.decode` is the torch twin.

It is the walk of `kernels.route_walk` for few queries and lengths that are read from the device: every grid and every loop's
bound follow from the cache's capacity, and what a sequence lacks is masked. `kernels.decode_scores` scores nodes.
`_scan`: one program = SCAN_CHUNK nodes of the upper levels of one query and set. It scores these levels whole, so that all
multiprocessors read them together and at once; which levels, `kernels.decode_call` says.
`_walk`: one program = one query of one set; it ranks level by level, its list and scores in a slice of scratch, and reads the
nodes of the lower levels that its list leads to.
Cost: 4·D operations and 2·D elements a scored node, `branching` times as much by children. Bound by latency: each ranked level
is a dependent round of list, nodes, scores and threshold, and one multiprocessor reads a level's g·β·K nodes (128 KB at D 128,
K 32, β 4) by itself.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pyramidbench.kernels.decode_call import DecodeCall
from pyramidbench.kernels.decode_place import new_query
from pyramidbench.kernels.decode_scores import node_scores, nodes_at_once, scoring_query
from pyramidbench.kernels.route_candidates import candidates
from pyramidbench.kernels.top_k import best

SCAN_CHUNK = 32
WALK_CHUNK = 64
ONE_WARP_SLOTS = 1024


@triton.jit
def _start(length, blocks, levels, start_width, BLOCK_SIZE: tl.constexpr, BRANCHING: tl.constexpr):
    """(number, place in the buffer, span) of the level at which a walk starts: the finest with up to `start_width` nodes."""
    zero = tl.full([], 0, tl.int32)
    nodes, size = tl.cdiv(zero + length, BLOCK_SIZE), zero + blocks
    top, offset, span = zero, zero, zero + 1
    for _ in range(levels - 1):
        is_above = nodes > start_width
        top = tl.where(is_above, top + 1, top)
        offset = tl.where(is_above, offset + size, offset)
        span = tl.where(is_above, span * BRANCHING, span)
        nodes = tl.where(is_above, tl.cdiv(nodes, BRANCHING), nodes)
        size = tl.cdiv(size, BRANCHING)
    return top, offset, span


@triton.jit
def _places(place, blocks, levels, BRANCHING: tl.constexpr):
    """Of places of the node buffer: (level, node of that level, span)."""
    zero = place * 0
    level, first, span = zero, zero, zero + 1
    offset, size, blocks_under = (
        tl.full([], 0, tl.int32) + blocks,
        tl.cdiv(blocks, BRANCHING),
        tl.full([], BRANCHING, tl.int32),
    )
    for above in range(1, levels):
        is_above = place >= offset
        level = tl.where(is_above, above, level)
        first = tl.where(is_above, offset, first)
        span = tl.where(is_above, blocks_under, span)
        offset += size
        size = tl.cdiv(size, BRANCHING)
        blocks_under *= BRANCHING
    return level, place - first, span


@triton.jit
def _scan(
    q_ptr, nodes_ptr, lengths_ptr, scan_ptr, q_strides, scale, sets, kv_heads, queries, blocks, levels, node_count, start_width,
    sink_blocks, local_blocks, scan_base, scan_width,
    GROUP: tl.constexpr, HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BRANCHING: tl.constexpr, HAS_BOUNDS: tl.constexpr, CHILDREN: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    parts = tl.cdiv(scan_width, CHUNK)
    item, part = program // parts, (program % parts).to(tl.int32)
    index, which, batch = (item % queries).to(tl.int32), item // queries % sets, item // queries // sets
    kv_head = batch * kv_heads + which * kv_heads // sets
    length = tl.load(lengths_ptr + kv_head)
    _, end, sink_end, _, _ = new_query(length, index, queries, BLOCK_SIZE, sink_blocks, local_blocks)
    top, _, _ = _start(length, blocks, levels, start_width, BLOCK_SIZE, BRANCHING)
    scanned = part * CHUNK + tl.arange(0, CHUNK)
    level, node, span = _places(scan_base + scanned, blocks, levels, BRANCHING)
    real = (scanned < scan_width) & (level <= top) & (node >= tl.cdiv(sink_end, span)) & (node < end // span)
    if tl.max(real.to(tl.int32), 0) > 0:
        offs_d = tl.arange(0, BLOCK_D)
        q_base = q_ptr + batch * q_strides[0] + which * GROUP * q_strides[1] + index.to(tl.int64) * q_strides[2]
        high, low = scoring_query(q_base, q_strides, scale, offs_d, HEAD_DIM, GROUP, HEADS, HAS_BOUNDS, CHILDREN)
        head_ptr = nodes_ptr + kv_head * node_count * (2 * HEAD_DIM if HAS_BOUNDS else HEAD_DIM)
        score = node_scores(
            head_ptr, scan_base + scanned - node, node, span, real, blocks, length, high, low, scale, offs_d, GROUP,
            BLOCK_SIZE, HEAD_DIM, BRANCHING, HAS_BOUNDS, CHILDREN,
        )  # fmt: skip
        tl.store(scan_ptr + item * scan_width + scanned, score, mask=real)


@triton.jit
def _score_here(
    head_ptr, list_ptr, score_ptr, places, listed, lo, hi, offset, span, blocks, length, high, low, scale, offs_d,
    GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BRANCHING: tl.constexpr, HAS_BOUNDS: tl.constexpr,
    CHILDREN: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Scores of a level's candidates, from their nodes, into score_ptr [places]."""
    for start in range(0, places, CHUNK):
        place = start + tl.arange(0, CHUNK)
        some, real = candidates(list_ptr, place, places, listed, lo, hi, BRANCHING)
        score = node_scores(
            head_ptr, offset, some, span, real, blocks, length, high, low, scale, offs_d, GROUP, BLOCK_SIZE, HEAD_DIM,
            BRANCHING, HAS_BOUNDS, CHILDREN,
        )  # fmt: skip
        tl.store(score_ptr + place, score, mask=place < places)


@triton.jit
def _walk(
    q_ptr, nodes_ptr, lengths_ptr, scan_ptr, list_ptr, score_ptr, out_ptr, count_ptr, q_strides, scale, sets, kv_heads, queries,
    blocks, levels, node_count, start_width, inner_width, leaf_width, sink_blocks, local_blocks, scan_level, scan_base,
    scan_width, out_width,
    GROUP: tl.constexpr, HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BRANCHING: tl.constexpr, HAS_BOUNDS: tl.constexpr, CHILDREN: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr,
    HAS_SCAN: tl.constexpr, GATHERS: tl.constexpr, BUDGETED: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0).to(tl.int64)
    index, which, batch = (item % queries).to(tl.int32), item // queries % sets, item // queries // sets
    kv_head = batch * kv_heads + which * kv_heads // sets
    length = tl.load(lengths_ptr + kv_head)
    offs_d, slot = tl.arange(0, BLOCK_D), tl.arange(0, SLOTS)
    q_base = q_ptr + batch * q_strides[0] + which * GROUP * q_strides[1] + index.to(tl.int64) * q_strides[2]
    if GATHERS:
        high, low = scoring_query(q_base, q_strides, scale, offs_d, HEAD_DIM, GROUP, HEADS, HAS_BOUNDS, CHILDREN)
    _, end, sink_end, _, forced = new_query(length, index, queries, BLOCK_SIZE, sink_blocks, local_blocks)
    top, offset, span = _start(length, blocks, levels, start_width, BLOCK_SIZE, BRANCHING)
    list_ptr += item * (inner_width + 2)
    score_ptr += item * SLOTS
    kept = 0
    for step in range(top + 1):
        # [lo, hi) of the level's nodes may be ranked; at the start, which has no list yet, all of them are candidates.
        lo, hi = tl.cdiv(sink_end, span), end // span
        listed = tl.where(step == 0, 0, BRANCHING * (kept + 2))
        places = tl.where(step == 0, tl.maximum(hi - lo, 0), listed)
        node, allowed = candidates(list_ptr, slot, places, listed, lo, hi, BRANCHING)
        keep = inner_width
        if step == top:
            keep = leaf_width
            if BUDGETED:
                keep = tl.maximum(leaf_width - forced, 0)
        chosen = allowed
        if tl.sum(allowed.to(tl.int32)) > keep:
            # Scores of the upper levels are there where `_scan` ran; the others are made here.
            here = 0
            score = tl.zeros([SLOTS], tl.float32)
            if GATHERS:
                here = tl.where(top - step >= scan_level, 0, places)
                head_ptr = nodes_ptr + kv_head * node_count * (2 * HEAD_DIM if HAS_BOUNDS else HEAD_DIM)
                _score_here(
                    head_ptr, list_ptr, score_ptr, here, listed, lo, hi, offset, span, blocks, length, high, low, scale,
                    offs_d, GROUP, BLOCK_SIZE, HEAD_DIM, BRANCHING, HAS_BOUNDS, CHILDREN, CHUNK,
                )  # fmt: skip
                tl.debug_barrier()
                score = tl.load(score_ptr + slot, mask=slot < here, other=0.0)
            if HAS_SCAN:
                scanned_at = scan_ptr + item * scan_width + offset - scan_base
                scanned = tl.load(scanned_at + node, mask=allowed & (slot >= here), other=0.0)
                score = tl.where(slot < here, score, scanned)
            chosen = best(score, allowed, keep)
        kept = tl.sum(chosen.to(tl.int32))
        order = tl.cumsum(chosen.to(tl.int32))
        tl.debug_barrier()
        if step < top:
            tl.store(list_ptr, lo - 1)
            tl.store(list_ptr + order, node, mask=chosen)
            tl.store(list_ptr + kept + 1, tl.where(hi >= lo, hi, -1))
            tl.debug_barrier()
        else:
            tl.store(out_ptr + item * out_width + order - 1, node, mask=chosen)
            tl.store(count_ptr + item, kept)
        span = tl.maximum(span // BRANCHING, 1)
        offset -= _nodes_below(blocks, top - step, BRANCHING)


@triton.jit
def _nodes_below(blocks, level, BRANCHING: tl.constexpr):
    """Nodes that the buffer holds for the level under `level`."""
    nodes = tl.full([], 0, tl.int32) + blocks
    for _ in range(level - 1):
        nodes = tl.cdiv(nodes, BRANCHING)
    return nodes


def walk_warps(slots: int, *, gathers: bool) -> int:
    """Warps of a walk whose levels have so many candidates.

    One where `_scan` left all scores and they fit one warp's registers: a threshold is then found without a barrier, of which
    each takes part of a microsecond, twenty a level. Where nodes are gathered 8, which keep 32 KB of them in flight, a quarter
    of a level's of 256; 16 where the candidates would not fit their registers. Predicted, not measured.
    """
    if not gathers and slots <= ONE_WARP_SLOTS:
        return 1
    return 8 if slots <= 4096 else 16


def run_walk(call: DecodeCall, candidates: Tensor, counts: Tensor) -> None:
    """The leaf candidates of every query (the K best leaves where no exact score follows): [items, width] and their counts."""
    rules, sizes, store = call.rules, call.store.sizes, call.store
    edge = (sizes.blocks, sizes.levels, sizes.offsets[-1], call.start_width)
    forced = (rules.sink_blocks, rules.local_blocks)
    shape = {name: call.shape[name] for name in ("GROUP", "BLOCK_SIZE", "HEAD_DIM", "BLOCK_D", "HAS_BOUNDS")}
    # By children a head is a row of a matrix product, which has 16 rows or more.
    heads = call.shape["ROWS"] if call.by_children else triton.next_power_of_2(call.group)
    shape |= {"HEADS": heads, "BRANCHING": sizes.branching, "CHILDREN": call.by_children}
    tensors = (call.q, store.nodes, store.lengths)
    scanned = None
    scan = (call.scan_level, sizes.offsets[call.scan_level], sizes.offsets[-1] - sizes.offsets[call.scan_level])
    if call.scan_level < sizes.levels:
        scanned = call.scratch(scan[2])
        chunk = nodes_at_once(SCAN_CHUNK, call.node_bytes, children=call.by_children)
        _scan[(call.items * triton.cdiv(scan[2], chunk),)](
            *tensors, scanned, call.q.stride()[:3], call.scale, *call.counts, *edge, *forced, *scan[1:],
            CHUNK=chunk, num_warps=4, **shape,
        )  # fmt: skip
    is_last, gathers = rules.leaf_score == "summary", call.scan_level > 0
    chunk = nodes_at_once(WALK_CHUNK, call.node_bytes, children=call.by_children)
    _walk[(call.items,)](
        *tensors, scanned, call.lists(rules.inner_width() + 2), call.scratch(call.slots), candidates, counts,
        call.q.stride()[:3], call.scale, *call.counts, *edge, rules.inner_width(), call.passed, *forced, *scan,
        candidates.shape[1], SLOTS=call.slots, CHUNK=chunk, HAS_SCAN=scanned is not None, GATHERS=gathers,
        BUDGETED=rules.forced_in_budget and is_last, num_warps=walk_warps(call.slots, gathers=gathers), **shape,
    )  # fmt: skip
