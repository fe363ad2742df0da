"""The oracle's block mass on the GPU: the Triton kernel behind `pyramidbench.oracle.block_mass`, which is its torch twin.

For a tile of rows I and a block of keys X:  mass = (1 / |I|) · Σ_{i ∈ I} Σ_{x ∈ X, x ≤ p_i} exp(s·q_i·k_x - lse_i), with
lse_i = logsumexp over all keys x ≤ p_i. A row without a key adds 0 and counts in |I|.

Tiling: one program = BLOCK_M rows of one head (whole tiles; each padded to a power of two, so that a sum over a tile is a
reshape). It streams the keys twice: once for lse (the online softmax of FlashAttention, arXiv 2307.08691, without values),
once for the weights, whose sums per (tile, block) are written and never the weights. Steps of BLOCK_N keys hold whole
blocks; only those that some row sees in part are masked. The longest programs of a head start first, and the heads come one
after another, so that concurrent programs share a head's keys in L2.
Cost: 4·D operations and two exponentials per visible (row, key) pair. Bound by the matrix units and the exponentials:
131 072 keys, 16 heads, D 128: 7.0·10¹³ operations, 92 ms at 768 TFLOP/s, and 2.7·10¹¹ exponentials, 76 ms.
Logits, maxima and sums are fp32; products of fp32 inputs too ("ieee").
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyramidbench.tiling import Tiling

LOG2_E = 1.4426950408889634
TALLEST_TILE = 128


@triton.jit
def _key(step, BLOCK_SIZE: tl.constexpr, PADDED: tl.constexpr, BLOCK_N: tl.constexpr):
    """Keys [BLOCK_N] of a step: BLOCK_N / PADDED whole blocks, each padded to a power of two."""
    offs_n = tl.arange(0, BLOCK_N)
    if BLOCK_SIZE == PADDED:
        return step * BLOCK_N + offs_n
    return (step * (BLOCK_N // PADDED) + offs_n // PADDED) * BLOCK_SIZE + offs_n % PADDED


@triton.jit
def _logits(q, is_row, k_head, stride_n, step, position, seq_len_kv, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
            PART_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, PADDED: tl.constexpr, BLOCK_N: tl.constexpr,
            IS_CAUSAL: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """q · k [BLOCK_M, BLOCK_N] of one step, unscaled; -inf where MASKED and a row does not see a key.

    q: the rows [BLOCK_M, BLOCK_D]; where PART_D < BLOCK_D, pointers to them [BLOCK_M], read part by part.
    """
    key = _key(step, BLOCK_SIZE, PADDED, BLOCK_N)
    inside = (key < seq_len_kv) & (tl.arange(0, BLOCK_N) % PADDED < BLOCK_SIZE)
    offs_d = tl.arange(0, PART_D)
    # of shape [BLOCK_N, PART_D]
    at = k_head + key.to(tl.int64)[:, None] * stride_n + offs_d[None, :]
    if PART_D < BLOCK_D:
        logits = tl.zeros([q.shape[0], BLOCK_N], tl.float32)
        for start in range(0, HEAD_DIM, PART_D):
            held = (start + offs_d < HEAD_DIM)[None, :]
            part = tl.load(q[:, None] + start + offs_d[None, :], mask=is_row[:, None] & held, other=0.0)
            k = tl.load(at + start, mask=inside[:, None] & held, other=0.0)
            logits = tl.dot(part, tl.trans(k), logits, input_precision="ieee")
    elif MASKED:
        k = tl.load(at, mask=inside[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee")
    elif HEAD_DIM < BLOCK_D:
        k = tl.load(at, mask=(offs_d < HEAD_DIM)[None, :], other=0.0)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee")
    else:
        logits = tl.dot(q, tl.trans(tl.load(at)), input_precision="ieee")
    if MASKED:
        seen = inside[None, :]
        if IS_CAUSAL:
            seen = seen & (key[None, :] <= position[:, None])
        logits = tl.where(seen, logits, float("-inf"))
    return logits


@triton.jit
def _fold(logits, row_max, row_sum, scale_log2, MASKED: tl.constexpr):
    """One online step of a base-2 log-sum-exp: the new maxima and sums [BLOCK_M]."""
    new_max = tl.maximum(row_max, tl.max(logits, 1) * scale_log2)
    shift = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
    weights = tl.exp2(logits * scale_log2 - shift[:, None])
    return new_max, row_sum * tl.exp2(row_max - shift) + tl.sum(weights, 1)


@triton.jit
def _store_sums(out_tile, weights, step, share, blocks, ROWS: tl.constexpr, PADDED: tl.constexpr):
    """Sums of weights [BLOCK_M, BLOCK_N] per tile of ROWS rows and block of PADDED keys, times the tiles' `share`."""
    TILES: tl.constexpr = weights.shape[0] // ROWS
    BLOCKS: tl.constexpr = weights.shape[1] // PADDED
    # of shape [BLOCK_M, BLOCKS]
    by_row = tl.sum(tl.reshape(weights, [weights.shape[0], BLOCKS, PADDED]), 2)
    # of shape [TILES, BLOCKS]
    sums = tl.sum(tl.reshape(by_row, [TILES, ROWS, BLOCKS]), 1) * share[:, None]
    block = step * BLOCKS + tl.arange(0, BLOCKS)
    tl.store(out_tile[:, None] + block[None, :], sums, mask=(share > 0)[:, None] & (block < blocks)[None, :])


@triton.jit
def _block_mass(q_ptr, k_ptr, out_ptr, tiles_ptr, q_strides, k_strides, scale_log2, heads, kv_heads, tiles, blocks,
                seq_len_q, seq_len_kv, QUERY_TILE: tl.constexpr, ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
                PADDED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                BLOCK_D: tl.constexpr, PART_D: tl.constexpr, IS_CAUSAL: tl.constexpr):  # fmt: skip
    TILES: tl.constexpr = BLOCK_M // ROWS
    chunks = tl.cdiv(tiles, TILES)
    program = tl.program_id(0).to(tl.int64)
    chunk = chunks - 1 - (program % chunks).to(tl.int32)
    batch = program // chunks // heads
    head = program // chunks % heads

    row = tl.arange(0, BLOCK_M)
    place = chunk * TILES + row // ROWS
    query = tl.load(tiles_ptr + place, mask=place < tiles, other=0) * QUERY_TILE + row % ROWS
    is_row = (place < tiles) & (row % ROWS < QUERY_TILE) & (query < seq_len_q)
    position = query + seq_len_kv - seq_len_q
    q = q_ptr + batch * q_strides[0] + head * q_strides[1] + query.to(tl.int64) * q_strides[2]
    if PART_D == BLOCK_D:
        offs_d = tl.arange(0, BLOCK_D)
        # of shape [BLOCK_M, BLOCK_D]
        q = tl.load(q[:, None] + offs_d[None, :], mask=is_row[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)
    k_head = k_ptr + batch * k_strides[0] + head * kv_heads // heads * k_strides[1]

    # Steps before `whole` lie inside what every row sees; those from `steps` on no row sees.
    STEP_KEYS: tl.constexpr = BLOCK_N // PADDED * BLOCK_SIZE
    whole, end = seq_len_kv, seq_len_kv
    if IS_CAUSAL:
        whole = tl.minimum(whole, tl.min(tl.where(is_row, position, 2147483646)) + 1)
        end = tl.minimum(end, tl.max(tl.where(is_row, position, -1)) + 1)
    steps = tl.cdiv(end, STEP_KEYS)
    whole = tl.minimum(tl.maximum(whole, 0) // STEP_KEYS, steps) if BLOCK_SIZE == PADDED else 0

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    for step in range(0, whole):
        logits = _logits(q, is_row, k_head, k_strides[2], step, position, seq_len_kv,
                         HEAD_DIM, BLOCK_D, PART_D, BLOCK_SIZE, PADDED, BLOCK_N, IS_CAUSAL, False)  # fmt: skip
        row_max, row_sum = _fold(logits, row_max, row_sum, scale_log2, False)
    for step in tl.range(whole, steps, num_stages=1):
        logits = _logits(q, is_row, k_head, k_strides[2], step, position, seq_len_kv,
                         HEAD_DIM, BLOCK_D, PART_D, BLOCK_SIZE, PADDED, BLOCK_N, IS_CAUSAL, True)  # fmt: skip
        row_max, row_sum = _fold(logits, row_max, row_sum, scale_log2, True)
    # +inf makes the weights of what is no row, and of a row without a key, exactly 0.
    counts = is_row & (row_sum > 0)
    lse = tl.where(counts, row_max + tl.log2(tl.where(counts, row_sum, 1.0)), float("inf"))

    slot = chunk * TILES + tl.arange(0, TILES)
    first = tl.load(tiles_ptr + slot, mask=slot < tiles, other=0) * QUERY_TILE
    held = tl.minimum(seq_len_q - first, QUERY_TILE).to(tl.float32)
    share = tl.where(slot < tiles, 1.0 / held, 0.0)
    out_tile = out_ptr + ((batch * heads + head) * tiles + slot) * blocks
    for step in range(0, whole):
        logits = _logits(q, is_row, k_head, k_strides[2], step, position, seq_len_kv,
                         HEAD_DIM, BLOCK_D, PART_D, BLOCK_SIZE, PADDED, BLOCK_N, IS_CAUSAL, False)  # fmt: skip
        _store_sums(out_tile, tl.exp2(logits * scale_log2 - lse[:, None]), step, share, blocks, ROWS, PADDED)
    for step in tl.range(whole, steps, num_stages=1):
        logits = _logits(q, is_row, k_head, k_strides[2], step, position, seq_len_kv,
                         HEAD_DIM, BLOCK_D, PART_D, BLOCK_SIZE, PADDED, BLOCK_N, IS_CAUSAL, True)  # fmt: skip
        _store_sums(out_tile, tl.exp2(logits * scale_log2 - lse[:, None]), step, share, blocks, ROWS, PADDED)


@dataclass(frozen=True)
class MassTile:
    """Rows, keys and columns of one product, and the launch shape, for one kind of call."""

    BLOCK_M: int
    BLOCK_N: int
    PART_D: int
    num_warps: int
    num_stages: int


def mass_tile(rows: int, tile_rows: int, block_size: int, head_dim: int, itemsize: int) -> MassTile:
    """Tile sizes for `rows` padded rows in all, in tiles of `tile_rows` padded rows.

    Measured on an H200, bf16, D 128, 16 heads, causal, ms at 16k / 64k / 128k keys: tiles of 128, 128×64 with 8 warps and
    3 stages 3.08 / 40.0 / 159; 4 warps 3.03 / 41.7 / 165; 4 warps, 2 stages 3.42 / 46 / 175; 128×128, 8 warps, 3 stages
    3.26 / 49 / 193. Tiles of one query, which add no rows up, at 64k: 8 warps 54.2, 4 warps 44.7. fp32 at 16k: 89.
    """
    padded, block_d = triton.next_power_of_2(block_size), max(16, triton.next_power_of_2(head_dim))
    block_m = max(tile_rows, min(128, max(16, triton.next_power_of_2(rows))))
    if itemsize == 4:
        # Products on the vector units hold both operands' columns in registers: whole ones spill 10 to 20 KB a thread.
        return MassTile(block_m, max(padded, 32), min(32, block_d), 8, 1)
    warps = 8 if block_m == 128 and tile_rows > 1 else 4
    return MassTile(block_m, max(padded, 64), block_d, warps, 3 if head_dim <= 128 else 2)


def mass_gap(tiling: Tiling, head_dim: int, dtype: str, scale: float) -> str | None:
    """Why this kernel cannot do a call, or None."""
    if dtype not in ("float16", "bfloat16", "float32"):
        return f"the Triton block mass takes float16, bfloat16 and float32, not {dtype}"
    if head_dim > 256:
        return f"the Triton block mass takes head dims up to 256, not {head_dim}"
    if not 16 <= tiling.block_size <= 128:
        return f"the Triton block mass takes block sizes of 16 to 128, not {tiling.block_size}"
    if tiling.query_tile > TALLEST_TILE:
        return f"the Triton block mass takes query tiles up to {TALLEST_TILE}, not {tiling.query_tile}"
    if scale <= 0:
        return f"the Triton block mass takes a positive scale, not {scale}"
    return None


def block_mass(
    q: Tensor, k: Tensor, tiling: Tiling, scale: float, tiles: Tensor | None = None, tile: MassTile | None = None
) -> Tensor:
    """Exact share of attention of each block, mean over a tile's rows: fp32 [B, H, tiles, blocks].

    q: [B, H, M, D], k: [B, G, N, D], any strides with a contiguous last dimension; `mass_gap` is None for them. tiles: the
    query tiles wanted, int [T] (default all). tile: tile sizes to try instead of the chosen ones.
    """
    batch, heads, _, head_dim = q.shape
    chosen = torch.arange(tiling.tiles, device=q.device) if tiles is None else tiles
    rows = triton.next_power_of_2(tiling.query_tile)
    tile = tile or mass_tile(len(chosen) * rows, rows, tiling.block_size, head_dim, q.element_size())
    # Zeros: blocks after a tile's last query are not visited.
    out = torch.zeros(batch, heads, len(chosen), tiling.blocks, dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out
    grid = (batch * heads * triton.cdiv(len(chosen) * rows, tile.BLOCK_M),)
    sizes = (heads, k.shape[1], len(chosen), tiling.blocks, tiling.seq_len_q, tiling.seq_len_kv)
    _block_mass[grid](
        q,
        k,
        out,
        chosen.to(torch.int32),
        q.stride()[:3],
        k.stride()[:3],
        scale * LOG2_E,
        *sizes,
        QUERY_TILE=tiling.query_tile,
        ROWS=rows,
        BLOCK_SIZE=tiling.block_size,
        PADDED=triton.next_power_of_2(tiling.block_size),
        HEAD_DIM=head_dim,
        BLOCK_M=tile.BLOCK_M,
        BLOCK_N=tile.BLOCK_N,
        PART_D=tile.PART_D,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        IS_CAUSAL=tiling.causal,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out
