"""Where a decoding cache keeps things, inside kernels: blocks of contiguous and paged caches, and new queries' blocks."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def block_start(
    x_ptr, strides, pages_ptr, blocks, batch, head, block, BLOCK_SIZE: tl.constexpr, IS_PAGED: tl.constexpr
):
    """Pointers to the first token of blocks (a number or a tensor of them) of one sequence and head; any page for -1."""
    block = tl.maximum(block, 0)
    if IS_PAGED:
        page = tl.maximum(tl.load(pages_ptr + batch * blocks + block), 0)
        return x_ptr + page.to(tl.int64) * strides[0] + head * strides[1]
    first = batch * strides[0] + head * strides[1]
    return x_ptr + first + block.to(tl.int64) * BLOCK_SIZE * strides[2]


@triton.jit
def new_query(length, index, queries, BLOCK_SIZE: tl.constexpr, sink_blocks, local_blocks):
    """(position, end of the blocks that may be ranked, sink_end, local_start behind the sinks, forced blocks) of a query."""
    position = length - queries + index
    # Before the first token there is no block; the clamp keeps division away from negative numbers.
    local_end = tl.where(position < 0, 0, tl.maximum(position, 0) // BLOCK_SIZE + 1)
    first_local = tl.maximum(local_end - local_blocks, 0)
    sink_end = tl.minimum(local_end, sink_blocks)
    end = tl.minimum(tl.maximum(position + 1, 0) // BLOCK_SIZE, first_local)
    local_start = tl.maximum(first_local, sink_end)
    return position, end, sink_end, local_start, sink_end + tl.maximum(local_end - local_start, 0)


@triton.jit
def interval(sink_end, end, level, span, BRANCHING: tl.constexpr):
    """[lo, hi) of a level's nodes that may be ranked. A division by `span` takes forty instructions, a shift one."""
    if BRANCHING == 2:
        lo, hi = (sink_end + (1 << level) - 1) >> level, end >> level
    else:
        lo, hi = tl.cdiv(sink_end, span), end // span
    return lo, hi
