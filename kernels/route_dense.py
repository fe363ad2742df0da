"""The upper levels of the walk on the GPU, for several neighbouring tiles at once: every node of a level is scored.

While a level has few nodes, the tiles' candidates are most of it, so scoring all of it for TILES tiles together reads
each node once where single tiles would gather it TILES times. What may be kept is the same as in `_walk`: children of
kept nodes and of forced ancestors, inside [lo, hi).
Tiling: one program = TILES tiles of one set at a time of a persistent grid; a level's scores and the flags of its kept
nodes live in the program's slice of scratch (cached in L2), and one bisection finds the Top-K of all its tiles, a row
each. The kept nodes of the last level go to memory, as the list that `_walk` starts from.
Cost: 4·D operations per row and node, at most NODES nodes on a level, and NODES·2·D/TILES elements read per tile and
level. Bound by the selection (bisection, compaction), not by the products.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pyramidbench.kernels.route_walk import forced_interval, score_row, summary_logits
from pyramidbench.kernels.top_k import best_rows


@triton.jit
def _three_terms(x, DTYPE: tl.constexpr):
    """An fp32 tensor as three of DTYPE that add up to it (three terms keep 24 bits of bf16)."""
    first = x.to(DTYPE)
    rest = x - first.to(tl.float32)
    second = rest.to(DTYPE)
    return first, second, (rest - second.to(tl.float32)).to(DTYPE)


@triton.jit
def _mean_queries(
    q_base, q_strides, tiles, tile, seq_len_q, scale, offs_d,
    GROUP: tl.constexpr, QUERY_TILE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    TILES: tl.constexpr, CHUNK: tl.constexpr, HAS_BOUNDS: tl.constexpr,
):  # fmt: skip
    """Σ over heads of the positive and the negative part of each tile's mean query, times scale: two [TILES, BLOCK_D]."""
    index = tl.arange(0, TILES * CHUNK)
    first = tl.min(tile) + index // CHUNK
    held = tl.maximum(tl.minimum(seq_len_q - tile * QUERY_TILE, QUERY_TILE), 1)
    high = tl.zeros([TILES, BLOCK_D], tl.float32)
    low = tl.zeros([TILES, BLOCK_D], tl.float32)
    for head in range(GROUP):
        total = tl.zeros([TILES, BLOCK_D], tl.float32)
        for start in tl.range(0, QUERY_TILE, CHUNK, num_stages=2):
            row = start + index % CHUNK
            query = first * QUERY_TILE + row
            mask = (row < QUERY_TILE) & (query < seq_len_q) & (first < tiles)
            # [TILES·CHUNK, BLOCK_D]
            at = q_base + head * q_strides[1] + query.to(tl.int64)[:, None] * q_strides[2] + offs_d[None, :]
            q = tl.load(at, mask=mask[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0).to(tl.float32)
            total += tl.sum(tl.reshape(q, [TILES, CHUNK, BLOCK_D]), 1)
        mean = total / held[:, None] * scale
        if HAS_BOUNDS:
            high += tl.maximum(mean, 0.0)
            low += tl.minimum(mean, 0.0)
        else:
            high += mean
    return high, low


@triton.jit
def _tile_rows(
    q_base, head, q_strides, tile, tiles, seq_len_q, offs_d,
    QUERY_TILE: tl.constexpr, HEAD_DIM: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr,
    SCORE_ROWS: tl.constexpr,
):  # fmt: skip
    """One head's scoring rows of all tiles: q, q⁺ and q⁻ [TILES·ROWS, BLOCK_D], and which rows are real."""
    index = tl.arange(0, TILES * ROWS)
    own = tl.min(tile) + index // ROWS
    query, real = score_row(index % ROWS, tl.minimum(own, tiles - 1), QUERY_TILE, seq_len_q, SCORE_ROWS)
    at = q_base + head * q_strides[1] + query.to(tl.int64) * q_strides[2]
    q = tl.load(at[:, None] + offs_d[None, :], mask=real[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)
    return q, tl.where(q > 0, q, 0.0).to(q.dtype), tl.where(q < 0, q, 0.0).to(q.dtype), real


@triton.jit
def _join_tile_rows(logits, real, TILES: tl.constexpr, ROWS: tl.constexpr):
    """logsumexp over each tile's rows: [TILES, n] from [TILES·ROWS, n]; NaN counts as -inf."""
    logits = tl.where(real[:, None], logits, float("-inf"))
    logits = tl.reshape(logits, [TILES, ROWS, logits.shape[1]])
    top = tl.max(logits, 1)
    top = tl.where(top == float("-inf"), 0.0, top)
    joined = top + tl.log(tl.sum(tl.exp(logits - top[:, None, :]), 1))
    return tl.where(joined == joined, joined, float("-inf"))


@triton.jit
def _walk_dense(
    q_ptr,
    nodes_ptr,
    score_ptr,
    flag_ptr,
    list_ptr,
    kept_ptr,
    q_strides,
    scale,
    groups,
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
    sink_blocks,
    local_blocks,
    list_width,
    GROUP: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BRANCHING: tl.constexpr,
    NODES: tl.constexpr,
    CHUNK: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    SCORE_ROWS: tl.constexpr,
    HAS_BOUNDS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    IS_MEAN: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    offs_n = tl.arange(0, NODES)
    offs_t = tl.arange(0, TILES)
    # [TILES, NODES]
    place = program * TILES * NODES + offs_t[:, None] * NODES + offs_n[None, :]
    blocks = tl.cdiv(seq_len_kv, BLOCK_SIZE)
    per_set = tl.cdiv(tiles, TILES)
    WIDTH: tl.constexpr = 2 * HEAD_DIM if HAS_BOUNDS else HEAD_DIM
    for item in range(program, groups, tl.num_programs(0)):
        tile = (item % per_set).to(tl.int32) * TILES + offs_t
        which = item // per_set % sets
        batch = item // per_set // sets
        q_base = q_ptr + batch * q_strides[0] + which * GROUP * q_strides[1]
        level_ptr = nodes_ptr + (batch * kv_heads + which * kv_heads // sets) * node_count * WIDTH
        first, sink_end, local_start, local_end = forced_interval(
            tile, QUERY_TILE, seq_len_q, seq_len_kv, BLOCK_SIZE, sink_blocks, local_blocks, IS_CAUSAL
        )
        if IS_MEAN:
            high, low = _mean_queries(
                q_base, q_strides, tiles, tile, seq_len_q, scale, offs_d,
                GROUP, QUERY_TILE, HEAD_DIM, BLOCK_D, TILES, 8, HAS_BOUNDS,
            )  # fmt: skip
            high, high_1, high_2 = _three_terms(high, nodes_ptr.dtype.element_ty)
            low, low_1, low_2 = _three_terms(low, nodes_ptr.dtype.element_ty)
        elif GROUP == 1:
            q, high, low, real = _tile_rows(
                q_base, 0, q_strides, tile, tiles, seq_len_q, offs_d, QUERY_TILE, HEAD_DIM, TILES, ROWS, SCORE_ROWS
            )
            if not HAS_BOUNDS:
                high = q
        span = root_span
        offset = level_end
        # [TILES]: what was rankable on the level above; nothing was, so that every node of the first level may stay.
        lo_above = tile * 0
        hi_above = tile * 0
        for step in range(levels):
            size = tl.cdiv(blocks, span)
            offset -= size
            lo = tl.cdiv(sink_end, span)
            hi = tile * 0 + size
            if IS_CAUSAL:
                hi = tl.minimum(tl.maximum(first + 1, 0) // BLOCK_SIZE, local_start) // span
            hi = tl.where(tile < tiles, hi, 0)
            end = tl.max(hi)
            for start in range(0, end, CHUNK):
                node = start + tl.arange(0, CHUNK)
                # [CHUNK, BLOCK_D]
                at = level_ptr + (offset + node).to(tl.int64)[:, None] * WIDTH + offs_d[None, :]
                mask = (node < end)[:, None] & (offs_d < HEAD_DIM)[None, :]
                u = tl.load(at, mask=mask, other=0.0)
                w = u
                if HAS_BOUNDS:
                    w = tl.load(at + HEAD_DIM, mask=mask, other=0.0)
                keys = tl.minimum(seq_len_kv - node.to(tl.int64) * span * BLOCK_SIZE, span.to(tl.int64) * BLOCK_SIZE)
                log_keys = tl.log(tl.maximum(keys, 1).to(tl.float32))[None, :]
                # [TILES, CHUNK]
                if IS_MEAN:
                    score = summary_logits(high, low, u, w, HAS_BOUNDS)
                    score += summary_logits(high_1, low_1, u, w, HAS_BOUNDS)
                    score += summary_logits(high_2, low_2, u, w, HAS_BOUNDS) + GROUP * log_keys
                elif GROUP == 1:
                    logits = summary_logits(high, low, u, w, HAS_BOUNDS) * scale + log_keys
                    score = _join_tile_rows(logits, real, TILES, ROWS)
                else:
                    score = tl.zeros([TILES, CHUNK], tl.float32)
                    for head in range(GROUP):
                        q, high, low, real = _tile_rows(
                            q_base, head, q_strides, tile, tiles, seq_len_q, offs_d,
                            QUERY_TILE, HEAD_DIM, TILES, ROWS, SCORE_ROWS,
                        )  # fmt: skip
                        if not HAS_BOUNDS:
                            high = q
                        logits = summary_logits(high, low, u, w, HAS_BOUNDS) * scale + log_keys
                        score += _join_tile_rows(logits, real, TILES, ROWS)
                score_at = score_ptr + program * TILES * NODES + offs_t[:, None] * NODES + node[None, :]
                tl.store(score_at, score, mask=(node < end)[None, :])
            tl.debug_barrier()
            inside = (offs_n[None, :] >= lo[:, None]) & (offs_n[None, :] < hi[:, None])
            scores = tl.load(score_ptr + place, mask=inside, other=0.0)
            above = offs_n // BRANCHING
            flag_at = flag_ptr + program * TILES * NODES + offs_t[:, None] * NODES + above[None, :]
            opened = (above[None, :] < lo_above[:, None]) | (above[None, :] >= hi_above[:, None])
            opened = opened | (tl.load(flag_at, mask=inside & ~opened, other=0) > 0)
            chosen = best_rows(scores, inside & opened, tile * 0 + inner_width)
            tl.debug_barrier()
            tl.store(flag_ptr + place, chosen.to(tl.int8))
            tl.debug_barrier()
            lo_above = lo
            hi_above = hi
            span = span // BRANCHING
            if step == levels - 1:
                # The opened nodes in ascending order: the sink ancestor lo - 1, the kept ones, the local ancestor hi.
                row_ptr = list_ptr + ((batch * sets + which) * tiles + tile).to(tl.int64) * list_width
                order = tl.cumsum(chosen.to(tl.int32), 1)
                kept = tl.sum(chosen.to(tl.int32), 1)
                held = tile < tiles
                tl.store(row_ptr[:, None] + order, tl.broadcast_to(offs_n[None, :], [TILES, NODES]), mask=chosen)
                tl.store(row_ptr, lo - 1, mask=held)
                tl.store(row_ptr + kept + 1, tl.where(hi >= lo, hi, -1), mask=held)
                tl.store(kept_ptr + (batch * sets + which) * tiles + tile, kept, mask=held)
