"""Appending tokens to a cache on the GPU; `kernels.cache_append` is the torch twin.

A few tokens (a decoding step) are one launch, `_append`: one program = one sequence and key/value head. It writes the tokens,
and where these complete no block it is done: open nodes are never ranked. Up to a block's tokens complete one at most. Its keys
are summed, and then it goes up as long as a node ends with the block: a node's statistics are those of its other children,
which no token can change any more, with the last child's, which are at hand. The other children of all levels are loaded
at once, so the path costs one latency and not one a level. The block is summed key by key and children in ascending order,
as `kernels.pyramid_build` does, so that a cache holds what that builds, bit for bit. With FINISH the same path is taken
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
from pyramidbench.kernels.decode_launch import after_previous, overlap
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
    stats_ptr, block, blocks, levels, offs_d, HEAD_DIM: tl.constexpr, BRANCHING: tl.constexpr, LEVELS: tl.constexpr,
    HAS_BOUNDS: tl.constexpr,
):  # fmt: skip
    """Of each level, sum, maximum and minimum of the children before the one that holds `block`: [LEVELS, BLOCK_D] each.

    Row l belongs to the parent on level l + 1.
    """
    row = tl.arange(0, LEVELS)
    child, offset, size = row * 0 + block, row * 0, tl.full([], 0, tl.int32) + blocks
    for step in range(levels):
        child = tl.where(row > step, child // BRANCHING, child)
        offset = tl.where(row > step, offset + size, offset)
        size = tl.cdiv(size, BRANCHING)
    first = child // BRANCHING * BRANCHING
    stride = 3 * HEAD_DIM if HAS_BOUNDS else HEAD_DIM
    total = tl.zeros([LEVELS, offs_d.shape[0]], tl.float32)
    high = tl.full([LEVELS, offs_d.shape[0]], float("-inf"), tl.float32)
    low = tl.full([LEVELS, offs_d.shape[0]], float("inf"), tl.float32)
    for index in tl.static_range(BRANCHING - 1):
        mask = ((first + index < child) & (row < levels - 1))[:, None] & (offs_d < HEAD_DIM)[None, :]
        at = stats_ptr + (offset + first + index).to(tl.int64)[:, None] * stride + offs_d[None, :]
        total += tl.load(at, mask=mask, other=0.0)
        if HAS_BOUNDS:
            high = tl.maximum(high, tl.load(at + HEAD_DIM, mask=mask, other=float("-inf")))
            low = tl.minimum(low, tl.load(at + 2 * HEAD_DIM, mask=mask, other=float("inf")))
    return total, high, low


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
    block = tl.maximum(end - 1, 0) // BLOCK_SIZE if FINISH else start // BLOCK_SIZE
    if has_room & ((block + 1) * BLOCK_SIZE <= end if not FINISH else end > 0):
        # The tokens are what other threads wrote.
        tl.debug_barrier()
        nodes_ptr += program * node_count * (2 * HEAD_DIM if HAS_BOUNDS else HEAD_DIM)
        stats_ptr += program * node_count * (3 * HEAD_DIM if HAS_BOUNDS else HEAD_DIM)
        offs_d = tl.arange(0, BLOCK_D)
        row = tl.arange(0, LEVELS)[:, None]
        closed, closed_high, closed_low = _closed_children(
            stats_ptr, block, blocks, levels, offs_d, HEAD_DIM, BRANCHING, LEVELS, HAS_BOUNDS
        )
        k_at = block_start(k_cache_ptr, k_cache_strides, pages_ptr, blocks, batch, head, block, BLOCK_SIZE, IS_PAGED)
        held = tl.minimum(end - block * BLOCK_SIZE, BLOCK_SIZE)
        # of shape [1, BLOCK_D]
        total, high, low = block_statistics(
            k_at, k_cache_strides[2], held, offs_d, BLOCK_SIZE, HEAD_DIM, ROWS, HAS_BOUNDS
        )
        zero = tl.full([], 0, tl.int32)
        level, node, offset, size, span = zero, zero + block, zero, zero + blocks, tl.full([], BLOCK_SIZE, tl.int64)
        while (level < levels) & (FINISH | ((node + 1) * span <= end)):
            keys = keys_under(node, span, end)
            store_node(
                nodes_ptr, stats_ptr, offset + node, total, high, low, keys, weight, offs_d, HEAD_DIM, HAS_BOUNDS
            )
            total += tl.sum(tl.where(row == level, closed, 0.0), 0)[None, :]
            if HAS_BOUNDS:
                high = tl.maximum(high, tl.max(tl.where(row == level, closed_high, float("-inf")), 0)[None, :])
                low = tl.minimum(low, tl.min(tl.where(row == level, closed_low, float("inf")), 0)[None, :])
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
    _append[(sizes.batch * sizes.kv_heads,)](
        k, v, store.k, store.v, store.nodes, store.stats, store.parts, store.lengths, store.full, store.pages, counts,
        k.stride()[:3], v.stride()[:3], store.k.stride()[:3], store.v.stride()[:3], sizes.bound_weight, at, k.shape[2],
        sizes.kv_heads, sizes.max_len, sizes.blocks, sizes.levels, sizes.offsets[-1], **append_shape(store),
        BRANCHING=sizes.branching, LEVELS=triton.next_power_of_2(max(2, sizes.levels)), HAS_COUNTS=counts is not None,
        COPY=COPY_ROWS, FINISH=finish, num_warps=APPEND_WARPS, **overlap(store.k.device, sizes.batch * sizes.kv_heads),
    )  # fmt: skip
