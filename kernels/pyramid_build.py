"""Builds the pyramid on the GPU: the Triton kernels behind `kernels.pyramid.build_pyramid`, which is their torch twin.

Every node's mean, maximum and minimum compose exactly from its children's sums, maxima and minima, in fp32.
Tiling: one program of `_build_base` = SPAN = branching^BASE consecutive blocks of one key/value head: it streams their
keys once, writes their summaries and those of the BASE levels above them from registers, and leaves the top ones'
statistics in fp32. One program of `_build_rest` = BLOCK_D columns of one head; it composes all remaining levels from
these, level by level, with a barrier in between. BASE is 0 when the branching is no power of two.
Cost: 1 (3 with bounds) operations per element of k; k is read once, about n₁·branching/(branching - 1) summaries are
written. Bound by the read of k.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyramidbench.kernels.pyramid import Pyramid
from pyramidbench.kernels.pyramid_nodes import keys_under, level_table, store_statistics, store_summaries


@dataclass(frozen=True)
class BaseTile:
    """Rows of each block that `_build_base` loads at a time, and its launch shape."""

    ROWS: int
    num_warps: int
    STAGES: int


def base_tile(head_dim: int, itemsize: int) -> BaseTile:
    """Tile sizes for keys of `itemsize` bytes.

    H200, 256k keys, 16 heads, bf16, ms by rows/warps/stages: 4/4/1 0.373, 4/4/2 0.420, 4/4/3 0.432, 2/4/1 0.396,
    8/4/1 0.416, 4/2/1 0.426, 4/8/1 0.413.
    """
    return BaseTile(8 // itemsize, 4 if head_dim <= 128 else 8, 1)


@triton.jit
def _sum_children(total, BRANCHING: tl.constexpr):
    """Sums [n, BLOCK_D] over axis 1, children in ascending order, as `_build_rest` and a growing cache add them: equal bits."""
    if BRANCHING == 2:
        result = tl.sum(total, 1)
    else:
        result = tl.zeros([total.shape[0], total.shape[2]], tl.float32)
        for index in tl.static_range(BRANCHING):
            is_child = (tl.arange(0, BRANCHING) == index)[None, :, None]
            result += tl.sum(tl.where(is_child, total, 0.0), 1)
    return result


@triton.jit
def _build_base(
    k_ptr,
    nodes_ptr,
    stats_ptr,
    k_strides,
    weight,
    kv_heads,
    seq_len,
    blocks,
    levels,
    node_count,
    stats_count,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BRANCHING: tl.constexpr,
    BASE: tl.constexpr,
    SPAN: tl.constexpr,
    HAS_BOUNDS: tl.constexpr,
    HAS_REST: tl.constexpr,
    STAGES: tl.constexpr,
):
    chunks = tl.cdiv(blocks, SPAN)
    program = tl.program_id(0).to(tl.int64)
    chunk = (program % chunks).to(tl.int32)
    head = program // chunks
    block = chunk * SPAN + tl.arange(0, SPAN)
    offs_d = tl.arange(0, BLOCK_D)
    k_ptr += head // kv_heads * k_strides[0] + head % kv_heads * k_strides[1]
    nodes_ptr += head * node_count * (2 * HEAD_DIM if HAS_BOUNDS else HEAD_DIM)
    stats_ptr += head * stats_count * (3 * HEAD_DIM if HAS_BOUNDS else HEAD_DIM)

    # The last key that each block may read; a place past it repeats it, which moves neither maximum nor minimum.
    last = tl.minimum(tl.minimum(block, blocks - 1).to(tl.int64) * BLOCK_SIZE + BLOCK_SIZE, seq_len) - 1
    # of shape [SPAN, BLOCK_D], fp32
    total = tl.zeros([SPAN, BLOCK_D], tl.float32)
    high = tl.full([SPAN, BLOCK_D], float("-inf"), tl.float32)
    low = tl.full([SPAN, BLOCK_D], float("inf"), tl.float32)
    for start in tl.range(0, BLOCK_SIZE, ROWS, num_stages=STAGES):
        # One key of every block at a time, so that no sum crosses threads; unrolled, so that ROWS loads are in flight.
        for step in tl.static_range(ROWS):
            place = block.to(tl.int64) * BLOCK_SIZE + start + step
            # of shape [SPAN, BLOCK_D]
            k_at = k_ptr + tl.minimum(place, last)[:, None] * k_strides[2] + offs_d[None, :]
            if HEAD_DIM == BLOCK_D:
                k = tl.load(k_at).to(tl.float32)
            else:
                k = tl.load(k_at, mask=(offs_d < HEAD_DIM)[None, :], other=0.0).to(tl.float32)
            total += tl.where((place <= last)[:, None], k, 0.0)
            if HAS_BOUNDS:
                high = tl.maximum(high, k)
                low = tl.minimum(low, k)

    level_nodes = blocks
    keys_per_node = tl.full([], BLOCK_SIZE, tl.int64)
    for level in tl.static_range(BASE + 1):
        if level > 0:
            total = _sum_children(tl.reshape(total, [SPAN // BRANCHING**level, BRANCHING, BLOCK_D]), BRANCHING)
            high = tl.max(tl.reshape(high, [SPAN // BRANCHING**level, BRANCHING, BLOCK_D]), 1)
            low = tl.min(tl.reshape(low, [SPAN // BRANCHING**level, BRANCHING, BLOCK_D]), 1)
            nodes_ptr += level_nodes.to(tl.int64) * (2 * HEAD_DIM if HAS_BOUNDS else HEAD_DIM)
            level_nodes = tl.cdiv(level_nodes, BRANCHING)
            keys_per_node *= BRANCHING
        if level < levels:
            node = chunk * (SPAN // BRANCHING**level) + tl.arange(0, SPAN // BRANCHING**level)
            held = node < level_nodes
            mean = total / keys_under(node, keys_per_node, seq_len)[:, None]
            store_summaries(nodes_ptr, node, held, mean, high, low, weight, offs_d, HEAD_DIM, HAS_BOUNDS)
            if level == BASE and HAS_REST:
                store_statistics(stats_ptr, node, held, total, high, low, offs_d, HEAD_DIM, HAS_BOUNDS)


@triton.jit
def _build_rest(
    nodes_ptr,
    stats_ptr,
    weight,
    seq_len,
    blocks,
    levels,
    node_count,
    stats_count,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BRANCHING: tl.constexpr,
    BASE: tl.constexpr,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_BOUNDS: tl.constexpr,
):
    slices = tl.cdiv(HEAD_DIM, BLOCK_D)
    program = tl.program_id(0).to(tl.int64)
    head = program // slices
    offs_d = (program % slices).to(tl.int32) * BLOCK_D + tl.arange(0, BLOCK_D)
    width = 2 * HEAD_DIM if HAS_BOUNDS else HEAD_DIM
    row = 3 * HEAD_DIM if HAS_BOUNDS else HEAD_DIM
    nodes_ptr += head * node_count * width
    stats_ptr += head * stats_count * row
    below = blocks
    for _ in range(BASE):
        nodes_ptr += below.to(tl.int64) * width
        below = tl.cdiv(below, BRANCHING)
    keys_per_node = tl.full([], BLOCK_SIZE, tl.int64) * SPAN
    for _ in range(BASE + 1, levels):
        nodes_ptr += below.to(tl.int64) * width
        parents = tl.cdiv(below, BRANCHING)
        keys_per_node *= BRANCHING
        for start in range(0, parents, ROWS):
            node = start + tl.arange(0, ROWS)
            # of shape [ROWS, BLOCK_D], fp32
            total = tl.zeros([ROWS, BLOCK_D], tl.float32)
            high = tl.full([ROWS, BLOCK_D], float("-inf"), tl.float32)
            low = tl.full([ROWS, BLOCK_D], float("inf"), tl.float32)
            for index in range(BRANCHING):
                child = node * BRANCHING + index
                mask = (child < below)[:, None] & (offs_d < HEAD_DIM)[None, :]
                at = stats_ptr + child.to(tl.int64)[:, None] * row + offs_d[None, :]
                total += tl.load(at, mask=mask, other=0.0)
                if HAS_BOUNDS:
                    high = tl.maximum(high, tl.load(at + HEAD_DIM, mask=mask, other=float("-inf")))
                    low = tl.minimum(low, tl.load(at + 2 * HEAD_DIM, mask=mask, other=float("inf")))
            mean = total / keys_under(node, keys_per_node, seq_len)[:, None]
            held = node < parents
            store_summaries(nodes_ptr, node, held, mean, high, low, weight, offs_d, HEAD_DIM, HAS_BOUNDS)
            above = stats_ptr + below.to(tl.int64) * row
            store_statistics(above, node, held, total, high, low, offs_d, HEAD_DIM, HAS_BOUNDS)
        stats_ptr += below.to(tl.int64) * row
        below = parents
        tl.debug_barrier()


def base_levels(branching: int) -> int:
    """Levels that `_build_base` composes in registers: 16 blocks' worth (8 with a branching of 8)."""
    return {2: 4, 4: 2, 8: 1, 16: 1}.get(branching, 0)


def build(
    k: Tensor, *, block_size: int, branching: int, levels: int, bound_weight: float, tile: BaseTile | None = None
) -> Pyramid:
    """The pyramid of k [B, G, N, D] (any strides, last dimension contiguous) with `levels` levels, as its twin's.

    tile: tile sizes to try instead of the chosen ones.
    """
    tile = tile or base_tile(k.shape[-1], k.element_size())
    batch, kv_heads, seq_len, head_dim = k.shape
    offsets, keys = level_table(seq_len, block_size, branching, levels, k.device)
    has_bounds = bound_weight > 0
    base = base_levels(branching)
    span = branching**base if base else 8
    stats = offsets[-1] - offsets[base] if levels > base + 1 else 0
    nodes = torch.empty(batch, kv_heads, offsets[-1], head_dim * (1 + has_bounds), dtype=k.dtype, device=k.device)
    scratch = torch.empty(batch, kv_heads, stats, 3 if has_bounds else 1, head_dim, device=k.device)
    blocks = offsets[1]
    shape = {"BLOCK_SIZE": block_size, "HEAD_DIM": head_dim, "BRANCHING": branching, "HAS_BOUNDS": has_bounds}
    _build_base[(batch * kv_heads * triton.cdiv(blocks, span),)](
        k, nodes, scratch, k.stride()[:3], bound_weight, kv_heads, seq_len, blocks, levels, offsets[-1], stats,
        ROWS=tile.ROWS, BLOCK_D=triton.next_power_of_2(head_dim), BASE=base, SPAN=span, HAS_REST=stats > 0,
        STAGES=tile.STAGES, num_warps=tile.num_warps, **shape,
    )  # fmt: skip
    if stats:
        _build_rest[(batch * kv_heads * triton.cdiv(head_dim, 32),)](
            nodes, scratch, bound_weight, seq_len, blocks, levels, offsets[-1], stats,
            BLOCK_D=32, BASE=base, SPAN=branching**base, ROWS=32, num_warps=4, **shape,
        )  # fmt: skip
    return Pyramid(nodes, keys, offsets, block_size, branching, has_bounds)
