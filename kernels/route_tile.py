"""Geometry of a tile inside kernels: its forced blocks, its scoring rows, and its final list."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def forced_interval(
    tile, QUERY_TILE, seq_len_q, seq_len_kv, BLOCK_SIZE, sink_blocks, local_blocks, IS_CAUSAL: tl.constexpr
):
    """(first position, sink_end, local_start, local_end) of a tile: kernels' form of `Tiling.forced`."""
    offset = seq_len_kv - seq_len_q
    first = tile * QUERY_TILE + offset
    if IS_CAUSAL:
        last = tl.minimum((tile + 1) * QUERY_TILE, seq_len_q) - 1 + offset
        end = tl.where(last < 0, 0, tl.maximum(last, 0) // BLOCK_SIZE + 1)
        # Before the first key the floor is below zero, and so is what the clamp sees.
        start = tl.where(first < 0, 0, tl.maximum(tl.maximum(first, 0) // BLOCK_SIZE - local_blocks + 1, 0))
        start = tl.minimum(start, end)
        sink_end = tl.minimum(end, sink_blocks)
    else:
        sink_end = tl.minimum(sink_blocks, tl.cdiv(seq_len_kv, BLOCK_SIZE)) + tile * 0
        start = sink_end * 0
        end = start
    return first, sink_end, start, end


@triton.jit
def rankable_blocks(
    tile, QUERY_TILE, seq_len_q, seq_len_kv, BLOCK_SIZE, sink_blocks, local_blocks, IS_CAUSAL: tl.constexpr
):
    """(end of the blocks that may be ranked, sink_end, local_start past the sinks, number of forced blocks) of a tile."""
    first, sink_end, local_start, local_end = forced_interval(
        tile, QUERY_TILE, seq_len_q, seq_len_kv, BLOCK_SIZE, sink_blocks, local_blocks, IS_CAUSAL
    )
    complete = tl.cdiv(seq_len_kv, BLOCK_SIZE) + tile * 0
    if IS_CAUSAL:
        # Leaves before `complete` lie before every local block and are whole for the tile.
        complete = tl.minimum(tl.maximum(first + 1, 0) // BLOCK_SIZE, local_start)
    local_start = tl.maximum(local_start, sink_end)
    return complete, sink_end, local_start, sink_end + tl.maximum(local_end - local_start, 0)


@triton.jit
def score_row(row, tile, QUERY_TILE, seq_len_q, ROWS: tl.constexpr):
    """Query numbers of a tile's evenly spaced rows, and which of the places `row` hold one."""
    first = tile * QUERY_TILE
    held = tl.minimum(seq_len_q - first, QUERY_TILE)
    spaced = tl.minimum(held, ROWS)
    return first + ((2 * row + 1) * held) // (2 * spaced), row < spaced


@triton.jit
def write_list(row_ptr, block, chosen, sink_end, local_start, forced, out_width):
    """Merge the chosen blocks [n] with the forced ones into one ascending list, padded with -1; returns its length.

    Sinks [0, sink_end) come before every chosen block, local blocks from local_start (not below sink_end) on after.
    """
    kept = tl.sum(chosen.to(tl.int32))
    tl.store(row_ptr + sink_end + tl.cumsum(chosen.to(tl.int32)) - 1, block, mask=chosen)
    for start in range(0, out_width, block.shape[0]):
        place = start + tl.arange(0, block.shape[0])
        value = tl.where(place < sink_end, place, place - kept - sink_end + local_start)
        value = tl.where(place < forced + kept, value, -1)
        edge = (place < sink_end) | (place >= sink_end + kept)
        tl.store(row_ptr + place, value, mask=edge & (place < out_width))
    return forced + kept


@triton.jit
def write_choice(
    row_ptr, count_ptr, node, chosen, order, kept, sink_end, local_start, forced, out_width, WITH_FORCED: tl.constexpr
):
    """A tile's chosen nodes into its row (`order`: their running number), with its forced blocks if these are wanted."""
    if WITH_FORCED:
        length = write_list(row_ptr, node, chosen, sink_end, local_start, forced, out_width)
        tl.store(count_ptr, length)
    else:
        tl.store(row_ptr + order - 1, node, mask=chosen)
        tl.store(count_ptr, kept)
