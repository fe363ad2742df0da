"""Gradient of block-sparse attention in the queries by key block, for few rows a list (token level): a first step of
`kernels.attention_bwd`, as attention_dq.py is where rows are many.

With p_ix = exp(s·q_i·k_x - lse_i) and δ_i = o_i·do_i: dq_i = Σ_b s · Σ_{x ∈ b, x ≤ p_i} p_ix·(do_i·v_x - δ_i)·k_x over the
listed blocks b. List by list, a block meets only the R = group·query_tile rows of one list; block by block it meets all that
chose it, and every product is full.
 1. `_row_stats`: δ, and lse in base 2, which dK and dV need as well. 2. transpose.py, for many windows of lists at once
 (key_windows.py). Window by window: 3. `_dq_partial`: one program = one chunk of a block's pairs after another; keys and
 values are loaded once and meet BLOCK_M rows at a time, gathered from q and do. 4. `_dq_sum`: one program = BLOCK_M rows,
 their partial gradients in the order of their lists, UNROLL in flight at once. No atomics: two runs agree bit for bit.
Partial gradients are rounded to q's dtype, as the gradients of the logits are before they meet k; sums are fp32.
Cost: 2·(2·D + Dv) operations a (row, key) pair; a (row, block) pair reads D + Dv elements, writes D and reads D. Scratch: as
attention_by_key.py. Bound by memory and by the latency of a step.
Source: FlashAttention-2 (arXiv 2307.08691), algorithm 2, in the order of its loop over keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyramidbench.kernels.attention_band import LOG2_E, load_tile
from pyramidbench.kernels.attention_dq import RowStats
from pyramidbench.kernels.key_windows import KeyWindows, Window, each_window, key_windows, longest_window
from pyramidbench.kernels.route_call import programs
from pyramidbench.kernels.transpose import Transposed
from pyramidbench.selection import BlockSelection

STATS_ROWS = 32


@triton.jit
def _row_stats(
    out_ptr, d_out_ptr, lse_ptr, log_sums_ptr, delta_ptr, out_strides, d_out_strides, rows, heads, seq_len_q,
    HEAD_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = row < rows
    query, head, batch = row % seq_len_q, row // seq_len_q % heads, row // seq_len_q // heads
    offs_dv = tl.arange(0, BLOCK_DV)
    # of shape [BLOCK_M, BLOCK_DV]
    out_at = out_ptr + batch * out_strides[0] + head * out_strides[1] + query * out_strides[2]
    out = load_tile(out_at, row_mask, offs_dv, HEAD_DIM_V)
    d_out_at = d_out_ptr + batch * d_out_strides[0] + head * d_out_strides[1] + query * d_out_strides[2]
    d_out = load_tile(d_out_at, row_mask, offs_dv, HEAD_DIM_V)
    lse = tl.load(lse_ptr + row, mask=row_mask, other=float("-inf"))
    # A row without a key: every weight is 0.
    log_sum = tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)
    tl.store(log_sums_ptr + row, log_sum, mask=row_mask)
    tl.store(delta_ptr + row, tl.sum(out.to(tl.float32) * d_out.to(tl.float32), 1), mask=row_mask)


@triton.jit
def _rows_of(
    tile, in_tile, mask, q_base, d_out_base, log_sums_base, delta_base, q_stride, d_out_stride, seq_len_q, offs_d, offs_dv,
    QUERY_TILE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
):  # fmt: skip
    """Query `in_tile` of each `tile`, from the heads' bases on: q, do, log-sum-exps and δ."""
    query = tl.minimum(tile * QUERY_TILE + in_tile, seq_len_q - 1)
    q = load_tile(q_base + query.to(tl.int64) * q_stride, mask, offs_d, HEAD_DIM)
    d_out = load_tile(d_out_base + query.to(tl.int64) * d_out_stride, mask, offs_dv, HEAD_DIM_V)
    log_sum = tl.load(log_sums_base + query, mask=mask, other=float("inf"))
    return q, d_out, log_sum, tl.load(delta_base + query, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["first_segment", "skip", "segments"])
def _dq_partial(
    q_ptr, k_ptr, v_ptr, d_out_ptr, log_sums_ptr, delta_ptr, pairs_ptr, chunks_ptr, chunk_count_ptr, partial_ptr,
    q_strides, k_strides, v_strides, d_out_strides, scale, scale_log2, first_segment, skip, segments, sets, kv_heads, runs,
    most_pairs, most_chunks, seq_len_q, seq_len_kv,
    GROUP: tl.constexpr, QUERY_TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = GROUP * QUERY_TILE
    PAIRS: tl.constexpr = BLOCK_M // ROWS
    offs_m, offs_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    offs_d, offs_dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    in_window = (tl.program_id(0) % segments).to(tl.int64)
    which = (first_segment + in_window) // runs % sets
    batch = (first_segment + in_window) // runs // sets
    # of shape [BLOCK_M]
    in_pair, in_tile = offs_m // ROWS, offs_m % ROWS % QUERY_TILE
    head = which * GROUP + offs_m % ROWS // QUERY_TILE
    q_base = q_ptr + batch * q_strides[0] + head * q_strides[1]
    d_out_base = d_out_ptr + batch * d_out_strides[0] + head * d_out_strides[1]
    stats_row = (batch * sets * GROUP + head) * seq_len_q
    log_sums_base, delta_base = log_sums_ptr + stats_row, delta_ptr + stats_row
    k_base = k_ptr + batch * k_strides[0] + which * kv_heads // sets * k_strides[1]
    v_base = v_ptr + batch * v_strides[0] + which * kv_heads // sets * v_strides[1]
    pairs_ptr += (skip + in_window) * most_pairs
    chunks_ptr += (skip + in_window) * most_chunks * 3
    chunk_count = tl.load(chunk_count_ptr + skip + in_window)
    for chunk in range(tl.program_id(0) // segments, chunk_count, tl.num_programs(0) // segments):
        at = chunks_ptr + chunk * 3
        block, first, end = tl.load(at), tl.load(at + 1), tl.load(at + 2)
        key = block * BLOCK_SIZE + offs_n
        inside = (offs_n < BLOCK_SIZE) & (key < seq_len_kv)
        k = load_tile(k_base + key.to(tl.int64) * k_strides[2], inside, offs_d, HEAD_DIM)
        v = load_tile(v_base + key.to(tl.int64) * v_strides[2], inside, offs_dv, HEAD_DIM_V)
        # A chunk's first tile is its lowest: where that sees every key, no row needs a mask.
        masked = (BLOCK_SIZE < BLOCK_N) | ((block + 1) * BLOCK_SIZE > seq_len_kv)
        if IS_CAUSAL:
            lowest = tl.load(pairs_ptr + first) * QUERY_TILE + seq_len_kv - seq_len_q
            masked = masked | ((block + 1) * BLOCK_SIZE - 1 > lowest)
        # The next step's rows are on their way, and the tiles of the step after it, while this step computes.
        mask = in_pair < end - first
        tile = tl.load(pairs_ptr + first + in_pair, mask=mask, other=0)
        q, d_out, log_sum, delta = _rows_of(
            tile, in_tile, mask, q_base, d_out_base, log_sums_base, delta_base, q_strides[2], d_out_strides[2], seq_len_q,
            offs_d, offs_dv, QUERY_TILE, HEAD_DIM, HEAD_DIM_V,
        )  # fmt: skip
        tile = tl.load(pairs_ptr + first + PAIRS + in_pair, mask=in_pair < end - first - PAIRS, other=0)
        for pair in range(first, end, PAIRS):
            left = end - pair - PAIRS
            next_q, next_d_out, next_log_sum, next_delta = _rows_of(
                tile, in_tile, in_pair < left, q_base, d_out_base, log_sums_base, delta_base, q_strides[2],
                d_out_strides[2], seq_len_q, offs_d, offs_dv, QUERY_TILE, HEAD_DIM, HEAD_DIM_V,
            )  # fmt: skip
            tile = tl.load(pairs_ptr + pair + 2 * PAIRS + in_pair, mask=in_pair < left - PAIRS, other=0)
            # of shape [BLOCK_M, BLOCK_N]
            weights = tl.exp2(tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2 - log_sum[:, None])
            d_scores = weights * (tl.dot(d_out, tl.trans(v), input_precision="ieee") - delta[:, None])
            if masked:
                seen = inside[None, :]
                if IS_CAUSAL:
                    here = tl.load(pairs_ptr + pair + in_pair, mask=in_pair < end - pair, other=0)
                    position = here * QUERY_TILE + in_tile + seq_len_kv - seq_len_q
                    seen = seen & (key[None, :] <= position[:, None])
                d_scores = tl.where(seen, d_scores, 0.0)
            # of shape [BLOCK_M, BLOCK_D]
            dq = tl.dot(d_scores.to(k.dtype), k, input_precision="ieee") * scale
            # One pair's rows after another's: the addresses differ from step to step by one number.
            row = (in_window * most_pairs + pair) * ROWS
            dq_at = partial_ptr + row * HEAD_DIM + (offs_m[:, None] * HEAD_DIM + offs_d[None, :])
            mask_m = (in_pair < end - pair) & (offs_m < PAIRS * ROWS)
            tl.store(dq_at, dq.to(partial_ptr.dtype.element_ty), mask=mask_m[:, None] & (offs_d < HEAD_DIM)[None, :])
            q, d_out, log_sum, delta = next_q, next_d_out, next_log_sum, next_delta


@triton.jit(do_not_specialize=["first_segment", "skip"])
def _dq_sum(
    partial_ptr, places_ptr, counts_ptr, dq_ptr, first_segment, skip, tiles, run, width, seq_len_q,
    GROUP: tl.constexpr, QUERY_TILE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, UNROLL: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = GROUP * QUERY_TILE
    parts = tl.cdiv(run * ROWS, BLOCK_M)
    program = tl.program_id(0).to(tl.int64)
    in_window = program // parts
    segment = first_segment + in_window
    runs = tl.cdiv(tiles, run)
    offs_d = tl.arange(0, BLOCK_D)

    # of shape [BLOCK_M]
    row = (program % parts).to(tl.int32) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_run = row // ROWS
    tile = (segment % runs).to(tl.int32) * run + in_run
    query = tile * QUERY_TILE + row % QUERY_TILE
    real = (in_run < run) & (tile < tiles) & (query < seq_len_q)
    count = tl.load(counts_ptr + segment // runs * tiles + tile, mask=real, other=0)
    places_ptr += ((skip + in_window) * run + in_run) * width
    partial_ptr += in_window * run * width * ROWS * HEAD_DIM
    # of shape [BLOCK_M, BLOCK_D]
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(0, tl.max(count), UNROLL):
        for step in tl.static_range(UNROLL):
            mask = start + step < count
            at = tl.load(places_ptr + (start + step), mask=mask, other=0) * ROWS + row % ROWS
            part = load_tile(partial_ptr + at * HEAD_DIM, mask, offs_d, HEAD_DIM)
            acc += part.to(tl.float32)
    dq_row = (segment // runs * GROUP + row % ROWS // QUERY_TILE) * seq_len_q + query
    dq_at = dq_ptr + dq_row[:, None] * HEAD_DIM + offs_d[None, :]
    tl.store(dq_at, acc.to(dq_ptr.dtype.element_ty), mask=real[:, None] & (offs_d < HEAD_DIM)[None, :])


@dataclass(frozen=True)
class GradientTile:
    """Rows of a matrix product, launch shape and registers of `_dq_partial`; rows of a chunk, its programs per multiprocessor;
    rows, warps and slots in flight of `_dq_sum`; lists of a window."""

    BLOCK_M: int = 64
    num_warps: int = 4
    num_stages: int = 2
    registers: int = 255
    chunk_rows: int = 1024
    per_sm: int = 2
    sum_rows: int = 4
    sum_warps: int = 1
    sum_slots: int = 8
    window: int = 16384


def gradient_tile(rows: int, width: int, blocks: int, head_dim: int, head_dim_v: int, itemsize: int) -> GradientTile:
    """Tile sizes for lists of `width` of `blocks` blocks, shared by `rows` rows."""
    window = longest_window(width, rows * head_dim * itemsize, blocks)
    widest = max(head_dim, head_dim_v)
    if itemsize == 4:
        # fp32 products run on the vector units; more rows spill.
        return GradientTile(16, 8, 1, per_sm=1, window=window)
    if widest > 128:
        return GradientTile(num_warps=8, num_stages=1, per_sm=1, window=window)
    return GradientTile(window=window)


def run_row_stats(out: Tensor, d_out: Tensor, lse: Tensor) -> RowStats:
    """The rows' statistics. out, d_out [B, H, M, Dv]; lse: log-sum-exps [B, H, M], contiguous."""
    _, heads, seq_len_q, head_dim_v = out.shape
    stats = RowStats(torch.empty_like(lse), torch.empty_like(lse))
    _row_stats[(triton.cdiv(lse.numel(), STATS_ROWS),)](
        out, d_out, lse, *stats, out.stride()[:3], d_out.stride()[:3], lse.numel(), heads, seq_len_q,
        HEAD_DIM_V=head_dim_v, BLOCK_M=STATS_ROWS, BLOCK_DV=max(16, triton.next_power_of_2(head_dim_v)),
    )  # fmt: skip
    return stats


def _run_partial(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor], stats: RowStats, by_block: Transposed, room: Tensor, window: Window,
    windows: KeyWindows, selection: BlockSelection, scale: float, tile: GradientTile,
) -> None:  # fmt: skip
    """Write a window's partial gradients. tensors: q, k, v, d_out."""
    q, k, v, _ = tensors
    sets = selection.indices.shape[1]
    assert q.shape[1] // sets * selection.query_tile <= tile.BLOCK_M, "a list's rows must fit a product"
    most_pairs, most_chunks = by_block.pairs.shape[1], by_block.chunks.shape[1]
    each = max(1, programs(window.segments * most_chunks, q.device, tile.per_sm) // window.segments)
    block_n, block_d, block_dv = (
        max(16, triton.next_power_of_2(size)) for size in (selection.block_size, q.shape[3], v.shape[3])
    )
    _dq_partial[(window.segments * each,)](
        *tensors, *stats, by_block.pairs, by_block.chunks, by_block.chunk_counts, room,
        *(tensor.stride()[:3] for tensor in tensors), scale, scale * LOG2_E, window.first, window.skip, window.segments,
        sets, k.shape[1], windows.cut.runs, most_pairs, most_chunks, selection.seq_len_q, selection.seq_len_kv,
        GROUP=q.shape[1] // sets, QUERY_TILE=selection.query_tile, BLOCK_SIZE=selection.block_size, HEAD_DIM=q.shape[3],
        HEAD_DIM_V=v.shape[3], BLOCK_M=tile.BLOCK_M, BLOCK_N=block_n, BLOCK_D=block_d, BLOCK_DV=block_dv,
        IS_CAUSAL=selection.causal, num_warps=tile.num_warps, num_stages=tile.num_stages, maxnreg=tile.registers,
    )  # fmt: skip


def run_dq_by_key(
    inputs: tuple[Tensor, Tensor, Tensor], outputs: tuple[Tensor, Tensor, Tensor], lists: tuple[Tensor, Tensor],
    selection: BlockSelection, scale: float, tile: GradientTile,
) -> tuple[Tensor, RowStats]:  # fmt: skip
    """`attention_dq.run_dq`, block by block: dq [B, H, M, D] in q's dtype, and the rows' statistics."""
    (q, k, v), (out, d_out, lse), (indices, counts) = inputs, outputs, lists
    (batch, heads, seq_len_q, head_dim), (sets, tiles, width) = q.shape, indices.shape[1:]
    stats = run_row_stats(out, d_out, lse)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    rows, blocks = heads // sets * selection.query_tile, selection.tiling.blocks
    windows = key_windows(batch * sets, tiles, blocks, tile.window)
    most = windows.lists * width * rows
    assert most * head_dim < 2**31, "places in a window's partial gradients must fit int32"
    room = torch.empty(most, head_dim, dtype=q.dtype, device=q.device)
    slots = (indices, torch.zeros_like(counts), counts)
    for by_block, window in each_window(windows, slots, blocks, max(1, tile.chunk_rows // rows)):
        _run_partial((q, k, v, d_out), stats, by_block, room, window, windows, selection, scale, tile)
        grid = (window.segments * triton.cdiv(windows.cut.run * rows, tile.sum_rows),)
        _dq_sum[grid](
            room, by_block.places, counts, dq, window.first, window.skip, tiles, windows.cut.run, width, seq_len_q,
            GROUP=heads // sets, QUERY_TILE=selection.query_tile, HEAD_DIM=head_dim, BLOCK_M=tile.sum_rows,
            UNROLL=tile.sum_slots, BLOCK_D=max(16, triton.next_power_of_2(head_dim)), num_warps=tile.sum_warps,
        )  # fmt: skip
    return dq, stats
