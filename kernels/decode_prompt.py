"""Appending a prompt to a cache on the GPU: a launch for its blocks, and one a level. `kernels.cache_append` is the torch twin.

`_append_blocks`: one program = one block of one sequence and key/value head: it writes the block's new tokens and sums all its
keys, key by key, and where means of parts are kept those of each whole part. `_compose_level`: one program = ROWS neighbouring
nodes of a level, from their children's statistics in ascending order. Only blocks and nodes that hold a new token are touched;
the open one at the end of each level is made too, though nobody reads it. Both orders are those of `kernels.pyramid_build`.
Cost: reads and writes the new tokens, reads their keys twice; bound by memory.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pyramidbench.kernels.cache import CacheStore
from pyramidbench.kernels.decode_place import block_start
from pyramidbench.kernels.decode_tokens import (
    APPEND_WARPS,
    COPY_ROWS,
    append_shape,
    block_statistics,
    copy_tokens,
    store_node,
    store_parts,
)
from pyramidbench.kernels.pyramid_nodes import keys_under, store_statistics, store_summaries

NODE_ROWS = 8


@triton.jit
def _append_blocks(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, nodes_ptr, stats_ptr, parts_ptr, starts_ptr, ends_ptr, pages_ptr,
    k_strides, v_strides, k_cache_strides, v_cache_strides, weight, kv_heads, blocks, most_blocks, node_count,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    HAS_BOUNDS: tl.constexpr, IS_PAGED: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    which = program // most_blocks
    batch, head = which // kv_heads, which % kv_heads
    start, end = tl.load(starts_ptr + batch), tl.load(ends_ptr + batch)
    block = tl.minimum(start, end - 1) // BLOCK_SIZE + (program % most_blocks).to(tl.int32)
    if (block * BLOCK_SIZE < end) & (start < end):
        first, last = tl.maximum(start, block * BLOCK_SIZE), tl.minimum(end, (block + 1) * BLOCK_SIZE)
        copy_tokens(
            k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, k_strides, v_strides, k_cache_strides, v_cache_strides, pages_ptr, blocks,
            batch, head, first - start, first, last, last - first, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_SIZE,
            IS_PAGED, COPY,
        )  # fmt: skip
        tl.debug_barrier()
        if PARTS:
            store_parts(
                parts_ptr, k_cache_ptr, k_cache_strides, pages_ptr, kv_heads, blocks, batch, head, first, last, BLOCK_SIZE,
                HEAD_DIM, BLOCK_D, PARTS, IS_PAGED,
            )  # fmt: skip
        offs_d = tl.arange(0, BLOCK_D)
        k_at = block_start(k_cache_ptr, k_cache_strides, pages_ptr, blocks, batch, head, block, BLOCK_SIZE, IS_PAGED)
        held = last - block * BLOCK_SIZE
        total, high, low = block_statistics(
            k_at, k_cache_strides[2], held, offs_d, BLOCK_SIZE, HEAD_DIM, ROWS, HAS_BOUNDS
        )
        nodes_ptr += which * node_count * (2 * HEAD_DIM if HAS_BOUNDS else HEAD_DIM)
        stats_ptr += which * node_count * (3 * HEAD_DIM if HAS_BOUNDS else HEAD_DIM)
        keys = held.to(tl.float32)
        store_node(nodes_ptr, stats_ptr, block, total, high, low, keys, weight, offs_d, HEAD_DIM, HAS_BOUNDS)


@triton.jit
def _compose_level(
    nodes_ptr, stats_ptr, starts_ptr, ends_ptr, weight, kv_heads, parts, node_count, below, below_size, span,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BRANCHING: tl.constexpr, ROWS: tl.constexpr,
    HAS_BOUNDS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    which = program // parts
    start, end = tl.load(starts_ptr + which // kv_heads), tl.load(ends_ptr + which // kv_heads)
    offs_d = tl.arange(0, BLOCK_D)
    row_stride = 3 * HEAD_DIM if HAS_BOUNDS else HEAD_DIM
    nodes_ptr += which * node_count * (2 * HEAD_DIM if HAS_BOUNDS else HEAD_DIM)
    stats_ptr += which * node_count * row_stride
    keys_per_node = tl.full([], BLOCK_SIZE, tl.int64) * span
    node = tl.minimum(start, end - 1) // keys_per_node + (program % parts) * ROWS + tl.arange(0, ROWS)
    # A sequence without a new token changes no node.
    held = node * keys_per_node < tl.where(start < end, end, 0)
    children = tl.cdiv(end, keys_per_node // BRANCHING)
    # of shape [ROWS, BLOCK_D], fp32
    total = tl.zeros([ROWS, BLOCK_D], tl.float32)
    high = tl.full([ROWS, BLOCK_D], float("-inf"), tl.float32)
    low = tl.full([ROWS, BLOCK_D], float("inf"), tl.float32)
    for index in range(BRANCHING):
        child = node * BRANCHING + index
        mask = (held & (child < children))[:, None] & (offs_d < HEAD_DIM)[None, :]
        at = stats_ptr + (below + child)[:, None] * row_stride + offs_d[None, :]
        total += tl.load(at, mask=mask, other=0.0)
        if HAS_BOUNDS:
            high = tl.maximum(high, tl.load(at + HEAD_DIM, mask=mask, other=float("-inf")))
            low = tl.minimum(low, tl.load(at + 2 * HEAD_DIM, mask=mask, other=float("inf")))
    mean = total / keys_under(node, keys_per_node, end)[:, None]
    place = below + below_size + node
    store_summaries(nodes_ptr, place, held, mean, high, low, weight, offs_d, HEAD_DIM, HAS_BOUNDS)
    store_statistics(stats_ptr, place, held, total, high, low, offs_d, HEAD_DIM, HAS_BOUNDS)


def append_prompt(store: CacheStore, k: Tensor, v: Tensor, starts: Tensor, ends: Tensor) -> None:
    """A launch for the blocks that the tokens touch, and one for each level above them."""
    sizes, heads = store.sizes, store.sizes.batch * store.sizes.kv_heads
    touched = -(-k.shape[2] // sizes.block_size) + 1
    _append_blocks[(heads * touched,)](
        k, v, store.k, store.v, store.nodes, store.stats, store.parts, starts, ends, store.pages, k.stride()[:3],
        v.stride()[:3], store.k.stride()[:3], store.v.stride()[:3], sizes.bound_weight, sizes.kv_heads, sizes.blocks, touched,
        sizes.offsets[-1], **append_shape(store), COPY=COPY_ROWS, num_warps=APPEND_WARPS,
    )  # fmt: skip
    shape = {
        name: value
        for name, value in append_shape(store).items()
        if name in ("BLOCK_SIZE", "HEAD_DIM", "BLOCK_D", "HAS_BOUNDS")
    }
    span, below, below_size = 1, 0, sizes.blocks
    for _ in range(1, sizes.levels):
        span *= sizes.branching
        touched = -(-touched // sizes.branching) + 1
        parts = triton.cdiv(touched, NODE_ROWS)
        _compose_level[(heads * parts,)](
            store.nodes, store.stats, starts, ends, sizes.bound_weight, sizes.kv_heads, parts, sizes.offsets[-1], below,
            below_size, span, BRANCHING=sizes.branching, ROWS=NODE_ROWS, num_warps=APPEND_WARPS, **shape,
        )  # fmt: skip
        below, below_size = below + below_size, -(-below_size // sizes.branching)
