"""Scores of nodes for tiles with one scoring row per head: one matrix product for all heads of the group.

Σ_h (s·(q_h⁺·u + q_h⁻·w) + log c) = [Σ s·q_h⁺]·u + [Σ s·q_h⁻]·w + G·log c. `_query_terms` makes the two fp32 sums of each
tile (of its mean query; at token level the query is its own mean), as two terms of the nodes' dtype that add up to them:
16 bits of bf16, 22 of fp16; what is rounded away moves a score by less than 1e-4, a near-tie. `_score_terms` multiplies
a band of tiles with a slice of a level.
Tiling: one program = BAND tiles × one slice of the node buffer; the terms stay in shared memory, nodes stream past.
Cost: 4·D operations per term, tile and node. Bound by the matrix units.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pyramidbench.kernels.route_nodes import log_keys
from pyramidbench.kernels.route_window import window_part


@triton.jit
def _query_terms(
    q_ptr, terms_ptr, q_strides, scale, first_tile, window_tiles, sets, seq_len_q,
    GROUP: tl.constexpr, QUERY_TILE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, RUNS: tl.constexpr,
    ROWS: tl.constexpr, TERMS: tl.constexpr, HAS_BOUNDS: tl.constexpr,
):  # fmt: skip
    parts = tl.cdiv(window_tiles, RUNS)
    program = tl.program_id(0).to(tl.int64)
    pair = program // parts
    first = (program % parts).to(tl.int32) * RUNS
    q_ptr += pair // sets * q_strides[0] + pair % sets * GROUP * q_strides[1]
    offs_d = tl.arange(0, BLOCK_D)
    # Neighbouring places hold different tiles, so that a tile's rows lie in one thread and no sum crosses threads.
    index = tl.arange(0, ROWS * RUNS)
    run = first + index % RUNS
    # of shape [RUNS, BLOCK_D], fp32
    high = tl.zeros([RUNS, BLOCK_D], tl.float32)
    low = tl.zeros([RUNS, BLOCK_D], tl.float32)
    held = tl.minimum(tl.maximum(seq_len_q - (first_tile + first + tl.arange(0, RUNS)) * QUERY_TILE, 1), QUERY_TILE)
    for _ in range(GROUP):
        total = tl.zeros([RUNS, BLOCK_D], tl.float32)
        for start in range(0, QUERY_TILE, ROWS):
            step = start + index // RUNS
            row = (first_tile + run) * QUERY_TILE + step
            is_row = (step < QUERY_TILE) & (run < window_tiles) & (row < seq_len_q)
            # of shape [ROWS·RUNS, BLOCK_D]
            at = q_ptr + row.to(tl.int64)[:, None] * q_strides[2] + offs_d[None, :]
            q = tl.load(at, mask=is_row[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0).to(tl.float32)
            total += tl.sum(tl.reshape(q, [ROWS, RUNS, BLOCK_D]), 0)
        q_ptr += q_strides[1]
        mean = total / held[:, None] * scale
        if HAS_BOUNDS:
            high += tl.maximum(mean, 0.0)
            low += tl.minimum(mean, 0.0)
        else:
            high += mean
    WIDTH: tl.constexpr = 2 * HEAD_DIM if HAS_BOUNDS else HEAD_DIM
    place = first + tl.arange(0, RUNS)
    out_at = terms_ptr + (pair * window_tiles + place)[:, None] * (TERMS * WIDTH) + offs_d[None, :]
    mask = (place < window_tiles)[:, None] & (offs_d < HEAD_DIM)[None, :]
    dtype = terms_ptr.dtype.element_ty
    tl.store(out_at, high.to(dtype), mask=mask)
    if TERMS > 1:
        tl.store(out_at + WIDTH, (high - high.to(dtype).to(tl.float32)).to(dtype), mask=mask)
    if HAS_BOUNDS:
        tl.store(out_at + HEAD_DIM, low.to(dtype), mask=mask)
        if TERMS > 1:
            tl.store(out_at + WIDTH + HEAD_DIM, (low - low.to(dtype).to(tl.float32)).to(dtype), mask=mask)


@triton.jit
def _score_terms(
    terms_ptr, nodes_ptr, score_ptr, first_tile, window_tiles, limit, slices, columns, sets, kv_heads, seq_len_q, seq_len_kv,
    node_count, lowest_node, lowest_span,
    GROUP: tl.constexpr, QUERY_TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    IS_CAUSAL: tl.constexpr, BRANCHING: tl.constexpr, SLICE: tl.constexpr, CHUNK: tl.constexpr, BAND: tl.constexpr,
    TERMS: tl.constexpr, HAS_BOUNDS: tl.constexpr,
):  # fmt: skip
    pair, start_tile, level, column, span, start, end = window_part(
        first_tile, window_tiles, limit, slices, lowest_node, lowest_span, seq_len_q, seq_len_kv, QUERY_TILE, BLOCK_SIZE,
        BRANCHING, BAND, SLICE, IS_CAUSAL,
    )  # fmt: skip
    if end <= start:
        return
    VECTORS: tl.constexpr = 2 if HAS_BOUNDS else 1
    WIDTH: tl.constexpr = VECTORS * HEAD_DIM
    head = pair // sets * kv_heads + pair % sets * kv_heads // sets
    slice_ptr = nodes_ptr + (head * node_count + level + start) * WIDTH
    # u and w of a node stand side by side, and so do the two sums of a tile.
    offs_w = tl.arange(0, VECTORS * BLOCK_D)
    mask_w = offs_w % BLOCK_D < HEAD_DIM
    if HEAD_DIM != BLOCK_D:
        offs_w = offs_w // BLOCK_D * HEAD_DIM + offs_w % BLOCK_D
    # The terms of a tile are eight rows apart, where a product leaves both sums in one thread.
    index = tl.arange(0, TERMS * BAND)
    tile = start_tile + index // (8 * TERMS) * 8 + index % 8
    at = terms_ptr + (pair * window_tiles + tile)[:, None] * (TERMS * WIDTH) + (index // 8 % TERMS * WIDTH)[:, None]
    # of shape [TERMS·BAND, VECTORS·BLOCK_D]
    query = tl.load(at + offs_w[None, :], mask=(tile < window_tiles)[:, None] & mask_w[None, :], other=0.0)
    tile = start_tile + tl.arange(0, BAND)
    real = (tile < window_tiles)[:, None]
    score_at = score_ptr + (pair * window_tiles + tile)[:, None] * columns + (column + start)
    # A causal tile ranks complete nodes alone: none is clipped.
    weight = GROUP * tl.log((span.to(tl.int64) * BLOCK_SIZE).to(tl.float32))
    offs_n = tl.arange(0, CHUNK)
    for begin in range(0, end - start, CHUNK):
        # A place past the end repeats the last node.
        node = tl.minimum(begin + offs_n, end - start - 1)
        # of shape [CHUNK, VECTORS·BLOCK_D]
        node_at = slice_ptr + node[:, None] * WIDTH + offs_w[None, :]
        summary = tl.load(node_at) if HEAD_DIM == BLOCK_D else tl.load(node_at, mask=mask_w[None, :], other=0.0)
        # of shape [TERMS·BAND, CHUNK]
        score = tl.dot(query, tl.trans(summary), input_precision="ieee")
        if TERMS > 1:
            score = tl.reshape(tl.sum(tl.reshape(score, [BAND // 8, TERMS, 8, CHUNK]), 1), [BAND, CHUNK])
        if not IS_CAUSAL:
            score += GROUP * log_keys(start + node, span, seq_len_kv, BLOCK_SIZE)[None, :]
        else:
            score += weight
        # What stands past the end goes to columns that nobody reads: without a mask, whole vectors are stored.
        tl.store(score_at + begin + offs_n[None, :], score, mask=real)
