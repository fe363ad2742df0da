"""The walk on the GPU: blocks (or leaf candidates) of every query tile, coarse to fine, without a score matrix.

On each level, of the candidates that are complete and hold no forced block, the best β·K by summary score stay; their
children and those of the forced blocks' ancestors are the next candidates. Scores: S = Σ over the group's heads of
logsumexp over rows of s·(q⁺·u + q⁻·w), + log c (kernels.scores is the twin, kernels.walk the walk's).

What may be ranked on a level is one interval [lo, hi): after the nodes that hold a sink, before those that hold a local
block. So the opened nodes, in ascending order, are node lo - 1 (the only sink ancestor with rankable children), the kept
ones, and node hi (likewise for local blocks): one list, no merge, and a level is data (an offset and a span).
Tiling: one program = one warp = one (set, tile) at a time of a persistent grid. Its list and its scores live in a
private slice of scratch (a few KiB, which the L1 and L2 caches hold); candidates are scored in chunks.
Chunks are matrix products [rows, D] × [D, nodes] in k's dtype. With a mean query the heads' scores add up to one dot
product with [Σ q̄⁺, Σ q̄⁻]; these fp32 vectors enter as three rows that add up to them, so nothing is rounded away.
With node_score "children" an inner node's logit is the logsumexp of its children's.
Cost: 4·D operations per row and scored node (per child); bound by the node reads (2·D elements each) from L2.
Source: arXiv 2609.31093 for the walk; docs/selection.md for what differs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyramidbench.kernels.route_call import Call, head_shape, programs, score_rows, scored_levels, slots
from pyramidbench.kernels.route_tile import forced_interval, score_row, write_list
from pyramidbench.kernels.top_k import best, log_sum_exp

WALK_CHUNK = 32
WALK_PROGRAMS = 8
WALK_STAGES = 2
"""One warp a tile, 8 programs per multiprocessor, chunks of 32 nodes; at 256k keys, 16 heads, K 64, β 4, H200: 4.5 ms. With
a register cap for 12 programs 5.8, without prefetch 6.3, chunks of 16 on 12 programs 6.3, of 64 7.4, two warps 8.6."""


@triton.jit
def _mean_query(
    q_ptr,
    stride_h,
    stride_m,
    first,
    held,
    group,
    scale,
    offs_d,
    HEAD_DIM,
    CHUNK: tl.constexpr,
    HAS_BOUNDS: tl.constexpr,
):
    """Σ over heads of the positive and the negative part of the tile's mean query, times scale: two [BLOCK_D], fp32."""
    high = tl.zeros([offs_d.shape[0]], tl.float32)
    low = tl.zeros([offs_d.shape[0]], tl.float32)
    for head in range(group):
        total = tl.zeros([offs_d.shape[0]], tl.float32)
        for start in tl.range(0, held, CHUNK, num_stages=2):
            row = start + tl.arange(0, CHUNK)
            # of shape [CHUNK, BLOCK_D]
            at = q_ptr + head * stride_h + (first + row)[:, None] * stride_m + offs_d[None, :]
            q = tl.load(at, mask=(row < held)[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)
            total += tl.sum(q.to(tl.float32), 0)
        mean = total / held * scale
        if HAS_BOUNDS:
            high += tl.maximum(mean, 0.0)
            low += tl.minimum(mean, 0.0)
        else:
            high += mean
    return high, low


@triton.jit
def _split(vector, ROWS: tl.constexpr, DTYPE: tl.constexpr):
    """An fp32 vector [BLOCK_D] as rows [ROWS, BLOCK_D] of DTYPE that add up to it: three terms keep 24 bits of bf16."""
    row = tl.arange(0, ROWS)[:, None]
    first = vector.to(DTYPE)
    rest = vector - first.to(tl.float32)
    second = rest.to(DTYPE)
    third = (rest - second.to(tl.float32)).to(DTYPE)
    zero = tl.zeros_like(first)[None, :]
    return tl.where(
        row == 0, first[None, :], tl.where(row == 1, second[None, :], tl.where(row == 2, third[None, :], zero))
    )


@triton.jit
def summary_logits(high, low, u, w, HAS_BOUNDS: tl.constexpr):
    """q⁺·u + q⁻·w of rows [rows, BLOCK_D] and nodes [n, BLOCK_D]: fp32 [rows, n]. Without bounds q·u."""
    logits = tl.dot(high, tl.trans(u), input_precision="ieee")
    if HAS_BOUNDS:
        logits = tl.dot(low, tl.trans(w), logits, input_precision="ieee")
    return logits


@triton.jit
def _join_rows(logits, row_mask, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """Σ over heads of logsumexp over rows: [n] from logits [HEADS·ROWS, n]; rows outside the mask do not count."""
    logits = tl.where(row_mask[:, None], logits, float("-inf"))
    if HEADS == 1:
        return log_sum_exp(logits, 0)
    joined = log_sum_exp(tl.reshape(logits, [HEADS, ROWS, logits.shape[1]]), 1)
    # A head that only pads adds nothing.
    real = tl.max(tl.reshape(row_mask.to(tl.int32), [HEADS, ROWS]), 1) > 0
    return tl.sum(tl.where(real[:, None], joined, 0.0), 0)


@triton.jit
def _load_rows(
    q_base,
    head,
    tile,
    q_strides,
    seq_len_q,
    QUERY_TILE,
    offs_d,
    HEAD_DIM,
    GROUP,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    SCORE_ROWS: tl.constexpr,
):
    """The scoring rows of HEADS heads from `head` on: q⁺ and q⁻ [HEADS·ROWS, BLOCK_D], q itself, and their mask."""
    index = tl.arange(0, HEADS * ROWS)
    query, row_mask = score_row(index % ROWS, tile, QUERY_TILE, seq_len_q, SCORE_ROWS)
    row_mask = row_mask & (head + index // ROWS < GROUP)
    at = q_base + (head + index // ROWS) * q_strides[1] + query.to(tl.int64) * q_strides[2]
    q = tl.load(at[:, None] + offs_d[None, :], mask=row_mask[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)
    return q, tl.where(q > 0, q, 0.0).to(q.dtype), tl.where(q < 0, q, 0.0).to(q.dtype), row_mask


@triton.jit
def _candidates(list_ptr, slot, slots, listed, lo, hi, BRANCHING: tl.constexpr):
    """Nodes at places `slot` of a level's candidates, and whether they may be ranked; without a list, lo + slot."""
    parent = tl.load(list_ptr + slot // BRANCHING, mask=slot < listed, other=-1)
    node = tl.where(listed == 0, lo + slot, parent * BRANCHING + slot % BRANCHING)
    return node, (slot < slots) & (node >= lo) & (node < hi)


@triton.jit
def _load_nodes(at, mask, HEAD_DIM, HAS_BOUNDS: tl.constexpr):
    """u and w of nodes, [n, BLOCK_D] each; the mean twice without bounds."""
    u = tl.load(at, mask=mask, other=0.0)
    if HAS_BOUNDS:
        return u, tl.load(at + HEAD_DIM, mask=mask, other=0.0)
    return u, u


@triton.jit
def _log_keys(node, span, seq_len_kv, BLOCK_SIZE: tl.constexpr):
    """Logarithm of the keys under each node of a level whose nodes hold `span` blocks; the last one is clipped."""
    keys = tl.minimum(seq_len_kv - node.to(tl.int64) * span * BLOCK_SIZE, span.to(tl.int64) * BLOCK_SIZE)
    return tl.log(tl.maximum(keys, 1).to(tl.float32))


@triton.jit
def _children_logits(
    high, low, scale, level_ptr, offset, node, real, span, blocks, seq_len_kv, offs_d,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BRANCHING: tl.constexpr, HAS_BOUNDS: tl.constexpr,
):  # fmt: skip
    """logsumexp over each node's children of their scaled logits + log c: [rows, n]; `offset`: that of the nodes' level."""
    span = span // BRANCHING
    size = tl.cdiv(blocks, span)
    total = tl.full([high.shape[0], node.shape[0]], float("-inf"), tl.float32)
    for index in range(BRANCHING):
        child = node * BRANCHING + index
        held = real & (child < size)
        at = level_ptr + (offset - size + child).to(tl.int64)[:, None] * (HEAD_DIM * (1 + HAS_BOUNDS)) + offs_d[None, :]
        u, w = _load_nodes(at, held[:, None] & (offs_d < HEAD_DIM)[None, :], HEAD_DIM, HAS_BOUNDS)
        logits = summary_logits(high, low, u, w, HAS_BOUNDS) * scale
        logits += _log_keys(child, span, seq_len_kv, BLOCK_SIZE)[None, :]
        logits = tl.where(held[None, :], logits, float("-inf"))
        top = tl.maximum(total, logits)
        top = tl.where(top == float("-inf"), 0.0, top)
        mass = tl.exp(total - top) + tl.exp(logits - top)
        total = tl.where(mass > 0, top + tl.log(tl.where(mass > 0, mass, 1.0)), float("-inf"))
    return total


@triton.jit
def _walk(
    q_ptr,
    nodes_ptr,
    list_ptr,
    score_ptr,
    out_ptr,
    count_ptr,
    q_strides,
    scale,
    items,
    sets,
    kv_heads,
    tiles,
    seq_len_q,
    seq_len_kv,
    node_count,
    level_end,
    levels,
    root_span,
    inner_width,
    leaf_width,
    sink_blocks,
    local_blocks,
    list_width,
    out_width,
    GROUP: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BRANCHING: tl.constexpr,
    SLOTS: tl.constexpr,
    CHUNK: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    SCORE_ROWS: tl.constexpr,
    HAS_BOUNDS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    IS_MEAN: tl.constexpr,
    CHILDREN: tl.constexpr,
    WITH_FORCED: tl.constexpr,
    FORCED_IN_BUDGET: tl.constexpr,
):
    program = tl.program_id(0)
    list_ptr += program.to(tl.int64) * list_width
    score_ptr += program.to(tl.int64) * SLOTS
    offs_d = tl.arange(0, BLOCK_D)
    slot = tl.arange(0, SLOTS)
    blocks = tl.cdiv(seq_len_kv, BLOCK_SIZE)
    WIDTH: tl.constexpr = 2 * HEAD_DIM if HAS_BOUNDS else HEAD_DIM
    for item in range(program.to(tl.int64), items, tl.num_programs(0)):
        tile = (item % tiles).to(tl.int32)
        which = item // tiles % sets
        batch = item // tiles // sets
        q_base = q_ptr + batch * q_strides[0] + which * GROUP * q_strides[1]
        level_ptr = nodes_ptr + (batch * kv_heads + which * kv_heads // sets) * node_count * WIDTH
        first, sink_end, local_start, local_end = forced_interval(
            tile, QUERY_TILE, seq_len_q, seq_len_kv, BLOCK_SIZE, sink_blocks, local_blocks, IS_CAUSAL
        )
        # Leaves before `complete` lie before every local block and are whole for the tile.
        complete = tl.minimum(tl.maximum(first + 1, 0) // BLOCK_SIZE, local_start)
        local_start = tl.maximum(local_start, sink_end)
        forced = sink_end + tl.maximum(local_end - local_start, 0)
        row_ptr = out_ptr + item * out_width
        if IS_MEAN:
            held = tl.minimum(seq_len_q - tile * QUERY_TILE, QUERY_TILE)
            high, low = _mean_query(
                q_base, q_strides[1], q_strides[2], tile.to(tl.int64) * QUERY_TILE, held, GROUP, scale, offs_d,
                HEAD_DIM, 32, HAS_BOUNDS,
            )  # fmt: skip
            # of shape [16, BLOCK_D]
            high = _split(high, 16, nodes_ptr.dtype.element_ty)
            low = _split(low, 16, nodes_ptr.dtype.element_ty)
        elif GROUP <= HEADS:
            # of shape [HEADS·ROWS, BLOCK_D]
            q, high, low, row_mask = _load_rows(
                q_base, 0, tile, q_strides, seq_len_q, QUERY_TILE, offs_d, HEAD_DIM, GROUP, HEADS, ROWS, SCORE_ROWS
            )
            if not HAS_BOUNDS:
                high = q
        kept = 0
        span = root_span
        offset = level_end
        for step in range(levels):
            # The level's nodes [offset, offset + size) of the buffer, of which [lo, hi) may be ranked.
            size = tl.cdiv(blocks, span)
            offset -= size
            lo = tl.cdiv(sink_end, span)
            hi = size
            if IS_CAUSAL:
                hi = complete // span
            # At the start there is no list yet: all that may be ranked is a candidate.
            listed = tl.where(step == 0, 0, BRANCHING * (kept + 2))
            slots = tl.where(step == 0, hi - lo, listed)
            node, allowed = _candidates(list_ptr, slot, slots, listed, lo, hi, BRANCHING)
            found = tl.sum(allowed.to(tl.int32))
            keep = inner_width
            if step == levels - 1:
                keep = leaf_width
                if FORCED_IN_BUDGET:
                    keep = tl.maximum(leaf_width - forced, 0)
            if found > keep:
                for start in range(0, slots, CHUNK):
                    place = start + tl.arange(0, CHUNK)
                    here, real = _candidates(list_ptr, place, slots, listed, lo, hi, BRANCHING)
                    # of shape [CHUNK, BLOCK_D]
                    at = level_ptr + (offset + here).to(tl.int64)[:, None] * WIDTH + offs_d[None, :]
                    mask = real[:, None] & (offs_d < HEAD_DIM)[None, :]
                    u, w = _load_nodes(at, mask, HEAD_DIM, HAS_BOUNDS)
                    log_keys = _log_keys(here, span, seq_len_kv, BLOCK_SIZE)
                    if IS_MEAN:
                        score = tl.sum(summary_logits(high, low, u, w, HAS_BOUNDS), 0) + GROUP * log_keys
                    elif GROUP <= HEADS:
                        logits = summary_logits(high, low, u, w, HAS_BOUNDS) * scale + log_keys[None, :]
                        if CHILDREN:  # noqa: SIM102 - the first condition is compiled away
                            if step < levels - 1:
                                logits = _children_logits(
                                    high, low, scale, level_ptr, offset, here, real, span, blocks, seq_len_kv, offs_d,
                                    BLOCK_SIZE, HEAD_DIM, BRANCHING, HAS_BOUNDS,
                                )  # fmt: skip
                        score = _join_rows(logits, row_mask, HEADS, ROWS)
                    else:
                        score = tl.zeros([CHUNK], tl.float32)
                        for head in range(0, GROUP, HEADS):
                            q, high, low, row_mask = _load_rows(
                                q_base, head, tile, q_strides, seq_len_q, QUERY_TILE, offs_d, HEAD_DIM, GROUP, HEADS,
                                ROWS, SCORE_ROWS,
                            )  # fmt: skip
                            if not HAS_BOUNDS:
                                high = q
                            logits = summary_logits(high, low, u, w, HAS_BOUNDS) * scale + log_keys[None, :]
                            if CHILDREN:  # noqa: SIM102 - the first condition is compiled away
                                if step < levels - 1:
                                    logits = _children_logits(
                                        high, low, scale, level_ptr, offset, here, real, span, blocks, seq_len_kv, offs_d,
                                        BLOCK_SIZE, HEAD_DIM, BRANCHING, HAS_BOUNDS,
                                    )  # fmt: skip
                            score += _join_rows(logits, row_mask, HEADS, ROWS)
                    tl.store(score_ptr + place, score, mask=place < slots)
                tl.debug_barrier()
                scores = tl.load(score_ptr + slot, mask=slot < slots, other=0.0)
                chosen = best(scores, allowed, keep)
            else:
                chosen = allowed
            kept = tl.sum(chosen.to(tl.int32))
            order = tl.cumsum(chosen.to(tl.int32))
            tl.debug_barrier()
            if step < levels - 1:
                tl.store(list_ptr, lo - 1)
                tl.store(list_ptr + order, node, mask=chosen)
                tl.store(list_ptr + kept + 1, tl.where(hi >= lo, hi, -1))
                tl.debug_barrier()
            elif WITH_FORCED:
                length = write_list(row_ptr, node, chosen, sink_end, local_start, forced, out_width)
                tl.store(count_ptr + item, length)
            else:
                tl.store(row_ptr + order - 1, node, mask=chosen)
                tl.store(count_ptr + item, kept)
            span = span // BRANCHING


def run_walk(call: Call, out: Tensor, counts: Tensor, leaf_width: int) -> None:
    """Walk the levels that are left and write the best `leaf_width` leaves, with the forced ones unless more follows."""
    rules, device = call.rules, call.q.device
    places = slots(rules, call.tiling)
    warps = max(1, places // 1024)
    count = programs(call.items, device, WALK_PROGRAMS)
    heads, rows = head_shape(score_rows(rules, call.tiling), call.shape["GROUP"], 64)
    opened = torch.empty(count, rules.inner_width() + 2, dtype=torch.int32, device=device)
    levels = scored_levels(rules, call.tiling)
    last = rules.leaf_score == "summary"
    _walk[(count,)](
        call.q,
        call.pyramid.nodes,
        opened,
        torch.empty(count, places, device=device),
        out,
        counts,
        call.q.stride()[:3],
        call.scale,
        *call.sizes,
        call.pyramid.offsets[-1],
        call.pyramid.offsets[levels],
        levels,
        rules.branching ** (levels - 1),
        rules.inner_width(),
        leaf_width,
        rules.sink_blocks,
        rules.local_blocks,
        opened.shape[1],
        out.shape[-1],
        BRANCHING=rules.branching,
        SLOTS=places,
        CHUNK=WALK_CHUNK,
        HEADS=heads,
        ROWS=rows,
        HAS_BOUNDS=call.pyramid.has_bounds,
        IS_MEAN=rules.tile_reduce == "mean",
        CHILDREN=rules.node_score == "children",
        WITH_FORCED=last,
        FORCED_IN_BUDGET=rules.forced_in_budget and last,
        num_warps=warps,
        num_stages=WALK_STAGES,
        **call.shape,
    )
