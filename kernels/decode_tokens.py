"""Tokens of a decoding cache inside kernels: writing them, and the statistics of blocks and their parts, in a build's order."""

from __future__ import annotations

import triton
import triton.language as tl

from pyramidbench.kernels.cache import CacheStore
from pyramidbench.kernels.decode_place import block_start
from pyramidbench.kernels.pyramid_nodes import store_statistics, store_summaries

APPEND_WARPS = 4
COPY_ROWS = 16
LOAD_ROWS = 32
"""Keys of a block whose loads are in flight together."""


@triton.jit
def copy_tokens(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, k_strides, v_strides, k_cache_strides, v_cache_strides, pages_ptr, blocks, batch,
    head, first, start, end, count, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_SIZE: tl.constexpr, IS_PAGED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write the new tokens [start, end) of one head, at most `count`; they are tokens `first` … of k and v.

    Reading these waits for `first` and `count` only, which a step knows before it knows its length.
    """
    offs_d, offs_dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    k_ptr += batch * k_strides[0] + head * k_strides[1]
    v_ptr += batch * v_strides[0] + head * v_strides[1]
    for begin in range(0, count, ROWS):
        row = begin + tl.arange(0, ROWS)
        from_row = (first + row).to(tl.int64)[:, None]
        # of shape [ROWS, BLOCK_D] and [ROWS, BLOCK_DV]
        is_k = (row < count)[:, None] & (offs_d < HEAD_DIM)[None, :]
        is_v = (row < count)[:, None] & (offs_dv < HEAD_DIM_V)[None, :]
        k = tl.load(k_ptr + from_row * k_strides[2] + offs_d[None, :], mask=is_k, other=0.0)
        v = tl.load(v_ptr + from_row * v_strides[2] + offs_dv[None, :], mask=is_v, other=0.0)
        token = start + row
        held = token < end
        block, place = tl.where(held, token // BLOCK_SIZE, -1), token % BLOCK_SIZE
        at = block_start(k_cache_ptr, k_cache_strides, pages_ptr, blocks, batch, head, block, BLOCK_SIZE, IS_PAGED)
        tl.store((at + place * k_cache_strides[2])[:, None] + offs_d[None, :], k, mask=is_k & held[:, None])
        at = block_start(v_cache_ptr, v_cache_strides, pages_ptr, blocks, batch, head, block, BLOCK_SIZE, IS_PAGED)
        tl.store((at + place * v_cache_strides[2])[:, None] + offs_dv[None, :], v, mask=is_v & held[:, None])


@triton.jit
def block_statistics(
    k_at, stride, held, offs_d, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, HAS_BOUNDS: tl.constexpr
):  # fmt: skip
    """Sum, maximum and minimum, [1, BLOCK_D] in fp32, of the first `held` keys of a block, key by key."""
    total = tl.zeros([1, offs_d.shape[0]], tl.float32)
    high = tl.full([1, offs_d.shape[0]], float("-inf"), tl.float32)
    low = tl.full([1, offs_d.shape[0]], float("inf"), tl.float32)
    for start in range(0, BLOCK_SIZE, ROWS):
        for step in tl.static_range(ROWS):
            place = start + step
            # A place past the last key repeats it, which moves neither maximum nor minimum.
            row = k_at + tl.minimum(place, held - 1) * stride
            k = tl.load(row + offs_d[None, :], mask=(offs_d < HEAD_DIM)[None, :], other=0.0).to(tl.float32)
            total += tl.where(place < held, k, 0.0)
            if HAS_BOUNDS:
                high = tl.maximum(high, k)
                low = tl.minimum(low, k)
    return total, high, low


@triton.jit
def part_mean(k_at, stride, held, offs_d, SIZE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """The mean [1, BLOCK_D] in fp32 of `held` keys from k_at on, at most SIZE, summed as `kernels.pooled_queries` sums them."""
    ROWS: tl.constexpr = SIZE if SIZE < 16 else 16
    total, _, _ = block_statistics(k_at, stride, held, offs_d, SIZE, HEAD_DIM, ROWS, HAS_BOUNDS=False)
    return total / held


@triton.jit
def store_parts(
    parts_ptr, k_cache_ptr, strides, pages_ptr, kv_heads, blocks, batch, head, start, end, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr, IS_PAGED: tl.constexpr,
):  # fmt: skip
    """Means of the parts of blocks that tokens [start, end) of one head complete; the tokens are in the cache."""
    SIZE: tl.constexpr = (BLOCK_SIZE + PARTS - 1) // PARTS
    offs_d = tl.arange(0, BLOCK_D)
    parts_ptr += (batch * kv_heads + head) * blocks * (PARTS * HEAD_DIM)
    first = start // BLOCK_SIZE * PARTS + start % BLOCK_SIZE // SIZE
    for part in range(first, end // BLOCK_SIZE * PARTS + end % BLOCK_SIZE // SIZE):
        block, inner = part // PARTS, part % PARTS * SIZE
        # A part past the block's end has no key.
        if inner < BLOCK_SIZE:
            at = block_start(k_cache_ptr, strides, pages_ptr, blocks, batch, head, block, BLOCK_SIZE, IS_PAGED)
            held = tl.minimum(BLOCK_SIZE - inner, SIZE)
            mean = part_mean(at + inner * strides[2], strides[2], held, offs_d, SIZE, HEAD_DIM)
            mean_at = parts_ptr + (tl.full([1], 0, tl.int64) + part)[:, None] * HEAD_DIM + offs_d[None, :]
            tl.store(mean_at, mean.to(parts_ptr.dtype.element_ty), mask=(offs_d < HEAD_DIM)[None, :])


@triton.jit
def store_node(
    nodes_ptr, stats_ptr, place, total, high, low, keys, weight, offs_d, HEAD_DIM: tl.constexpr, HAS_BOUNDS: tl.constexpr
):  # fmt: skip
    """Summary and statistics of the node at a place of the buffer."""
    node = tl.full([1], 0, tl.int32) + place
    held = node >= 0
    store_summaries(nodes_ptr, node, held, total / keys, high, low, weight, offs_d, HEAD_DIM, HAS_BOUNDS)
    store_statistics(stats_ptr, node, held, total, high, low, offs_d, HEAD_DIM, HAS_BOUNDS)


def append_shape(store: CacheStore) -> dict[str, int | bool]:
    """The constants that the kernels share."""
    sizes = store.sizes
    return {
        "BLOCK_SIZE": sizes.block_size,
        "HEAD_DIM": sizes.head_dim,
        "HEAD_DIM_V": sizes.head_dim_v,
        "BLOCK_D": triton.next_power_of_2(sizes.head_dim),
        "BLOCK_DV": triton.next_power_of_2(sizes.head_dim_v),
        "HAS_BOUNDS": sizes.has_bounds,
        "IS_PAGED": store.pages is not None,
        "PARTS": sizes.parts,
        "ROWS": min(LOAD_ROWS, sizes.block_size),
    }
