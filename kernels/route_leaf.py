"""The scored leaf of the walk on the GPU: the best K of each tile's candidates by the log-mass of their keys (or parts).

For a row i and a block: S_i = logsumexp over the block's keys x of s·q_i·k_x. Rows and heads join by one of
sum_prob: Σ_i exp(S_i - Z_i), Z_i = logsumexp of S_i over the candidates and the forced blocks (their keys up to the
tile's first query);
sum_lse: Σ_h logsumexp over the head's rows; lse: logsumexp over all. (kernels.scores is the torch twin.)
Three steps: the (tile, block) pairs are transposed (kernels.route_pairs), their masses computed block by block
(kernels.route_mass), and `_leaf` joins a tile's masses and writes its best K and its forced blocks in ascending order.
With a mean query a tile has one row a head. Items go in portions, so that masses and lists stay within PORTION_BYTES.
Tiling of `_leaf`: one program = one (set, tile); its candidates' masses [SLOTS, CHUNK rows] pass through registers once.
Cost: see route_mass for the arithmetic; `_leaf` reads 4 bytes a candidate and row from memory.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pyramidbench.kernels.pooled_queries import mean_queries, sub_block_means
from pyramidbench.kernels.route_call import Call
from pyramidbench.kernels.route_mass import masses
from pyramidbench.kernels.route_pairs import pair_up
from pyramidbench.kernels.route_portions import Buffers, Job
from pyramidbench.kernels.route_tile import forced_interval, write_list
from pyramidbench.kernels.top_k import best

LEAF_WARPS = 1
LEAF_ELEMENTS = 2048
"""Masses that one program of `_leaf` holds at a time: 64 registers a thread of one warp."""


@triton.jit
def _leaf(
    candidates_ptr,
    candidate_count_ptr,
    mass_ptr,
    out_ptr,
    count_ptr,
    first_item,
    tiles,
    seq_len_q,
    seq_len_kv,
    candidate_width,
    width,
    top_k,
    sink_blocks,
    local_blocks,
    out_width,
    GROUP: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    FORCED_SLOTS: tl.constexpr,
    CHUNK: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    REDUCE: tl.constexpr,
    FORCED_IN_BUDGET: tl.constexpr,
):
    local = tl.program_id(0).to(tl.int64)
    item = first_item + local
    tile = (item % tiles).to(tl.int32)
    first, sink_end, local_start, local_end = forced_interval(
        tile, QUERY_TILE, seq_len_q, seq_len_kv, BLOCK_SIZE, sink_blocks, local_blocks, IS_CAUSAL
    )
    local_start = tl.maximum(local_start, sink_end)
    forced = sink_end + tl.maximum(local_end - local_start, 0)
    keep = top_k
    if FORCED_IN_BUDGET:
        keep = tl.maximum(top_k - forced, 0)
    found = tl.load(candidate_count_ptr + item)
    slot = tl.arange(0, SLOTS)
    chosen = slot < found
    block = tl.load(candidates_ptr + item * candidate_width + slot, mask=chosen, other=-1)
    if found > keep:
        extra = tl.arange(0, FORCED_SLOTS)
        is_scored = extra < forced
        if IS_CAUSAL:
            extra_block = tl.where(extra < sink_end, extra, local_start + extra - sink_end)
            is_scored = is_scored & (extra_block * BLOCK_SIZE <= first)
        rows = tl.minimum(tl.minimum(seq_len_q - tile * QUERY_TILE, QUERY_TILE), ROWS)
        mass_ptr += local * width * (GROUP * ROWS)
        score = tl.zeros([SLOTS], tl.float32)
        top = tl.full([SLOTS], float("-inf"), tl.float32)
        total = tl.zeros([SLOTS], tl.float32)
        for head in range(GROUP):
            for start in range(0, ROWS, CHUNK):
                row = start + tl.arange(0, CHUNK)
                is_row = row < rows
                # of shape [SLOTS, CHUNK]
                at = mass_ptr + slot[:, None] * (GROUP * ROWS) + (head * ROWS + row)[None, :]
                mass = tl.load(at, mask=chosen[:, None] & is_row[None, :], other=float("-inf"))
                if REDUCE == "sum_prob":
                    # of shape [FORCED_SLOTS, CHUNK]
                    at = mass_ptr + (found + extra)[:, None] * (GROUP * ROWS) + (head * ROWS + row)[None, :]
                    other = tl.load(at, mask=is_scored[:, None] & is_row[None, :], other=float("-inf"))
                    highest = tl.maximum(tl.max(mass, 0), tl.max(other, 0))
                    highest = tl.where(highest == float("-inf"), 0.0, highest)[None, :]
                    mass = tl.exp(mass - highest)
                    normaliser = tl.sum(mass, 0) + tl.sum(tl.exp(other - highest), 0)
                    # A row without any mass (a NaN query) makes the tile's scores NaN, as in the twin.
                    share = tl.where(normaliser > 0, 1.0 / tl.where(normaliser > 0, normaliser, 1.0), float("nan"))
                    score += tl.sum(mass * tl.where(is_row, share, 0.0)[None, :], 1)
                else:
                    new = tl.maximum(top, tl.max(mass, 1))
                    shift = tl.where(new == float("-inf"), 0.0, new)
                    total = total * tl.exp(top - shift) + tl.sum(tl.exp(mass - shift[:, None]), 1)
                    top = new
            if REDUCE == "sum_lse":
                score += top + tl.log(tl.where(total > 0, total, 1.0))
                top = tl.full([SLOTS], float("-inf"), tl.float32)
                total = tl.zeros([SLOTS], tl.float32)
        if (REDUCE == "lse") | (REDUCE == "none"):
            score = top + tl.log(tl.where(total > 0, total, 1.0))
        chosen = best(score, chosen, keep)
    length = write_list(out_ptr + item * out_width, block, chosen, sink_end, local_start, forced, out_width)
    tl.store(count_ptr + item, length)


def run_leaf(
    call: Call, k: Tensor, candidates: Tensor, candidate_counts: Tensor, lists: Tensor, counts: Tensor
) -> None:
    """Of each tile's candidates, the best K by leaf score, and the forced blocks, into `lists`."""
    rules = call.rules
    job = Job(call, candidates, candidate_counts)
    q = mean_queries(call.q, call.tiling) if job.is_mean else call.q
    if rules.leaf_score == "sub":
        k = sub_block_means(k, block_size=call.tiling.block_size, parts=rules.sub_blocks)
    places = triton.next_power_of_2(max(16, candidates.shape[1]))
    portions = list(job.portions())
    buffers = Buffers.of(job, portions)
    for portion in portions:
        pair_up(portion, q, buffers)
        masses(portion, k, buffers)
        _leaf[(portion.items,)](
            candidates, candidate_counts, buffers.mass, lists, counts, portion.first_item, *call.sizes[3:],
            candidates.shape[1], job.width, rules.top_k, rules.sink_blocks, rules.local_blocks, lists.shape[-1],
            GROUP=job.group, QUERY_TILE=call.tiling.query_tile, BLOCK_SIZE=call.tiling.block_size, ROWS=job.rows,
            SLOTS=places, FORCED_SLOTS=triton.next_power_of_2(max(1, job.forced_width)),
            CHUNK=max(1, min(triton.next_power_of_2(job.rows), LEAF_ELEMENTS // places)),
            IS_CAUSAL=call.tiling.causal, REDUCE=rules.head_reduce, FORCED_IN_BUDGET=rules.forced_in_budget,
            num_warps=max(LEAF_WARPS, min(8, places // 512)),
        )  # fmt: skip
