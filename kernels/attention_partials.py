"""Attention to the blocks of lists' middles, block by block, and its sum: two steps of `kernels.attention_by_key`.

For row i and each block b of its list's middle: o_ib = softmax over the block's keys x ≤ p_i of s·q_i·k_x, times v, and
lse_ib; then o_i = Σ_b exp(lse_ib - lse_i)·o_ib, where the band is one more part.
`_partial`: one program = one chunk of a block's pairs after another; keys and values are loaded once and meet BLOCK_M rows
at a time, gathered from q; partial outputs are written in the order of the pairs, so one after the other.
`_combine`: one program = BLOCK_M rows; first their log-sum-exps, then their partial outputs, UNROLL slots in flight at once.
Partial outputs are normalised, so they lie within v's range, and are rounded to q's dtype; maxima, sums and log-sum-exps
(base 2 between the two kernels) are fp32.
Cost: 2·(D + Dv) operations a (row, key) pair; a (row, block) pair reads D elements of q, writes Dv and reads Dv.
`_combine` is bound by memory, `_partial` by the latency of its steps: gather, product, softmax, product, store.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyramidbench.kernels.attention_band import LOG2_E, load_tile
from pyramidbench.kernels.key_windows import Window
from pyramidbench.kernels.route_call import programs
from pyramidbench.kernels.transpose import Cut, Transposed
from pyramidbench.selection import BlockSelection

LSE_SLOTS = 16


@triton.jit
def _gather(
    head_base, stride, tile, in_tile, mask, seq_len_q, offs_d, QUERY_TILE: tl.constexpr, HEAD_DIM: tl.constexpr
):  # fmt: skip
    """Rows [BLOCK_M, BLOCK_D] of q: query `in_tile` of each `tile`, from the heads' bases on."""
    query = tl.minimum(tile * QUERY_TILE + in_tile, seq_len_q - 1)
    return load_tile(head_base + query.to(tl.int64) * stride, mask, offs_d, HEAD_DIM)


@triton.jit(do_not_specialize=["first_segment", "skip", "segments"])
def _partial(
    q_ptr, k_ptr, v_ptr, pairs_ptr, chunks_ptr, chunk_count_ptr, partial_ptr, partial_lse_ptr,
    q_strides, k_strides, v_strides, scale_log2, first_segment, skip, segments, sets, kv_heads, runs, most_pairs,
    most_chunks, seq_len_q, seq_len_kv,
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
    head_base = q_ptr + batch * q_strides[0] + head * q_strides[1]
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
        k = tl.trans(load_tile(k_base + key.to(tl.int64) * k_strides[2], inside, offs_d, HEAD_DIM))
        v = load_tile(v_base + key.to(tl.int64) * v_strides[2], inside, offs_dv, HEAD_DIM_V)
        # A chunk's first tile is its lowest: where that sees every key, no row needs a mask.
        masked = (BLOCK_SIZE < BLOCK_N) | ((block + 1) * BLOCK_SIZE > seq_len_kv)
        if IS_CAUSAL:
            lowest = tl.load(pairs_ptr + first) * QUERY_TILE + seq_len_kv - seq_len_q
            masked = masked | ((block + 1) * BLOCK_SIZE - 1 > lowest)
        # The next step's rows are on their way, and the tiles of the step after it, while this step computes.
        mask = in_pair < end - first
        tile = tl.load(pairs_ptr + first + in_pair, mask=mask, other=0)
        q = _gather(head_base, q_strides[2], tile, in_tile, mask, seq_len_q, offs_d, QUERY_TILE, HEAD_DIM)
        tile = tl.load(pairs_ptr + first + PAIRS + in_pair, mask=in_pair < end - first - PAIRS, other=0)
        for pair in range(first, end, PAIRS):
            left = end - pair - PAIRS
            mask = in_pair < left
            next_q = _gather(head_base, q_strides[2], tile, in_tile, mask, seq_len_q, offs_d, QUERY_TILE, HEAD_DIM)
            tile = tl.load(pairs_ptr + pair + 2 * PAIRS + in_pair, mask=in_pair < left - PAIRS, other=0)
            # of shape [BLOCK_M, BLOCK_N]
            scores = tl.dot(q, k, input_precision="ieee")
            q = next_q
            if masked:
                seen = inside[None, :]
                if IS_CAUSAL:
                    here = tl.load(pairs_ptr + pair + in_pair, mask=in_pair < end - pair, other=0)
                    position = here * QUERY_TILE + in_tile + seq_len_kv - seq_len_q
                    seen = seen & (key[None, :] <= position[:, None])
                scores = tl.where(seen, scores, float("-inf"))
            row_max = tl.max(scores, 1) * scale_log2
            shift = tl.where(row_max == float("-inf"), 0.0, row_max)
            weights = tl.exp2(scores * scale_log2 - shift[:, None])
            row_sum = tl.sum(weights, 1)
            acc = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            seen_any = row_sum > 0
            row_sum = tl.where(seen_any, row_sum, 1.0)
            out = (acc * (1.0 / row_sum)[:, None]).to(partial_ptr.dtype.element_ty)
            # One pair's rows after another's: the addresses differ from step to step by one number.
            row = (in_window * most_pairs + pair) * ROWS
            out_at = partial_ptr + row * HEAD_DIM_V + (offs_m[:, None] * HEAD_DIM_V + offs_dv[None, :])
            mask_m = (in_pair < end - pair) & (offs_m < PAIRS * ROWS)
            tl.store(out_at, out, mask=mask_m[:, None] & (offs_dv < HEAD_DIM_V)[None, :])
            lse = tl.where(seen_any, row_max + tl.log2(row_sum), float("-inf"))
            tl.store(partial_lse_ptr + row + offs_m, lse, mask=mask_m)


@triton.jit(do_not_specialize=["first_segment", "skip"])
def _combine(
    partial_ptr, partial_lse_ptr, places_ptr, begin_ptr, end_ptr, out_ptr, lse_ptr,
    first_segment, skip, tiles, run, width, seq_len_q,
    GROUP: tl.constexpr, QUERY_TILE: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, SLOTS: tl.constexpr,
    UNROLL: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = GROUP * QUERY_TILE
    parts = tl.cdiv(run * ROWS, BLOCK_M)
    program = tl.program_id(0).to(tl.int64)
    in_window = program // parts
    segment = first_segment + in_window
    runs = tl.cdiv(tiles, run)
    offs_dv = tl.arange(0, BLOCK_DV)
    dv_mask = offs_dv < HEAD_DIM_V

    # of shape [BLOCK_M]
    row = (program % parts).to(tl.int32) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_run = row // ROWS
    tile = (segment % runs).to(tl.int32) * run + in_run
    query = tile * QUERY_TILE + row % QUERY_TILE
    real = (in_run < run) & (tile < tiles) & (query < seq_len_q)
    begin = tl.load(begin_ptr + segment // runs * tiles + tile, mask=real, other=2147483647)
    end = tl.load(end_ptr + segment // runs * tiles + tile, mask=real, other=0)
    places_ptr += ((skip + in_window) * run + in_run) * width
    partial_ptr += in_window * run * width * ROWS * HEAD_DIM_V
    partial_lse_ptr += in_window * run * width * ROWS
    out_row = (segment // runs * GROUP + row % ROWS // QUERY_TILE) * seq_len_q + query
    first, last = tl.min(begin), tl.max(end)

    # The band's log-sum-exp, which is in the output, and the others'.
    top = tl.load(lse_ptr + out_row, mask=real, other=float("-inf")) * 1.4426950408889634
    total = tl.where(top > float("-inf"), 1.0, 0.0)
    for start in range(first, last, SLOTS):
        # of shape [BLOCK_M, SLOTS]
        slot = start + tl.arange(0, SLOTS)[None, :]
        mask = (slot >= begin[:, None]) & (slot < end[:, None])
        at = tl.load(places_ptr[:, None] + slot, mask=mask, other=0) * ROWS + (row % ROWS)[:, None]
        lse = tl.load(partial_lse_ptr + at, mask=mask, other=float("-inf"))
        new = tl.maximum(top, tl.max(lse, 1))
        shift = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp2(top - shift) + tl.sum(tl.exp2(lse - shift[:, None]), 1)
        top = new
    empty = total == 0
    top = tl.where(empty, 0.0, top + tl.log2(tl.where(empty, 1.0, total)))

    # of shape [BLOCK_M, BLOCK_DV]
    out_at = out_ptr + out_row[:, None] * HEAD_DIM_V + offs_dv[None, :]
    out_mask = real[:, None] & dv_mask[None, :]
    weight = tl.exp2(tl.load(lse_ptr + out_row, mask=real, other=float("-inf")) * 1.4426950408889634 - top)
    acc = tl.load(out_at, mask=out_mask, other=0.0).to(tl.float32) * weight[:, None]
    for start in range(first, last, UNROLL):
        for step in tl.static_range(UNROLL):
            mask = (start + step >= begin) & (start + step < end)
            at = tl.load(places_ptr + (start + step), mask=mask, other=0) * ROWS + row % ROWS
            weight = tl.exp2(tl.load(partial_lse_ptr + at, mask=mask, other=float("-inf")) - top)
            part_at = partial_ptr + (at[:, None] * HEAD_DIM_V + offs_dv[None, :])
            part = tl.load(part_at, mask=mask[:, None] & dv_mask[None, :], other=0.0)
            acc += part.to(tl.float32) * weight[:, None]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=out_mask)
    tl.store(lse_ptr + out_row, tl.where(empty, float("-inf"), top * 0.6931471805599453), mask=real)


@dataclass(frozen=True)
class Partials:
    """Scratch of one window: outputs [pairs·rows, Dv] in q's dtype, log-sum-exps (base 2) [pairs·rows] in fp32."""

    outputs: Tensor
    log_sums: Tensor


def partials_room(pairs: int, rows: int, like: Tensor, head_dim_v: int) -> Partials:
    """Room for `pairs` pairs of `rows` rows each."""
    assert pairs * rows * head_dim_v < 2**31, "places in a window's partial outputs must fit int32"
    outputs = torch.empty(pairs * rows, head_dim_v, dtype=like.dtype, device=like.device)
    return Partials(outputs, torch.empty(pairs * rows, dtype=torch.float32, device=like.device))


def run_partials(
    tensors: tuple[Tensor, Tensor, Tensor], by_block: Transposed, room: Partials, window: Window, cut: Cut,
    selection: BlockSelection, scale: float, per_sm: int, shape: dict[str, int | bool],
) -> None:  # fmt: skip
    """Write the partial outputs of a window. tensors: q, k, v; shape: the constants and launch shape of `_partial`."""
    q, k, _ = tensors
    most_pairs, most_chunks = by_block.pairs.shape[1], by_block.chunks.shape[1]
    assert int(shape["GROUP"]) * selection.query_tile <= int(shape["BLOCK_M"]), "a list's rows must fit a product"
    each = max(1, programs(window.segments * most_chunks, q.device, per_sm) // window.segments)
    _partial[(window.segments * each,)](
        *tensors, by_block.pairs, by_block.chunks, by_block.chunk_counts, room.outputs, room.log_sums,
        *(tensor.stride()[:3] for tensor in tensors), scale * LOG2_E, window.first, window.skip, window.segments,
        selection.indices.shape[1], k.shape[1], cut.runs, most_pairs, most_chunks, selection.seq_len_q,
        selection.seq_len_kv, **shape,
    )  # fmt: skip


def run_combine(
    room: Partials, places: Tensor, bounds: tuple[Tensor, Tensor], results: tuple[Tensor, Tensor], window: Window, cut: Cut,
    shape: dict[str, int],
) -> None:  # fmt: skip
    """Add a window's partial outputs to the bands', which `results` (output, log-sum-exp) hold. bounds: begins, ends;
    shape: the constants and launch shape of `_combine`."""
    grid = (window.segments * triton.cdiv(cut.run * shape["GROUP"] * shape["QUERY_TILE"], shape["BLOCK_M"]),)
    _combine[grid](
        room.outputs, room.log_sums, places, *bounds, *results, window.first, window.skip, cut.tiles, cut.run,
        places.shape[-1], results[0].shape[2], **shape, SLOTS=LSE_SLOTS,
    )  # fmt: skip
