"""The walk on the GPU: blocks (or leaf candidates) of every query tile, coarse to fine, without a score matrix.

On each level, of the candidates that are complete and hold no forced block, the best β·K by summary score stay; their
children and those of the forced blocks' ancestors are the next candidates. Scores: S = Σ over the group's heads of
logsumexp over rows of s·(q⁺·u + q⁻·w), + log c (kernels.scores is the twin, kernels.walk the walk's).

What may be ranked on a level is one interval [lo, hi): after the nodes that hold a sink, before those that hold a local
block. So the opened nodes, in ascending order, are node lo - 1 (the only sink ancestor with rankable children), the kept
ones, and node hi (likewise for local blocks): one list, no merge, and a level is data (an offset and a span).
Tiling: one program = one warp = one (set, tile) at a time of a persistent grid. Its list and its scores live in a
private slice of scratch (a few KiB, which the L1 and L2 caches hold); candidates are scored in chunks.
Chunks are matrix products [rows, D] × [D, nodes] in k's dtype. With one scoring row a head (a mean query, or token level)
the heads' scores add up to one dot product with [Σ q⁺, Σ q⁻]; these fp32 vectors enter as three rows that add up to them.
With node_score "children" an inner node's logit is the logsumexp of its children's.
Cost: 4·D operations per row and scored node (per child); bound by the node reads (2·D elements each) from L2.
Source: arXiv 2609.31093 for the walk; docs/selection.md for what differs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyramidbench.kernels.pooled_queries import mean_queries
from pyramidbench.kernels.route_call import Call, head_shape, programs, scored_levels, scoring_rows, slots
from pyramidbench.kernels.route_candidates import candidates, resume
from pyramidbench.kernels.route_nodes import (
    load_nodes,
    log_keys,
    query_rows,
    rows_score,
    split_terms,
    summary_logits,
    summed_query,
)
from pyramidbench.kernels.route_tile import rankable_blocks, score_row, write_choice
from pyramidbench.kernels.top_k import best

WALK_PROGRAMS = 8
"""In 16 bits one warp a tile, 8 programs per multiprocessor, chunks of 32 nodes; at 256k keys, 16 heads, K 64, β 4, H200: 4.5
ms. With a register cap for 12 programs 5.8, without prefetch 6.3, chunks of 16 on 12 programs 6.3, of 64 7.4, two warps 8.6."""
FP32_WORK = 32768
"""Products of numbers that a warp does for a chunk in fp32, at most: with twice as many they spill."""


@triton.jit
def _score_candidates(
    q_base, list_ptr, score_ptr, level_ptr, high, low, row_real, q_strides, scale, tile, tiles, seq_len_q, seq_len_kv,
    offset, span, blocks, slots, listed, lo, hi, is_inner, offs_d,
    GROUP: tl.constexpr, QUERY_TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    BRANCHING: tl.constexpr, CHUNK: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, SCORE_ROWS: tl.constexpr,
    KEEPS_ROWS: tl.constexpr, HAS_BOUNDS: tl.constexpr, IS_POOLED: tl.constexpr, SUMMED: tl.constexpr,
    CHILDREN: tl.constexpr,
):  # fmt: skip
    """Scores of a level's candidates into score_ptr [slots], in chunks; `offset`: the level's place in the buffer."""
    WIDTH: tl.constexpr = 2 * HEAD_DIM if HAS_BOUNDS else HEAD_DIM
    for start in range(0, slots, CHUNK):
        place = start + tl.arange(0, CHUNK)
        node, real = candidates(list_ptr, place, slots, listed, lo, hi, BRANCHING)
        # of shape [CHUNK, BLOCK_D]
        at = level_ptr + (offset + node).to(tl.int64)[:, None] * WIDTH + offs_d[None, :]
        u, w = load_nodes(at, real[:, None] & (offs_d < HEAD_DIM)[None, :], HEAD_DIM, HAS_BOUNDS)
        weight = log_keys(node, span, seq_len_kv, BLOCK_SIZE)
        if SUMMED:
            score = tl.sum(summary_logits(high, low, u, w, HAS_BOUNDS), 0) + GROUP * weight
        elif KEEPS_ROWS:
            score = rows_score(
                high, low, row_real, GROUP, u, w, weight, scale, level_ptr, offset, node, real, span, blocks, seq_len_kv,
                offs_d, is_inner, BLOCK_SIZE, HEAD_DIM, BRANCHING, HEADS, ROWS, HAS_BOUNDS, CHILDREN,
            )  # fmt: skip
        else:
            score = tl.zeros([CHUNK], tl.float32)
            for head in range(0, GROUP, HEADS):
                high, low, row_real = query_rows(
                    q_base, head, tile, tiles, q_strides, seq_len_q, QUERY_TILE, HEAD_DIM, offs_d, GROUP, 1, HEADS, ROWS,
                    SCORE_ROWS, IS_POOLED, HAS_BOUNDS,
                )  # fmt: skip
                score += rows_score(
                    high, low, row_real, GROUP - head, u, w, weight, scale, level_ptr, offset, node, real, span, blocks,
                    seq_len_kv, offs_d, is_inner, BLOCK_SIZE, HEAD_DIM, BRANCHING, HEADS, ROWS, HAS_BOUNDS, CHILDREN,
                )  # fmt: skip
        tl.store(score_ptr + place, score, mask=place < slots)


@triton.jit
def _walk(
    q_ptr, nodes_ptr, list_ptr, score_ptr, start_ptr, start_count_ptr, out_ptr, count_ptr, q_strides, scale, items, sets,
    kv_heads, tiles, seq_len_q, seq_len_kv, node_count, level_end, levels, root_span, inner_width, leaf_width, sink_blocks,
    local_blocks, list_width, out_width,
    GROUP: tl.constexpr, QUERY_TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BRANCHING: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,
    SCORE_ROWS: tl.constexpr, KEEPS_ROWS: tl.constexpr, HAS_BOUNDS: tl.constexpr, IS_CAUSAL: tl.constexpr,
    IS_POOLED: tl.constexpr, SUMMED: tl.constexpr, CHILDREN: tl.constexpr, WITH_FORCED: tl.constexpr,
    FORCED_IN_BUDGET: tl.constexpr, RESUMES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    list_ptr += program * list_width
    score_ptr += program * SLOTS
    offs_d = tl.arange(0, BLOCK_D)
    slot = tl.arange(0, SLOTS)
    blocks = tl.cdiv(seq_len_kv, BLOCK_SIZE)
    WIDTH: tl.constexpr = 2 * HEAD_DIM if HAS_BOUNDS else HEAD_DIM
    for item in range(program, items, tl.num_programs(0)):
        tile = (item % tiles).to(tl.int32)
        which = item // tiles % sets
        batch = item // tiles // sets
        q_base = q_ptr + batch * q_strides[0] + which * GROUP * q_strides[1]
        level_ptr = nodes_ptr + (batch * kv_heads + which * kv_heads // sets) * node_count * WIDTH
        complete, sink_end, local_start, forced = rankable_blocks(
            tile, QUERY_TILE, seq_len_q, seq_len_kv, BLOCK_SIZE, sink_blocks, local_blocks, IS_CAUSAL
        )
        if SUMMED:
            row, _ = score_row(0, tile, QUERY_TILE, seq_len_q, 1)
            high, low = summed_query(
                q_base, tile if IS_POOLED else row, q_strides, scale, offs_d, HEAD_DIM, GROUP, HAS_BOUNDS
            )
            # of shape [16, BLOCK_D]
            high, low = (
                split_terms(high, 16, nodes_ptr.dtype.element_ty),
                split_terms(low, 16, nodes_ptr.dtype.element_ty),
            )
            # They have no mask.
            row_real = slot < 0
        else:
            # of shape [HEADS·ROWS, BLOCK_D]
            high, low, row_real = query_rows(
                q_base, 0, tile, tiles, q_strides, seq_len_q, QUERY_TILE, HEAD_DIM, offs_d, GROUP, 1, HEADS, ROWS,
                SCORE_ROWS, IS_POOLED, HAS_BOUNDS,
            )  # fmt: skip
        kept = 0
        span = root_span
        offset = level_end
        if RESUMES:
            kept = tl.load(start_count_ptr + item)
            above = span * BRANCHING
            hi = complete // above if IS_CAUSAL else tl.cdiv(blocks, above)
            resume(list_ptr, start_ptr + item * inner_width, kept, slot, tl.cdiv(sink_end, above), hi)
        for step in range(levels):
            # The level's nodes [offset, offset + size) of the buffer, of which [lo, hi) may be ranked.
            size = tl.cdiv(blocks, span)
            offset -= size
            lo = tl.cdiv(sink_end, span)
            hi = complete // span if IS_CAUSAL else size
            # At the start there is no list yet: all that may be ranked is a candidate.
            is_start = (step == 0) & (not RESUMES)
            listed = tl.where(is_start, 0, BRANCHING * (kept + 2))
            slots = tl.where(is_start, hi - lo, listed)
            node, allowed = candidates(list_ptr, slot, slots, listed, lo, hi, BRANCHING)
            keep = inner_width
            if step == levels - 1:
                keep = leaf_width
                if FORCED_IN_BUDGET:
                    keep = tl.maximum(leaf_width - forced, 0)
            chosen = allowed
            if tl.sum(allowed.to(tl.int32)) > keep:
                _score_candidates(
                    q_base, list_ptr, score_ptr, level_ptr, high, low, row_real, q_strides, scale, tile, tiles, seq_len_q,
                    seq_len_kv, offset, span, blocks, slots, listed, lo, hi, step < levels - 1, offs_d, GROUP, QUERY_TILE,
                    BLOCK_SIZE, HEAD_DIM, BRANCHING, CHUNK, HEADS, ROWS, SCORE_ROWS, KEEPS_ROWS, HAS_BOUNDS, IS_POOLED,
                    SUMMED, CHILDREN,
                )  # fmt: skip
                tl.debug_barrier()
                chosen = best(tl.load(score_ptr + slot, mask=slot < slots, other=0.0), allowed, keep)
            kept = tl.sum(chosen.to(tl.int32))
            order = tl.cumsum(chosen.to(tl.int32))
            tl.debug_barrier()
            if step < levels - 1:
                tl.store(list_ptr, lo - 1)
                tl.store(list_ptr + order, node, mask=chosen)
                tl.store(list_ptr + kept + 1, tl.where(hi >= lo, hi, -1))
                tl.debug_barrier()
            else:
                write_choice(
                    out_ptr + item * out_width, count_ptr + item, node, chosen, order, kept, sink_end, local_start, forced,
                    out_width, WITH_FORCED,
                )  # fmt: skip
            span = span // BRANCHING


@dataclass(frozen=True)
class WalkTile:
    """Nodes that a program scores at a time, and launch shape of `_walk`.

    keeps_rows: a tile's queries stay in registers if they are those of all heads; otherwise each chunk loads them again.
    """

    CHUNK: int
    num_warps: int
    num_stages: int
    keeps_rows: bool


def walk_tile(rows: int, head_dim: int, itemsize: int, places: int) -> WalkTile:
    """Tile sizes for `rows` scoring rows of `itemsize`-byte numbers, and `places` candidates of a level."""
    warps = max(1, places // 1024)
    if itemsize < 4:
        return WalkTile(32, warps, 2, keeps_rows=True)
    # fp32 products run on the vector units, which read rows and nodes from registers: with one warp 64 rows of 128 numbers
    # spilled 12 KB a thread, and compiled for 50 s instead of 5 (Triton 3.9, sm_90).
    width = triton.next_power_of_2(head_dim)
    chunk = 32 if rows * width <= 8192 else 16
    return WalkTile(chunk, min(16, max(warps, rows * chunk * width // FP32_WORK)), 1, keeps_rows=False)


@dataclass(frozen=True)
class Start:
    """Where a walk goes on: the level that was ranked last, and its kept nodes [items, inner_width] with their counts."""

    level: int
    kept: Tensor
    counts: Tensor


def run_walk(call: Call, out: Tensor, counts: Tensor, leaf_width: int, start: Start | None = None) -> None:
    """Walk the levels that are left and write the best `leaf_width` leaves, with the forced ones unless more follows."""
    rules, device = call.rules, call.q.device
    places = slots(rules, call.tiling)
    count = programs(call.items, device, WALK_PROGRAMS)
    pooled = rules.tile_reduce == "mean"
    scoring = scoring_rows(rules, call.tiling)
    heads, rows = head_shape(scoring, call.group, 64)
    queries = mean_queries(call.q, call.tiling) if pooled else call.q
    opened = torch.empty(count, rules.inner_width() + 2, dtype=torch.int32, device=device)
    levels = scored_levels(rules, call.tiling) if start is None else start.level
    last = rules.leaf_score == "summary"
    summed = scoring == 1 and (rules.node_score == "summary" or levels == 1)
    tile = walk_tile(16 if summed else heads * rows, call.q.shape[-1], call.q.element_size(), places)
    _walk[(count,)](
        queries,
        call.pyramid.nodes,
        opened,
        torch.empty(count, places, device=device),
        None if start is None else start.kept,
        None if start is None else start.counts,
        out,
        counts,
        queries.stride()[:3],
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
        CHUNK=tile.CHUNK,
        HEADS=heads,
        ROWS=rows,
        KEEPS_ROWS=call.group <= heads and tile.keeps_rows,
        HAS_BOUNDS=call.pyramid.has_bounds,
        IS_POOLED=pooled,
        SUMMED=summed,
        CHILDREN=rules.node_score == "children",
        WITH_FORCED=last,
        FORCED_IN_BUDGET=rules.forced_in_budget and last,
        RESUMES=start is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **call.shape,
    )
