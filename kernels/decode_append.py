"""Appending tokens to a cache on the GPU; `kernels.cache_append` is the torch twin.

A few tokens (a decoding step) are one launch, `_append`: one program = one sequence and key/value head. It writes the tokens,
and where these complete no block it is done: open nodes are never ranked. Up to a block's tokens complete one at most. Its keys
are summed, and then it goes up as long as a node ends with the block: a node's statistics are those of its other children,
which no token can change any more, with the last child's, which are at hand. Keys and other children of all levels are asked
for at once where launches overlap, and loaded a level ahead, a column a thread, so that no level needs a barrier. The block
is summed key by key and children in ascending order, as `kernels.pyramid_build` does, so that a cache holds what that builds,
bit for bit. With FINISH the same path is taken
from the last block to the root, whether complete or not, for whoever reads the pyramid. For rules that score blocks by their
parts, the mean of each part that the tokens complete is made from its keys. Where the cache is full nothing is written, the
length stays and a flag is set.
More tokens than a block holds go through `kernels.decode_prompt`.
Cost: mostly the tokens. One step of C reads a block's keys and (branching - 1)·levels statistics of 12·D bytes, 60 KB a head
at D 128 and 256k keys. Bound by latency: launch, length beside tokens; where a block ends, its keys and statistics.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyramidbench.kernels.cache import CacheStore
from pyramidbench.kernels.decode_launch import after_previous, ask_for, overlap
from pyramidbench.kernels.decode_place import block_start
from pyramidbench.kernels.decode_prompt import append_prompt
from pyramidbench.kernels.decode_tokens import (
    APPEND_WARPS,
    COPY_ROWS,
    append_shape,
    block_statistics,
    copy_tokens,
    store_node,
    store_parts,
)
from pyramidbench.kernels.pyramid_nodes import keys_under


@triton.jit
def _closed_children(
    stats_ptr, node, offset, has_parent, offs_d, HEAD_DIM: tl.constexpr, BRANCHING: tl.constexpr, HAS_BOUNDS: tl.constexpr
):  # fmt: skip
    """Sum, maximum and minimum, [1, BLOCK_D] each, of the children before `node` of its parent; its level begins at `offset`.

    A column is a thread's, so that levels follow each other without a barrier.
    """
    first = node // BRANCHING * BRANCHING
    stride = 3 * HEAD_DIM if HAS_BOUNDS else HEAD_DIM
    total = tl.zeros([1, offs_d.shape[0]], tl.float32)
    high = tl.full([1, offs_d.shape[0]], float("-inf"), tl.float32)
    low = tl.full([1, offs_d.shape[0]], float("inf"), tl.float32)
    for index in tl.static_range(BRANCHING - 1):
        mask = (offs_d < tl.where(has_parent & (first + index < node), HEAD_DIM, 0))[None, :]
        at = stats_ptr + (tl.zeros([], tl.int64) + offset + first + index) * stride + offs_d[None, :]
        total += tl.load(at, mask=mask, other=0.0)
        if HAS_BOUNDS:
            high = tl.maximum(high, tl.load(at + HEAD_DIM, mask=mask, other=float("-inf")))
            low = tl.minimum(low, tl.load(at + 2 * HEAD_DIM, mask=mask, other=float("inf")))
    return total, high, low


@triton.jit
def _ask_for_path(
    stats_ptr, k_at, k_stride, block, blocks, levels, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BRANCHING: tl.constexpr, LEVELS: tl.constexpr, HAS_BOUNDS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Ask for what a block that ends will need: its keys, and on every level the children before the one that holds it."""
    PER_LINE: tl.constexpr = 1024 // k_at.dtype.element_ty.primitive_bitwidth
    KEY_LINES: tl.constexpr = (BLOCK_D + PER_LINE - 1) // PER_LINE
    in_key = tl.minimum(tl.arange(0, KEY_LINES) * PER_LINE, HEAD_DIM - 1)
    for start in tl.static_range(0, BLOCK_SIZE, ROWS):
        key = tl.minimum(start + tl.arange(0, ROWS), BLOCK_SIZE - 1)
        ask_for(k_at + key[:, None] * k_stride + in_key[None, :])
    # Row l is for the parent on level l + 1.
    row = tl.arange(0, LEVELS)
    child, offset, size = row * 0 + block, row * 0, tl.full([], 0, tl.int32) + blocks
    for step in range(levels):
        child = tl.where(row > step, child // BRANCHING, child)
        offset = tl.where(row > step, offset + size, offset)
        size = tl.cdiv(size, BRANCHING)
    first = child // BRANCHING * BRANCHING
    WIDTH: tl.constexpr = 3 * HEAD_DIM if HAS_BOUNDS else HEAD_DIM
    LINES: tl.constexpr = ((4 if HAS_BOUNDS else 1) * BLOCK_D + 31) // 32
    in_node = tl.minimum(tl.arange(0, LINES) * 32, WIDTH - 1)
    for index in tl.static_range(BRANCHING - 1):
        place = tl.where((first + index < child) & (row < levels - 1), offset + first + index, 0)
        ask_for(stats_ptr + place.to(tl.int64)[:, None] * WIDTH + in_node[None, :])


@triton.jit(do_not_specialize=["at", "tokens"])
def _append(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, nodes_ptr, stats_ptr, parts_ptr, lengths_ptr, full_ptr, pages_ptr, counts_ptr,
    k_strides, v_strides, k_cache_strides, v_cache_strides, weight, at, tokens, kv_heads, max_len, blocks, levels, node_count,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BRANCHING: tl.constexpr, LEVELS: tl.constexpr, HAS_BOUNDS: tl.constexpr, IS_PAGED: tl.constexpr, HAS_COUNTS: tl.constexpr,
    PARTS: tl.constexpr, ROWS: tl.constexpr, COPY: tl.constexpr, FINISH: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    batch, head = program // kv_heads, program % kv_heads
    after_previous(OVERLAPS)
    start = tl.where(at >= 0, at, tl.load(lengths_ptr + program))
    count = tl.load(counts_ptr + batch) if HAS_COUNTS else tokens
    end = start + count
    has_room = end <= max_len
    if IS_PAGED:
        # Pages are assigned in order, so the last block's page is the last to come.
        last_block = tl.minimum(tl.maximum(end - 1, 0) // BLOCK_SIZE, blocks - 1)
        has_room = has_room & (tl.load(pages_ptr + batch * blocks + last_block) >= 0)
    stats_ptr += program * node_count * (3 * HEAD_DIM if HAS_BOUNDS else HEAD_DIM)
    block = tl.maximum(end - 1, 0) // BLOCK_SIZE if FINISH else start // BLOCK_SIZE
    ends_block = ((block + 1) * BLOCK_SIZE <= end if not FINISH else end > 0) & has_room
    if OVERLAPS and not FINISH:  # noqa: SIM102 - constants apart: what is left out is not compiled
        if ends_block:
            k_at = block_start(
                k_cache_ptr, k_cache_strides, pages_ptr, blocks, batch, head, block, BLOCK_SIZE, IS_PAGED
            )
            _ask_for_path(
                stats_ptr, k_at, k_cache_strides[2], block, blocks, levels, HEAD_DIM, BLOCK_D, BLOCK_SIZE, BRANCHING, LEVELS,
                HAS_BOUNDS, COPY,
            )  # fmt: skip
    # No branch on the room: what is read of k and v need not wait for the length.
    copy_tokens(
        k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, k_strides, v_strides, k_cache_strides, v_cache_strides, pages_ptr, blocks,
        batch, head, 0, start, tl.where(has_room, end, start), count, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_SIZE,
        IS_PAGED, COPY,
    )  # fmt: skip
    # Every warp has read the length before one changes it.
    tl.debug_barrier()
    if has_room:
        tl.store(lengths_ptr + program, end)
    else:
        tl.store(full_ptr, 1)
    if PARTS and not FINISH:
        # After the barrier above: the tokens are what other threads wrote.
        store_parts(
            parts_ptr, k_cache_ptr, k_cache_strides, pages_ptr, kv_heads, blocks, batch, head, start,
            tl.where(has_room, end, start), BLOCK_SIZE, HEAD_DIM, BLOCK_D, PARTS, IS_PAGED,
        )  # fmt: skip
    if ends_block:
        # The tokens are what other threads wrote.
        tl.debug_barrier()
        nodes_ptr += program * node_count * (2 * HEAD_DIM if HAS_BOUNDS else HEAD_DIM)
        offs_d = tl.arange(0, BLOCK_D)
        zero = tl.full([], 0, tl.int32)
        level, node, offset, size, span = zero, zero + block, zero, zero + blocks, tl.full([], BLOCK_SIZE, tl.int64)
        closed, closed_high, closed_low = _closed_children(
            stats_ptr, node, offset, level + 1 < levels, offs_d, HEAD_DIM, BRANCHING, HAS_BOUNDS
        )
        k_at = block_start(k_cache_ptr, k_cache_strides, pages_ptr, blocks, batch, head, block, BLOCK_SIZE, IS_PAGED)
        held = tl.minimum(end - block * BLOCK_SIZE, BLOCK_SIZE)
        # of shape [1, BLOCK_D]
        total, high, low = block_statistics(
            k_at, k_cache_strides[2], held, offs_d, BLOCK_SIZE, HEAD_DIM, ROWS, HAS_BOUNDS
        )
        while (level < levels) & (FINISH | ((node + 1) * span <= end)):
            # Asked for before this level's node is written: no load passes a store.
            next_closed, next_high, next_low = _closed_children(
                stats_ptr, node // BRANCHING, offset + size, level + 2 < levels, offs_d, HEAD_DIM, BRANCHING, HAS_BOUNDS
            )
            keys = keys_under(node, span, end)
            store_node(
                nodes_ptr, stats_ptr, offset + node, total, high, low, keys, weight, offs_d, HEAD_DIM, HAS_BOUNDS
            )
            total += closed
            if HAS_BOUNDS:
                high, low = tl.maximum(high, closed_high), tl.minimum(low, closed_low)
            closed, closed_high, closed_low = next_closed, next_high, next_low
            offset += size
            size = tl.cdiv(size, BRANCHING)
            node = node // BRANCHING
            span *= BRANCHING
            level += 1


def append(store: CacheStore, k: Tensor, v: Tensor, at: int | None, counts: Sequence[int] | None) -> None:
    """Write the first counts[b] (None: all) tokens of k [B, G, T, D] and v from position `at` (None: the end) on.

    Up to a block's tokens are one launch, which a CUDA graph may capture where counts is None.
    """
    device = store.k.device
    held = None if counts is None else torch.tensor(counts, dtype=torch.int32, device=device)
    if k.shape[2] <= store.sizes.block_size:
        _launch_append(store, k, v, -1 if at is None else at, held)
        return
    starts = store.lengths[:, 0].clone() if at is None else torch.full_like(store.lengths[:, 0], at)
    ends = starts + (k.shape[2] if held is None else held)
    append_prompt(store, k, v, starts, ends)
    store.lengths.copy_(ends[:, None].expand_as(store.lengths))


def finish_ends(store: CacheStore) -> None:
    """Compose the last block of every sequence and its ancestors from what is there, whether they are full or not."""
    _launch_append(store, store.k[:, :, :0], store.v[:, :, :0], -1, None, finish=True)


def _launch_append(
    store: CacheStore, k: Tensor, v: Tensor, at: int, counts: Tensor | None, *, finish: bool = False
) -> None:  # fmt: skip
    sizes = store.sizes
    overlaps = overlap(store.k.device, sizes.batch * sizes.kv_heads)
    # Read where launches overlap; elsewhere another number would be compiled for nothing.
    levels = triton.next_power_of_2(max(2, sizes.levels)) if overlaps["OVERLAPS"] else 1
    _append[(sizes.batch * sizes.kv_heads,)](
        k, v, store.k, store.v, store.nodes, store.stats, store.parts, store.lengths, store.full, store.pages, counts,
        k.stride()[:3], v.stride()[:3], store.k.stride()[:3], store.v.stride()[:3], sizes.bound_weight, at, k.shape[2],
        sizes.kv_heads, sizes.max_len, sizes.blocks, sizes.levels, sizes.offsets[-1], **append_shape(store),
        BRANCHING=sizes.branching, LEVELS=levels, HAS_COUNTS=counts is not None, COPY=COPY_ROWS, FINISH=finish,
        num_warps=APPEND_WARPS, **overlaps,
    )  # fmt: skip
