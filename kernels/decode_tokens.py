"""Tokens of a decoding cache inside kernels: writing them, and the statistics of a block of them, in a build's order."""

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
    x_ptr, cache_ptr, strides, cache_strides, pages_ptr, blocks, batch, head, first, start, end, DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, IS_PAGED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write the new tokens [start, end) of one head; `first`: the position of the first token of x."""
    offs_d = tl.arange(0, BLOCK_D)
    for begin in range(start, end, ROWS):
        token = begin + tl.arange(0, ROWS)
        mask = (token < end)[:, None] & (offs_d < DIM)[None, :]
        # of shape [ROWS, BLOCK_D]
        row = x_ptr + batch * strides[0] + head * strides[1] + (token - first).to(tl.int64) * strides[2]
        x = tl.load(row[:, None] + offs_d[None, :], mask=mask, other=0.0)
        block = tl.where(token < end, token // BLOCK_SIZE, -1)
        at = block_start(cache_ptr, cache_strides, pages_ptr, blocks, batch, head, block, BLOCK_SIZE, IS_PAGED)
        at += (token % BLOCK_SIZE) * cache_strides[2]
        tl.store(at[:, None] + offs_d[None, :], x, mask=mask)


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
        "ROWS": min(LOAD_ROWS, sizes.block_size),
    }
