"""Log-masses of (tile, block) pairs, block by block: the arithmetic of the exact leaf.

For a row i of a pair and its block's keys x: S_i = logsumexp over x of s·q_i·k_x + log c_x, c = 1; with leaf score "sub"
x runs over the means of the block's parts and c is a part's number of keys. Keys after the tile's first query (only forced
blocks hold such) are not seen: they must not move the tile's set.
Tiling: one program = one piece of work of kernels.route_pairs: the keys of a block, held, and the rows of up to PAIRS
pairs that listed it, BLOCK_M at a time: [BLOCK_M, D] × [D, block]. A pair's rows lie side by side.
Cost: 2·D·block operations a row; it reads rows·D elements a pair through L2 (a walk tile by tile would read block·D), and
each block once from memory. 16 rows, 128 candidates, 256k keys, 16 heads: 17 GB (tile by tile: 69 GB), 1.1·10¹² operations
and 4.3·10⁹ exponentials. Bound by L2: 2.6 ms at 6.6 TB/s; instructions (400 a step of 64 rows and warp) take 1.8 ms.
Logits, sums and masses are fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from pyramidbench.kernels.route_portions import Buffers, Portion


@triton.jit
def _log_sum(logits, scale_log2, log_held, BIASED: tl.constexpr):
    """Natural logsumexp of each row of unscaled logits [BLOCK_M, BLOCK_N]; log_held: binary logarithm of what a key counts."""
    if BIASED:
        logits = logits * scale_log2 + log_held[None, :]
        top = tl.max(logits, 1)
        top = tl.where(top == float("-inf"), 0.0, top)
        total = tl.sum(tl.exp2(logits - top[:, None]), 1)
    else:
        # Scale and maximum in one operation a logit; the maximum before the scale, which is positive here.
        top = tl.max(logits, 1) * scale_log2
        top = tl.where(top == float("-inf"), 0.0, top)
        total = tl.sum(tl.exp2(logits * scale_log2 - top[:, None]), 1)
    # NaN counts as -inf.
    return tl.where(total > 0, (top + tl.log2(tl.where(total > 0, total, 1.0))) * 0.6931471805599453, float("-inf"))


@triton.jit
def _pair_of(start, index, pairs, TALL: tl.constexpr, BLOCK_M: tl.constexpr):
    """The pair of each row start + index, TALL rows a pair; past the last row the last pair."""
    if BLOCK_M % TALL == 0:
        return tl.minimum(start // TALL + index // TALL, pairs - 1)
    return tl.minimum((start + index) // TALL, pairs - 1)


@triton.jit
def _mass(
    k_ptr,
    rows_ptr,
    pair_ptr,
    work_ptr,
    total_ptr,
    mass_ptr,
    k_strides,
    scale_log2,
    first_item,
    sets,
    kv_heads,
    tiles,
    seq_len_q,
    seq_len_kv,
    blocks,
    columns,
    windows,
    width,
    slot_bits,
    TALL: tl.constexpr,
    TERMS: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    BIASED: tl.constexpr,
):
    piece = tl.program_id(0).to(tl.int64)
    # Loaded ahead of the check, so that one latency covers all four; past the last piece they hold garbage.
    column = tl.load(work_ptr + piece * 3)
    place = tl.load(work_ptr + piece * 3 + 1)
    end = tl.load(work_ptr + piece * 3 + 2)
    if piece >= tl.load(total_ptr + 1):
        return
    # Columns from `columns` on are those whose tiles see only some of the keys.
    inside = column - tl.where(column >= columns, columns, 0)
    which = first_item // tiles + inside // (windows * blocks)
    block = inside % blocks
    batch = which // sets
    k_ptr += batch.to(tl.int64) * k_strides[0] + (which % sets * kv_heads // sets).to(tl.int64) * k_strides[1]

    # A key, or a part of SIZE keys, and how many of them there are.
    SIZE: tl.constexpr = (BLOCK_SIZE + PARTS - 1) // PARTS
    part = tl.arange(0, BLOCK_N)
    part_end = tl.minimum(tl.minimum((part + 1) * SIZE, BLOCK_SIZE) + block * BLOCK_SIZE, seq_len_kv)
    held = tl.where(part < PARTS, part_end - block * BLOCK_SIZE - part * SIZE, 0)
    offs_d = tl.arange(0, BLOCK_D)
    # of shape [BLOCK_N, BLOCK_D]
    k_at = k_ptr + (block.to(tl.int64) * PARTS + part)[:, None] * k_strides[2] + offs_d[None, :]
    k = tl.load(k_at, mask=(held > 0)[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)
    log_held = tl.where(held > 0, tl.log2(tl.maximum(held, 1).to(tl.float32)), float("-inf"))
    # A place without keys lies after every query.
    last_key = tl.where(held > 0, part_end - 1, 2147483647)
    is_masked = (column >= columns) | ((block + 1) * BLOCK_SIZE > seq_len_kv)

    index = tl.arange(0, BLOCK_M)
    rows = (end - place) * TALL
    pair_ptr += place
    # Pairs are loaded a step ahead: else a tile of rows waits for its pairs, and is asked for only when it is needed.
    pair = tl.load(pair_ptr + _pair_of(0, index, end - place, TALL, BLOCK_M))
    for start in range(0, rows, BLOCK_M):
        # of shape [BLOCK_M]; places after the last row repeat rows of the last pair
        row = index % TALL if BLOCK_M % TALL == 0 else (start + index) % TALL
        at = rows_ptr + (((pair >> slot_bits) * (TERMS * TALL) + row) * BLOCK_D)[:, None] + offs_d[None, :]
        # of shape [BLOCK_M, BLOCK_N]
        logits = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for term in tl.static_range(TERMS):
            # of shape [BLOCK_M, BLOCK_D]
            q = tl.load(at + term * (TALL * BLOCK_D))
            logits = tl.dot(q, tl.trans(k), logits, input_precision="ieee")
        own = tl.load(pair_ptr + _pair_of(start, index, end - place, TALL, BLOCK_M))
        if is_masked:
            last = tl.zeros_like(row) + seq_len_kv - 1
            if IS_CAUSAL:
                tile = first_item + (own >> slot_bits) - which * tiles
                last = tl.minimum(tile * QUERY_TILE + seq_len_kv - seq_len_q, seq_len_kv - 1)
            logits = tl.where(last_key[None, :] <= last[:, None], logits, float("-inf"))
        mass = _log_sum(logits, scale_log2, log_held, BIASED)
        at_mass = (own >> slot_bits) * width + (own & ((1 << slot_bits) - 1))
        tl.store(mass_ptr + at_mass * TALL + row, mass, mask=start + index < rows)
        pair = tl.load(pair_ptr + _pair_of(start + BLOCK_M, index, end - place, TALL, BLOCK_M))


@dataclass(frozen=True)
class MassTile:
    """Rows of one product and launch shape of `_mass`."""

    BLOCK_M: int
    num_warps: int
    num_stages: int


def mass_tile(head_dim: int, itemsize: int, terms: int) -> MassTile:
    """Tile sizes for rows of `itemsize`-byte numbers, `terms` of them a scoring row."""
    if itemsize == 4:
        # fp32 products run on the vector units; more rows or fewer warps spill.
        return MassTile(32, 8, 1)
    if terms > 1:
        # A mean query has few pairs a block, so programs hide the latency: 1.50 ms at 256k keys, 1.90 and 3.09 with 2 and 3.
        return MassTile(64, 4, 1)
    return MassTile(64, 4, 2 if head_dim > 128 else 3)


def masses(portion: Portion, k: Tensor, to: Buffers, tile: MassTile | None = None) -> None:
    """The mass of every pair of a portion. k: [B, G, N, D], or the means of the blocks' parts.

    tile: tile sizes to try instead of the chosen ones.
    """
    job, call = portion.job, portion.job.call
    tiling = call.tiling
    parts = call.rules.sub_blocks if call.rules.leaf_score == "sub" else tiling.block_size
    tile = tile or mass_tile(k.shape[-1], k.element_size(), job.terms)
    block_n = max(16, triton.next_power_of_2(parts))
    _mass[(max(1, portion.work),)](
        k, to.rows, to.pair, to.work, to.total, to.mass, k.stride()[:3], call.scale * 1.4426950408889634,
        portion.first_item, *call.sizes[1:], tiling.blocks, portion.columns, job.windows, job.width, job.slot_bits,
        TALL=job.tall, TERMS=job.terms, QUERY_TILE=tiling.query_tile, BLOCK_SIZE=tiling.block_size, PARTS=parts,
        BLOCK_M=tile.BLOCK_M, BLOCK_N=block_n, HEAD_DIM=k.shape[-1], BLOCK_D=call.shape["BLOCK_D"],
        IS_CAUSAL=tiling.causal, BIASED=parts < tiling.block_size or parts < block_n or call.scale <= 0,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
