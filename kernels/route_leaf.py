"""The exact leaf of the walk on the GPU: the best K of each tile's candidates by their true log-mass.

For a row i and a block: S_i = logsumexp over the block's keys x of s·q_i·k_x. Rows and heads join by one of
sum_prob: Σ_i exp(S_i - Z_i), Z_i = logsumexp of S_i over the candidates and the forced blocks (their keys up to the
tile's first query);
sum_lse: Σ_h logsumexp over the head's rows; lse: logsumexp over all. (kernels.scores is the torch twin.)
Tiling: one program = one (set, tile) at a time of a persistent grid. First pass: [rows, D] × [D, block] for each
candidate; S goes to the program's slice of scratch (candidates × rows, a few KiB, in L2), Z is kept online. Second pass:
join S chunk by chunk. Then the best K join the forced blocks in ascending order.
Cost: 2·D·block operations per row and candidate; it reads candidates·block·D keys per tile. Bound by these reads from
L2 at 16 rows (about 9 TB/s on one H200), by the matrix units at 128.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyramidbench.kernels.route_call import Call, head_shape, programs, score_rows
from pyramidbench.kernels.route_tile import forced_interval, score_row, write_list
from pyramidbench.kernels.top_k import best, log_sum_exp

LEAF_WARPS = 2
LEAF_STAGES = 2
LEAF_PROGRAMS = 8
"""At 256k keys, 16 heads, 128 candidates, 16 rows, H200, with the walk: 14.5 ms; 17.3 with 11 programs, 17.0 with three
stages and 6, 19.0 with one warp, 22.0 with four."""


@triton.jit
def _block_mass(q, k_ptr, stride_n, block, last, scale, offs_d, BLOCK_SIZE, HEAD_DIM, BLOCK_N: tl.constexpr):
    """S [rows] of one block; keys after `last` are not seen."""
    offs_n = tl.arange(0, BLOCK_N)
    key = block * BLOCK_SIZE + offs_n
    inside = (offs_n < BLOCK_SIZE) & (key <= last)
    # of shape [BLOCK_N, BLOCK_D]
    at = k_ptr + key.to(tl.int64)[:, None] * stride_n + offs_d[None, :]
    k = tl.load(at, mask=inside[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)
    # of shape [rows, BLOCK_N]
    logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    logits = tl.where(inside[None, :], logits, float("-inf"))
    return log_sum_exp(logits, 1)


@triton.jit
def _add_mass(top, total, mass):
    """Online logsumexp over blocks: the new maximum and sum of rows [rows]."""
    new = tl.maximum(top, mass)
    shift = tl.where(new == float("-inf"), 0.0, new)
    return new, total * tl.exp(top - shift) + tl.exp(mass - shift)


@triton.jit
def _join(mass, normaliser, heads, HEADS: tl.constexpr, ROWS: tl.constexpr, REDUCE: tl.constexpr):
    """Scores [n] of blocks from their masses [n, HEADS·ROWS] (-inf outside the tile and the group)."""
    if REDUCE == "sum_prob":
        return tl.sum(tl.exp(mass - normaliser[None, :]), 1)
    if REDUCE == "sum_lse":
        # of shape [n, HEADS]
        by_head = log_sum_exp(tl.reshape(mass, [mass.shape[0], HEADS, ROWS]), 2)
        return tl.sum(tl.where((tl.arange(0, HEADS) < heads)[None, :], by_head, 0.0), 1)
    return log_sum_exp(mass, 1)


@triton.jit
def _leaf(
    q_ptr,
    k_ptr,
    candidates_ptr,
    candidate_count_ptr,
    mass_ptr,
    score_ptr,
    out_ptr,
    count_ptr,
    q_strides,
    k_strides,
    scale,
    items,
    sets,
    kv_heads,
    tiles,
    seq_len_q,
    seq_len_kv,
    candidate_width,
    top_k,
    sink_blocks,
    local_blocks,
    out_width,
    GROUP: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SLOTS: tl.constexpr,
    CHUNK: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    SCORE_ROWS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    REDUCE: tl.constexpr,
    FORCED_IN_BUDGET: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    TALL: tl.constexpr = HEADS * ROWS
    mass_ptr += program * SLOTS * TALL
    score_ptr += program * SLOTS
    offs_d = tl.arange(0, BLOCK_D)
    slot = tl.arange(0, SLOTS)
    index = tl.arange(0, TALL)
    for item in range(program, items, tl.num_programs(0)):
        tile = (item % tiles).to(tl.int32)
        which = item // tiles % sets
        batch = item // tiles // sets
        q_base = q_ptr + batch * q_strides[0] + which * GROUP * q_strides[1]
        k_base = k_ptr + batch * k_strides[0] + which * kv_heads // sets * k_strides[1]
        first, sink_end, local_start, local_end = forced_interval(
            tile, QUERY_TILE, seq_len_q, seq_len_kv, BLOCK_SIZE, sink_blocks, local_blocks, IS_CAUSAL
        )
        local_start = tl.maximum(local_start, sink_end)
        forced = sink_end + tl.maximum(local_end - local_start, 0)
        keep = top_k
        if FORCED_IN_BUDGET:
            keep = tl.maximum(top_k - forced, 0)
        found = tl.load(candidate_count_ptr + item)
        list_ptr = candidates_ptr + item * candidate_width
        block = tl.load(list_ptr + slot, mask=slot < found, other=-1)
        chosen = slot < found
        if found > keep:
            query, is_query = score_row(index % ROWS, tile, QUERY_TILE, seq_len_q, SCORE_ROWS)
            for head in range(0, GROUP, HEADS):
                is_row = is_query & (head + index // ROWS < GROUP)
                q_at = q_base + (head + index // ROWS) * q_strides[1] + query.to(tl.int64) * q_strides[2]
                # of shape [TALL, BLOCK_D]
                q = tl.load(
                    q_at[:, None] + offs_d[None, :], mask=is_row[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0
                )
                # What the tile's first query may not see must not move the set; candidates it sees whole.
                last = seq_len_kv - 1
                if IS_CAUSAL:
                    last = tl.minimum(last, first)
                top = tl.full([TALL], float("-inf"), tl.float32)
                total = tl.zeros([TALL], tl.float32)
                for place in range(0, found):
                    which_block = tl.load(list_ptr + place)
                    mass = _block_mass(
                        q, k_base, k_strides[2], which_block, last, scale, offs_d, BLOCK_SIZE, HEAD_DIM, BLOCK_N
                    )
                    tl.store(mass_ptr + place * TALL + index, mass)
                    top, total = _add_mass(top, total, mass)
                if REDUCE == "sum_prob":
                    for place in range(0, forced):
                        which_block = tl.where(place < sink_end, place, local_start + place - sink_end)
                        mass = _block_mass(
                            q, k_base, k_strides[2], which_block, last, scale, offs_d, BLOCK_SIZE, HEAD_DIM, BLOCK_N
                        )
                        top, total = _add_mass(top, total, mass)
                normaliser = top + tl.log(tl.where(total > 0, total, 1.0))
                tl.debug_barrier()
                for start in range(0, found, CHUNK):
                    part = start + tl.arange(0, CHUNK)
                    # of shape [CHUNK, TALL]
                    mass = tl.load(
                        mass_ptr + part[:, None] * TALL + index[None, :],
                        mask=(part < found)[:, None],
                        other=float("-inf"),
                    )
                    mass = tl.where(is_row[None, :], mass, float("-inf"))
                    score = _join(mass, normaliser, GROUP - head, HEADS, ROWS, REDUCE)
                    if head > 0:
                        before = tl.load(score_ptr + part, mask=part < found, other=0.0)
                        score = log_sum_exp(tl.join(before, score), 1) if REDUCE == "lse" else before + score
                    tl.debug_barrier()
                    tl.store(score_ptr + part, score, mask=part < found)
                tl.debug_barrier()
            scores = tl.load(score_ptr + slot, mask=slot < found, other=0.0)
            chosen = best(scores, chosen, keep)
            tl.debug_barrier()
        length = write_list(out_ptr + item * out_width, block, chosen, sink_end, local_start, forced, out_width)
        tl.store(count_ptr + item, length)


def run_leaf(
    call: Call, k: Tensor, candidates: Tensor, candidate_counts: Tensor, lists: Tensor, counts: Tensor
) -> None:
    """Of each tile's candidates, the best K by exact score, and the forced blocks, into `lists`."""
    rules, device = call.rules, call.q.device
    places = triton.next_power_of_2(max(16, candidates.shape[1]))
    heads, rows = head_shape(score_rows(rules, call.tiling), call.shape["GROUP"], 64)
    count = programs(call.items, device, LEAF_PROGRAMS)
    _leaf[(count,)](
        call.q,
        k,
        candidates,
        candidate_counts,
        torch.empty(count, places, heads * rows, device=device),
        torch.empty(count, places, device=device),
        lists,
        counts,
        call.q.stride()[:3],
        k.stride()[:3],
        call.scale,
        *call.sizes,
        candidates.shape[1],
        rules.top_k,
        rules.sink_blocks,
        rules.local_blocks,
        lists.shape[-1],
        BLOCK_N=triton.next_power_of_2(call.tiling.block_size),
        SLOTS=places,
        CHUNK=16,
        HEADS=heads,
        ROWS=rows,
        REDUCE=rules.head_reduce,
        FORCED_IN_BUDGET=rules.forced_in_budget,
        num_warps=LEAF_WARPS,
        num_stages=LEAF_STAGES,
        **call.shape,
    )
