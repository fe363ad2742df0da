"""The walk of one decoding step on the GPU, coarse to fine, for every new query; `kernels.decode` is the torch twin.

It is the walk of `kernels.route_walk` for few queries and lengths that are read from the device: every grid and every loop's
bound follow from the cache's capacity, and what a sequence lacks is masked. `kernels.decode_scores` scores nodes.
`_scan`: one program = CHUNK nodes of the upper levels of one query and set. It scores these levels whole, so that all
multiprocessors read them together and at once; which levels, `kernels.decode_call` says. The last program of a query then
ranks level by level, for which it has all scores.
`_gather`, a launch for each level below: one program = CHUNK of the candidates that the level above leads to, spread over the
multiprocessors likewise; the last program of a query ranks them.
Cost: 4·D operations and 2·D elements a scored node, `branching` times as much by children. Bound by latency: a launch waits for
the one before, reads, counts arrivals, and ranks (a lone warp's 860 instructions a level, one after the other).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pyramidbench.kernels.decode_call import DecodeCall, listed_ends
from pyramidbench.kernels.decode_launch import after_previous, ask_for, is_last
from pyramidbench.kernels.decode_place import interval, new_query
from pyramidbench.kernels.decode_rank import edges, opened, rank
from pyramidbench.kernels.decode_scores import node_scores, scoring_query

WARP_BYTES = 8192
"""Summaries that a warp has in flight: 64 registers a thread."""
WARP_SLOTS = 512
"""Candidates that a warp ranks. Warps for 128 or 64 of them made a step slower on an H200: two barriers more a round."""
PRODUCT_NODES = 16
"""Nodes whose children are scored by one product, at least."""
MOST_WARPS = 16
REGISTERS = 128
"""A thread's, so that sixteen warps share a multiprocessor while they score."""
MOST_REGISTERS = 255


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
def _nodes_below(blocks, level, BRANCHING: tl.constexpr):
    """Nodes that the buffer holds for the level under `level`."""
    nodes = tl.full([], 0, tl.int32) + blocks
    if BRANCHING == 2:
        under = tl.maximum(level - 1, 0)
        nodes = (nodes + (1 << under) - 1) >> under
    else:
        for _ in range(level - 1):
            nodes = tl.cdiv(nodes, BRANCHING)
    return nodes


@triton.jit(do_not_specialize=["scan_level"])
def _scan(
    q_ptr, nodes_ptr, lengths_ptr, arrivals_ptr, score_ptr, list_ptr, out_ptr, count_ptr, q_strides, scale, sets, kv_heads,
    queries, blocks, levels, node_count, start_width, inner_width, leaf_width, sink_blocks, local_blocks, out_width, scan_level,
    scan_base, scan_width,
    GROUP: tl.constexpr, HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BRANCHING: tl.constexpr, HAS_BOUNDS: tl.constexpr, CHILDREN: tl.constexpr, BUDGETED: tl.constexpr, CHUNK: tl.constexpr,
    SLOTS: tl.constexpr, NARROW: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    program, parts = tl.program_id(0).to(tl.int64), tl.cdiv(scan_width, CHUNK)
    item, part = program // parts, (program % parts).to(tl.int32)
    index, which, batch = (item % queries).to(tl.int32), item // queries % sets, item // queries // sets
    kv_head = batch * kv_heads + which * kv_heads // sets
    scanned = part * CHUNK + tl.arange(0, CHUNK)
    level, node, node_span = _places(scan_base + scanned, blocks, levels, BRANCHING)
    WIDTH: tl.constexpr = 2 * HEAD_DIM if HAS_BOUNDS else HEAD_DIM
    head_ptr = nodes_ptr + kv_head * node_count * WIDTH
    if OVERLAPS:
        # A length that an append is still to change: good enough to ask for nodes.
        expected = tl.load(lengths_ptr + kv_head, volatile=True)
        PER_LINE: tl.constexpr = 1024 // nodes_ptr.dtype.element_ty.primitive_bitwidth
        LINES: tl.constexpr = (2 * BLOCK_D if HAS_BOUNDS else BLOCK_D) // PER_LINE
        line = tl.arange(0, LINES if LINES > 1 else 1) * PER_LINE
        held = (scanned < scan_width) & (node * node_span * BLOCK_SIZE < expected)
        row = tl.where(held, scan_base + scanned, 0)
        ask_for(head_ptr + row[:, None] * WIDTH + tl.minimum(line, WIDTH - 1)[None, :])
    after_previous(OVERLAPS)
    length = tl.load(lengths_ptr + kv_head)
    offs_d = tl.arange(0, BLOCK_D)
    q_base = q_ptr + batch * q_strides[0] + which * GROUP * q_strides[1] + index.to(tl.int64) * q_strides[2]
    high, low = scoring_query(q_base, q_strides, scale, offs_d, HEAD_DIM, GROUP, HEADS, HAS_BOUNDS, CHILDREN)
    _, end, sink_end, _, forced = new_query(length, index, queries, BLOCK_SIZE, sink_blocks, local_blocks)
    top, offset, span = _start(length, blocks, levels, start_width, BLOCK_SIZE, BRANCHING)
    score_ptr += item * scan_width
    real = (scanned < scan_width) & (level <= top) & (node >= tl.cdiv(sink_end, node_span)) & (node < end // node_span)
    score = node_scores(
        head_ptr, scan_base + scanned - node, node, node_span, real, blocks, length, high, low, scale, offs_d, GROUP,
        BLOCK_SIZE, HEAD_DIM, BRANCHING, HAS_BOUNDS, CHILDREN,
    )  # fmt: skip
    tl.store(score_ptr + scanned, score, mask=real)
    # All programs of a query agree on `top`. Where it starts below these levels, `_gather` starts it.
    if top >= scan_level:  # noqa: SIM102 - no `and`: a program that is not asked must not count itself
        if is_last(arrivals_ptr + item, parts):
            list_width = inner_width + (0 if BRANCHING == 2 else 2)
            list_ptr += item * list_width
            for step in range(top - scan_level + 1):
                here = top - step
                lo, hi = interval(sink_end, end, here, span, BRANCHING)
                keep = tl.where(here == 0, tl.maximum(leaf_width - forced, 0) if BUDGETED else leaf_width, inner_width)
                rank(
                    score_ptr + offset - scan_base, list_ptr, out_ptr + item * out_width, count_ptr + item, here == top, lo,
                    hi, keep, list_width, here == 0, SLOTS, NARROW, BRANCHING, True,
                )  # fmt: skip
                span = tl.maximum(span // BRANCHING, 1)
                offset -= _nodes_below(blocks, here, BRANCHING)


@triton.jit(do_not_specialize=["level", "offset", "span"])
def _gather(
    q_ptr, nodes_ptr, lengths_ptr, arrivals_ptr, score_ptr, list_ptr, out_ptr, count_ptr, q_strides, scale, sets, kv_heads,
    queries, blocks, levels, node_count, start_width, inner_width, leaf_width, sink_blocks, local_blocks, out_width, level,
    offset, span, parts,
    GROUP: tl.constexpr, HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BRANCHING: tl.constexpr, HAS_BOUNDS: tl.constexpr, CHILDREN: tl.constexpr, BUDGETED: tl.constexpr, CHUNK: tl.constexpr,
    SLOTS: tl.constexpr, NARROW: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    item, part = program // parts, (program % parts).to(tl.int32)
    index, which, batch = (item % queries).to(tl.int32), item // queries % sets, item // queries // sets
    kv_head = batch * kv_heads + which * kv_heads // sets
    offs_d, slot = tl.arange(0, BLOCK_D), part * CHUNK + tl.arange(0, CHUNK)
    q_base = q_ptr + batch * q_strides[0] + which * GROUP * q_strides[1] + index.to(tl.int64) * q_strides[2]
    list_width = inner_width + (0 if BRANCHING == 2 else 2)
    list_ptr += item * list_width
    score_ptr += item * parts * CHUNK
    head_ptr = nodes_ptr + kv_head * node_count * (2 * HEAD_DIM if HAS_BOUNDS else HEAD_DIM)
    after_previous(OVERLAPS)
    length = tl.load(lengths_ptr + kv_head)
    high, low = scoring_query(q_base, q_strides, scale, offs_d, HEAD_DIM, GROUP, HEADS, HAS_BOUNDS, CHILDREN)
    _, end, sink_end, _, forced = new_query(length, index, queries, BLOCK_SIZE, sink_blocks, local_blocks)
    top, _, _ = _start(length, blocks, levels, start_width, BLOCK_SIZE, BRANCHING)
    # Above its start a walk has nothing to do, and all programs of a query know it.
    lo, hi, starts = tl.cdiv(sink_end, span), tl.where(level <= top, end // span, 0), level == top
    # Candidates as `rank` looks for them: the list's children from place 1 on, those at the edges before and behind.
    node, real = opened(list_ptr, slot - 1, list_width, starts, lo, hi, BRANCHING)
    first, last = edges(starts, lo, hi, BRANCHING)
    edge = tl.where(slot == 0, first, tl.where(slot == 2 * list_width + 1, last, -1))
    node, real = tl.where(edge >= 0, edge, node), real | (edge >= 0)
    score = node_scores(
        head_ptr, offset, node, span, real, blocks, length, high, low, scale, offs_d, GROUP, BLOCK_SIZE, HEAD_DIM, BRANCHING,
        HAS_BOUNDS, CHILDREN,
    )  # fmt: skip
    if level <= top:
        tl.store(score_ptr + slot, score, mask=real)
        if is_last(arrivals_ptr + item, parts):
            keep = tl.where(level == 0, tl.maximum(leaf_width - forced, 0) if BUDGETED else leaf_width, inner_width)
            rank(
                score_ptr, list_ptr, out_ptr + item * out_width, count_ptr + item, starts, lo, hi, keep, list_width,
                level == 0, SLOTS, NARROW, BRANCHING, False,
            )  # fmt: skip


def walk_warps(slots: int, child_bytes: int) -> int:
    """Warps of a program whose last of a query ranks so many candidates; `child_bytes` of a child's summary, 0 by summary.

    One as long as they fit its registers: a round of the threshold is then without a barrier (docs/performance.md). By
    children as many as hold a product's operands.
    """
    holding = triton.next_power_of_2(max(1, PRODUCT_NODES * child_bytes // WARP_BYTES))
    return max(holding, min(MOST_WARPS, slots // WARP_SLOTS))


def walk_registers(child_bytes: int) -> int:
    """The most registers of a thread. In fp32 at head dim 256 one warp of 128 spills 2.7 KB a thread by children, four spill
    0.6 KB, and four of 255 spill 0.1 KB: a product of fp32 holds its query's rows."""
    return REGISTERS if PRODUCT_NODES * child_bytes <= 2 * WARP_BYTES else MOST_REGISTERS


def node_chunk(node_bytes: int, warps: int, *, by_children: bool) -> int:
    """Nodes that a program scores: what its warps can have in flight; by children those of a product at least."""
    fits = 1 << (max(1, warps * WARP_BYTES // node_bytes).bit_length() - 1)
    return max(PRODUCT_NODES, fits) if by_children else fits


def run_walk(call: DecodeCall, candidates: Tensor, counts: Tensor) -> None:
    """The leaf candidates of every query (the K best leaves where no exact score follows): [items, width] and their counts."""
    rules, sizes, store = call.rules, call.store.sizes, call.store
    heads = triton.next_power_of_2(call.group)
    shape = {name: call.shape[name] for name in ("GROUP", "BLOCK_SIZE", "HEAD_DIM", "BLOCK_D", "HAS_BOUNDS")}
    shape |= {"HEADS": max(16, heads) if call.by_children else heads, "BRANCHING": sizes.branching}
    shape |= {"CHILDREN": call.by_children, "BUDGETED": rules.forced_in_budget and rules.leaf_score == "summary"}
    read = (call.q, store.nodes, store.lengths, store.arrivals(call.items))
    written = (call.lists(rules.inner_width() + listed_ends(rules)), candidates, counts)
    numbers = (
        call.q.stride()[:3], call.scale, *call.counts, sizes.blocks, sizes.levels, sizes.offsets[-1], call.start_width,
        rules.inner_width(), call.passed, rules.sink_blocks, rules.local_blocks, candidates.shape[1],
    )  # fmt: skip
    child_bytes = call.summary_bytes if call.by_children else 0
    registers = walk_registers(child_bytes)
    base, width = call.scanned
    if width > 0:
        slots = max(call.slots(level) for level in range(call.scan_level, call.highest + 1))
        warps = walk_warps(slots, child_bytes)
        chunk = node_chunk(call.node_bytes, warps, by_children=call.by_children)
        _scan[(call.items * triton.cdiv(width, chunk),)](
            *read, call.scratch(width), *written, *numbers, call.scan_level, base, width, CHUNK=chunk, SLOTS=slots,
            NARROW=min(call.narrow, slots), num_warps=warps, maxnreg=registers, **shape, **call.overlap,
        )  # fmt: skip
    for level in range(call.scan_level - 1, -1, -1):
        slots = call.slots(level)
        warps = walk_warps(slots, child_bytes)
        chunk = node_chunk(call.node_bytes, warps, by_children=call.by_children)
        # Place 0 is for the edge.
        parts, narrow = triton.cdiv(call.places(level) + 1, chunk), min(call.narrow, slots)
        _gather[(call.items * parts,)](
            *read, call.scratch(parts * chunk), *written, *numbers, level, sizes.offsets[level], sizes.branching**level, parts,
            CHUNK=chunk, SLOTS=slots, NARROW=narrow, num_warps=warps, maxnreg=registers, **shape, **call.overlap,
        )  # fmt: skip
