"""The (tile, block) pairs that an exact leaf scores, transposed: by block, so that a block's keys are read once for all.

A tile lists 100 to 200 candidates of 16 KiB; its scoring rows are 4 KiB. So masses are computed block by block
(kernels.route_mass): the keys stay, and the rows of the tiles that listed the block pass by.
A pair is (item, slot): a (set, tile) and a place among its candidates or, behind these, its forced blocks. A column is a
(set, window of tiles, block); pairs whose tile sees only some of the block's keys (its own block) have columns of their own,
behind all others, so that only these are masked. Transposing is a histogram, a sum and a fill: `_list` (one program = one
item) counts the pairs of each column and notes every pair's rank in it; `_open_columns` gives each column its place, cut
into work of at most PAIRS pairs; `_fill` puts every pair at place + rank. Order within a column follows the atomics and may
change from run to run; no result depends on it, since a pair's mass is computed alone. (kernels.transpose keeps the order
of tiles, for sums over them; that takes a table of all blocks for every 32 tiles, and has no windows or second columns.)
`_list` also copies the tile's rows (or its mean queries, as terms of q's dtype that add up to the fp32 mean) side by side.
Cost: 24 bytes and one atomic addition a pair, and one copy of the rows. Bound by memory: 0.1 ms a million pairs (H200).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pyramidbench.kernels.route_portions import Buffers, Portion
from pyramidbench.kernels.route_tile import forced_interval, score_row

LIST_WARPS = 4
ROW_CHUNK = tl.constexpr(16)


@triton.jit
def _copy_rows(
    q_ptr,
    rows_ptr,
    q_strides,
    tile,
    seq_len_q,
    QUERY_TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TERMS: tl.constexpr,
    IS_MEAN: tl.constexpr,
):
    """A tile's rows to rows_ptr [TERMS, GROUP·ROWS, BLOCK_D]; rows that a ragged tile lacks are 0."""
    offs_d = tl.arange(0, BLOCK_D)
    for start in range(0, GROUP * ROWS, ROW_CHUNK):
        index = start + tl.arange(0, ROW_CHUNK)
        if IS_MEAN:
            query = tile + index * 0
            is_row = index < GROUP
        else:
            query, is_row = score_row(index % ROWS, tile, QUERY_TILE, seq_len_q, ROWS)
            is_row = is_row & (index < GROUP * ROWS)
        # of shape [ROW_CHUNK, BLOCK_D]
        at = (index // ROWS).to(tl.int64) * q_strides[1] + query.to(tl.int64) * q_strides[2]
        mask = is_row[:, None] & (offs_d < HEAD_DIM)[None, :]
        rest = tl.load(q_ptr + at[:, None] + offs_d[None, :], mask=mask, other=0.0)
        for term in tl.static_range(TERMS):
            part = rest.to(rows_ptr.dtype.element_ty)
            out_at = rows_ptr + (term * GROUP * ROWS + index)[:, None] * BLOCK_D + offs_d[None, :]
            tl.store(out_at, part, mask=(index < GROUP * ROWS)[:, None])
            rest = rest - part.to(rest.dtype)


@triton.jit
def _list(
    q_ptr,
    candidates_ptr,
    candidate_count_ptr,
    rows_ptr,
    pair_column_ptr,
    pair_rank_ptr,
    column_count_ptr,
    q_strides,
    first_item,
    sets,
    tiles,
    seq_len_q,
    seq_len_kv,
    blocks,
    candidate_width,
    width,
    columns,
    windows,
    window_tiles,
    top_k,
    sink_blocks,
    local_blocks,
    GROUP: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    TERMS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    IS_MEAN: tl.constexpr,
    WITH_FORCED: tl.constexpr,
    FORCED_IN_BUDGET: tl.constexpr,
    SLOTS: tl.constexpr,
):
    local = tl.program_id(0).to(tl.int64)
    item = first_item + local
    tile = (item % tiles).to(tl.int32)
    which = item // tiles
    first, sink_end, local_start, local_end = forced_interval(
        tile, QUERY_TILE, seq_len_q, seq_len_kv, BLOCK_SIZE, sink_blocks, local_blocks, IS_CAUSAL
    )
    local_start = tl.maximum(local_start, sink_end)
    forced = sink_end + tl.maximum(local_end - local_start, 0)
    keep = top_k
    if FORCED_IN_BUDGET:
        keep = tl.maximum(top_k - forced, 0)
    found = tl.load(candidate_count_ptr + item)
    # Where nothing would be dropped nothing is scored.
    scored = tl.where(found > keep, width, 0)
    first_column = ((which - first_item // tiles).to(tl.int32) * windows + tile // window_tiles) * blocks
    for start in range(0, width, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        listed = slot < found
        block = tl.load(candidates_ptr + item * candidate_width + slot, mask=listed, other=0)
        if WITH_FORCED:
            extra = slot - found
            block = tl.where(listed, block, tl.where(extra < sink_end, extra, local_start + extra - sink_end))
            listed = extra < forced
        column = first_column + block
        if WITH_FORCED & IS_CAUSAL:
            # Keys up to the tile's first query count: none of a later block, some of its own.
            listed = listed & (block * BLOCK_SIZE <= first)
            column += tl.where((block + 1) * BLOCK_SIZE - 1 > first, columns, 0)
        listed = listed & (slot < scored)
        rank = tl.atomic_add(column_count_ptr + column, 1, mask=listed, sem="relaxed")
        pair = local * width + slot
        tl.store(pair_column_ptr + pair, tl.where(listed, column, -1), mask=slot < width)
        tl.store(pair_rank_ptr + pair, rank, mask=listed)
    if found > keep:
        _copy_rows(
            q_ptr + which // sets * q_strides[0] + which % sets * GROUP * q_strides[1],
            rows_ptr + local * TERMS * GROUP * ROWS * BLOCK_D,
            q_strides, tile, seq_len_q, QUERY_TILE, HEAD_DIM, BLOCK_D, GROUP, ROWS, TERMS, IS_MEAN,
        )  # fmt: skip


@triton.jit
def _open_columns(column_count_ptr, place_ptr, total_ptr, work_ptr, columns, PAIRS: tl.constexpr, BLOCK: tl.constexpr):
    """The first place of each column, and the work list [·, 3]: column, first and last place (exclusive)."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pairs = tl.load(column_count_ptr + column, mask=column < columns, other=0)
    pieces = tl.cdiv(pairs, PAIRS)
    place = tl.atomic_add(total_ptr, tl.sum(pairs), sem="relaxed") + tl.cumsum(pairs) - pairs
    piece = tl.atomic_add(total_ptr + 1, tl.sum(pieces), sem="relaxed") + tl.cumsum(pieces) - pieces
    tl.store(place_ptr + column, place, mask=column < columns)
    for step in range(tl.max(pieces)):
        work_at = work_ptr + (piece + step) * 3
        first = place + step * PAIRS
        tl.store(work_at, column, mask=step < pieces)
        tl.store(work_at + 1, first, mask=step < pieces)
        tl.store(work_at + 2, tl.minimum(first + PAIRS, place + pairs), mask=step < pieces)


@triton.jit
def _fill(pair_column_ptr, pair_rank_ptr, place_ptr, pair_ptr, pairs, width, slot_bits, BLOCK: tl.constexpr):
    """Each pair, as item·2^slot_bits + slot, in the order of columns."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.load(pair_column_ptr + pair, mask=pair < pairs, other=-1)
    rank = tl.load(pair_rank_ptr + pair, mask=column >= 0, other=0)
    place = tl.load(place_ptr + column, mask=column >= 0, other=0) + rank
    item = pair // width
    tl.store(pair_ptr + place, (item << slot_bits) + pair - item * width, mask=column >= 0)


def pair_up(portion: Portion, q: Tensor, to: Buffers) -> None:
    """Transpose the candidate lists of a portion. q: [B, H, M, D], or the mean queries [B, H, T, D] in fp32."""
    job, call = portion.job, portion.job.call
    rules, tiling, columns = call.rules, call.tiling, portion.columns * portion.job.banks
    slots = triton.next_power_of_2(min(256, max(32, job.width)))
    to.counts[: 4 + columns].zero_()
    _list[(portion.items,)](
        q, job.candidates, job.candidate_counts, to.rows, to.column, to.rank, to.column_count, q.stride()[:3],
        portion.first_item, call.sizes[1], *call.sizes[3:], tiling.blocks, job.candidates.shape[1], job.width,
        portion.columns, job.windows, job.window_tiles, rules.top_k, rules.sink_blocks, rules.local_blocks,
        GROUP=job.group, QUERY_TILE=tiling.query_tile, BLOCK_SIZE=tiling.block_size, HEAD_DIM=q.shape[-1],
        BLOCK_D=call.shape["BLOCK_D"], ROWS=job.rows, TERMS=job.terms, IS_CAUSAL=tiling.causal, IS_MEAN=job.is_mean,
        WITH_FORCED=job.with_forced, FORCED_IN_BUDGET=rules.forced_in_budget, SLOTS=slots,
        num_warps=LIST_WARPS if slots > 64 else 1,
    )  # fmt: skip
    _open_columns[(-(-columns // 1024),)](
        to.column_count, to.place, to.total, to.work, columns, PAIRS=job.pairs_per_work, BLOCK=1024
    )
    _fill[(-(-portion.pairs // 1024),)](
        to.column, to.rank, to.place, to.pair, portion.pairs, job.width, job.slot_bits, BLOCK=1024
    )
