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

from pyramidbench.kernels.route_nodes import load_nodes, log_keys
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
    for head in range(GROUP):
        total = tl.zeros([RUNS, BLOCK_D], tl.float32)
        for start in range(0, QUERY_TILE, ROWS):
            step = start + index // RUNS
            row = (first_tile + run) * QUERY_TILE + step
            is_row = (step < QUERY_TILE) & (run < window_tiles) & (row < seq_len_q)
            # of shape [ROWS·RUNS, BLOCK_D]
            at = q_ptr + head * q_strides[1] + row.to(tl.int64)[:, None] * q_strides[2] + offs_d[None, :]
            q = tl.load(at, mask=is_row[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0).to(tl.float32)
            total += tl.sum(tl.reshape(q, [ROWS, RUNS, BLOCK_D]), 0)
        mean = total / held[:, None] * scale
        if HAS_BOUNDS:
            high += tl.maximum(mean, 0.0)
            low += tl.minimum(mean, 0.0)
        else:
            high += mean
    PARTS: tl.constexpr = TERMS * 2 if HAS_BOUNDS else TERMS
    place = first + tl.arange(0, RUNS)
    out_at = terms_ptr + (pair * window_tiles + place)[:, None] * (PARTS * HEAD_DIM) + offs_d[None, :]
    mask = (place < window_tiles)[:, None] & (offs_d < HEAD_DIM)[None, :]
    dtype = terms_ptr.dtype.element_ty
    tl.store(out_at, high.to(dtype), mask=mask)
    if TERMS > 1:
        tl.store(out_at + HEAD_DIM, (high - high.to(dtype).to(tl.float32)).to(dtype), mask=mask)
    if HAS_BOUNDS:
        tl.store(out_at + TERMS * HEAD_DIM, low.to(dtype), mask=mask)
        if TERMS > 1:
            tl.store(out_at + 3 * HEAD_DIM, (low - low.to(dtype).to(tl.float32)).to(dtype), mask=mask)


@triton.jit
def _add(score, terms, rest, nodes, TERMS: tl.constexpr):
    """score + (terms + rest)·nodes: fp32 [tiles, n]; the smaller term first."""
    if TERMS > 1:
        score = tl.dot(rest, tl.trans(nodes), score, input_precision="ieee")
    return tl.dot(terms, tl.trans(nodes), score, input_precision="ieee")


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
    WIDTH: tl.constexpr = 2 * HEAD_DIM if HAS_BOUNDS else HEAD_DIM
    PARTS: tl.constexpr = TERMS * 2 if HAS_BOUNDS else TERMS
    head = pair // sets * kv_heads + pair % sets * kv_heads // sets
    level_ptr = nodes_ptr + (head * node_count + level) * WIDTH
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = (offs_d < HEAD_DIM)[None, :]
    tile = start_tile + tl.arange(0, BAND)
    real = (tile < window_tiles)[:, None]
    place = pair * window_tiles + tile
    at = terms_ptr + place[:, None] * (PARTS * HEAD_DIM) + offs_d[None, :]
    # of shape [BAND, BLOCK_D]
    high = tl.load(at, mask=real & mask_d, other=0.0)
    high_rest = tl.load(at + (TERMS - 1) * HEAD_DIM, mask=real & mask_d, other=0.0)
    low = tl.load(at + (PARTS - TERMS) * HEAD_DIM, mask=real & mask_d, other=0.0)
    low_rest = tl.load(at + (PARTS - 1) * HEAD_DIM, mask=real & mask_d, other=0.0)
    score_at = score_ptr + place[:, None] * columns + column
    for begin in range(start, end, CHUNK):
        node = begin + tl.arange(0, CHUNK)
        inside = node < end
        weight = GROUP * log_keys(node, span, seq_len_kv, BLOCK_SIZE)
        node_at = level_ptr + node.to(tl.int64)[:, None] * WIDTH + offs_d[None, :]
        # of shape [CHUNK, BLOCK_D]
        u, w = load_nodes(node_at, inside[:, None] & mask_d, HEAD_DIM, HAS_BOUNDS)
        # of shape [BAND, CHUNK]
        score = _add(tl.zeros([BAND, CHUNK], tl.float32), high, high_rest, u, TERMS)
        if HAS_BOUNDS:
            score = _add(score, low, low_rest, w, TERMS)
        tl.store(score_at + node[None, :], score + weight[None, :], mask=real & inside[None, :])
