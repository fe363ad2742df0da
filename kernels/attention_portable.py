"""Block-sparse attention forward in Triton, for every shape and device that it serves; `kernels.attention_fwd` chooses it.

For a row i of a query tile with listed blocks L:  o_i = Σ_{x ∈ L, x ≤ p_i} exp(s·q_i·k_x - lse_i)·v_x, where
lse_i = logsumexp over the same keys; no key gives o_i = 0 and lse_i = -inf.

Tiling: the rows that share one list are the query heads of a set × the queries of a tile, flattened (head-major). One
program = BLOCK_M of these rows; it streams its list in steps of BLOCK_N keys (BLOCK_N / block_size blocks at once, so
that small blocks still fill a matrix instruction and the accumulator is rescaled once per step). Complete blocks, a
prefix of an ascending list, need no mask; only the rest (the blocks that the tile overlaps, a ragged end) is masked.
Cost: 2·(D + Dv) operations per (row, key) pair; each step reads BLOCK_N·(D + Dv) elements through L2, shared by BLOCK_M
rows. Bound by the matrix units and the exponentials at 128 rows, by L2 at few rows (token level).
Sums, maxima and the accumulator are fp32; the weights are rounded to v's dtype before they meet v.
Source: FlashAttention-2 (arXiv 2307.08691) for the online softmax and the saved log-sum-exp.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from pyramidbench.selection import BlockSelection

LOG2_E = 1.4426950408889634
LIST_CHUNK = tl.constexpr(128)


@triton.jit
def _fold(scores, row_max, row_sum, scale_log2, MASKED: tl.constexpr):
    """One online-softmax step, base 2: the weights of `scores` [M, N] and the new maxima, sums and rescaling factor [M]."""
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
    shift = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
    weights = tl.exp2(scores * scale_log2 - shift[:, None])
    rescale = tl.exp2(row_max - shift)
    return weights, new_max, row_sum * rescale + tl.sum(weights, 1), rescale


@triton.jit
def load_rows(tile_ptr, key, stride, offs_d, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows `key` of a tile whose pointers hold the columns: [BLOCK_N, BLOCK_D]; only odd head dims need a mask."""
    if HEAD_DIM == BLOCK_D:
        return tl.load(tile_ptr + key[:, None].to(tl.int64) * stride)
    return tl.load(tile_ptr + key[:, None].to(tl.int64) * stride, mask=(offs_d < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def complete_prefix(
    list_ptr, count, tile, seq_len_q, seq_len_kv,
    QUERY_TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    """How many blocks of a list have all their keys at or before the tile's first query, and before the end of the keys."""
    visible = seq_len_kv // BLOCK_SIZE
    if IS_CAUSAL:
        visible = tl.minimum(visible, tl.maximum(tile * QUERY_TILE + seq_len_kv - seq_len_q + 1, 0) // BLOCK_SIZE)
    complete = 0
    for start in range(0, count, LIST_CHUNK):
        slot = start + tl.arange(0, LIST_CHUNK)
        block = tl.load(list_ptr + slot, mask=slot < count, other=2147483647)
        complete += tl.sum((block < visible).to(tl.int32))
    return complete


@triton.jit
def _store(
    out_ptr, lse_ptr, acc, row_max, row_sum, out_row, row_mask, offs_dv, HEAD_DIM_V: tl.constexpr
):  # fmt: skip
    empty = row_sum == 0
    row_sum = tl.where(empty, 1.0, row_sum)
    out = acc / row_sum[:, None]
    lse = tl.where(empty, float("-inf"), (row_max + tl.log2(row_sum)) * 0.6931471805599453)
    out_mask = row_mask[:, None] & (offs_dv < HEAD_DIM_V)[None, :]
    out_at = out_ptr + out_row[:, None] * HEAD_DIM_V + offs_dv[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=out_mask)
    tl.store(lse_ptr + out_row, lse, mask=row_mask)


@triton.jit
def _attend_fwd(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, indices_ptr, counts_ptr, k_blocks, v_blocks, q_strides, k_strides, v_strides,
    scale_log2, heads, kv_heads, sets, tiles, width, seq_len_q, seq_len_kv,
    QUERY_TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    IS_CAUSAL: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    group = heads // sets
    chunks = tl.cdiv(group * QUERY_TILE, BLOCK_M)
    program = tl.program_id(0).to(tl.int64)
    chunk = (program % chunks).to(tl.int32)
    listed = program // chunks
    tile = (listed % tiles).to(tl.int32)
    batch = listed // tiles // sets
    which = listed // tiles % sets

    row = chunk * BLOCK_M + tl.arange(0, BLOCK_M)
    head = which * group + row // QUERY_TILE
    query = tile * QUERY_TILE + row % QUERY_TILE
    row_mask = (row < group * QUERY_TILE) & (query < seq_len_q)
    position = query + seq_len_kv - seq_len_q
    offs_n, offs_d, offs_dv = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    STEP: tl.constexpr = BLOCK_N // BLOCK_SIZE if BLOCK_N > BLOCK_SIZE else 1

    q_row = batch * q_strides[0] + head * q_strides[1] + query.to(tl.int64) * q_strides[2]
    kv_head = which * kv_heads // sets
    k_tile = k_ptr + batch * k_strides[0] + kv_head * k_strides[1] + offs_d[None, :]
    v_tile = v_ptr + batch * v_strides[0] + kv_head * v_strides[1] + offs_dv[None, :]
    indices_ptr += listed * width
    count = tl.load(counts_ptr + listed)

    # of shape [BLOCK_M, BLOCK_D]
    q_mask = row_mask[:, None] & (offs_d < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + q_row[:, None] + offs_d[None, :], mask=q_mask, other=0.0)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)

    complete = 0
    if BLOCK_N % BLOCK_SIZE == 0:
        complete = complete_prefix(indices_ptr, count, tile, seq_len_q, seq_len_kv, QUERY_TILE, BLOCK_SIZE, IS_CAUSAL)
    complete = complete // STEP * STEP
    for start in range(0, complete, STEP):
        if USE_TMA:
            first = tl.load(indices_ptr + start) * BLOCK_SIZE
            # of shape [BLOCK_N, BLOCK_D]
            k = k_blocks.load([batch.to(tl.int32), kv_head.to(tl.int32), first, 0]).reshape(BLOCK_N, BLOCK_D)
        else:
            # of shape [BLOCK_N]
            key = tl.load(indices_ptr + start + offs_n // BLOCK_SIZE) * BLOCK_SIZE + offs_n % BLOCK_SIZE
            # of shape [BLOCK_N, BLOCK_D]
            k = load_rows(k_tile, key, k_strides[2], offs_d, HEAD_DIM, BLOCK_D)
        # of shape [BLOCK_M, BLOCK_N]
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        weights, row_max, row_sum, rescale = _fold(scores, row_max, row_sum, scale_log2, False)
        # of shape [BLOCK_N, BLOCK_DV]
        if USE_TMA:
            v = v_blocks.load([batch.to(tl.int32), kv_head.to(tl.int32), first, 0]).reshape(BLOCK_N, BLOCK_DV)
        else:
            v = load_rows(v_tile, key, v_strides[2], offs_dv, HEAD_DIM_V, BLOCK_DV)
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")

    for start in tl.range(complete, count, STEP, num_stages=1):
        slot = start + offs_n // BLOCK_SIZE
        slot_mask = (slot < count) & (offs_n < STEP * BLOCK_SIZE)
        # of shape [BLOCK_N]
        key = tl.load(indices_ptr + slot, mask=slot_mask, other=0) * BLOCK_SIZE + offs_n % BLOCK_SIZE
        key_mask = slot_mask & (key < seq_len_kv)
        seen = key_mask[None, :]
        if IS_CAUSAL:
            seen = seen & (key[None, :] <= position[:, None])
        key = key.to(tl.int64)
        # of shape [BLOCK_N, BLOCK_D]
        k_mask = key_mask[:, None] & (offs_d < HEAD_DIM)[None, :]
        k = tl.load(k_tile + key[:, None] * k_strides[2], mask=k_mask, other=0.0)
        # of shape [BLOCK_M, BLOCK_N]
        scores = tl.where(seen, tl.dot(q, tl.trans(k), input_precision="ieee"), float("-inf"))
        weights, row_max, row_sum, rescale = _fold(scores, row_max, row_sum, scale_log2, True)
        # of shape [BLOCK_N, BLOCK_DV]
        v_mask = key_mask[:, None] & (offs_dv < HEAD_DIM_V)[None, :]
        v = tl.load(v_tile + key[:, None] * v_strides[2], mask=v_mask, other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")

    out_row = (batch * heads + head) * seq_len_q + query
    _store(out_ptr, lse_ptr, acc, row_max, row_sum, out_row, row_mask, offs_dv, HEAD_DIM_V)


@dataclass(frozen=True)
class AttendTile:
    """Tile sizes and launch shape of `_attend_fwd` for one kind of call. `tma`: complete blocks come by the copy engine."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int
    tma: bool = False


def attend_tile(
    rows: int, block_size: int, head_dim: int, head_dim_v: int, itemsize: int, *, tma: bool = False
) -> AttendTile:
    """Tile sizes for lists shared by `rows` rows (query heads of a set × queries of a tile)."""
    block_m = min(128, max(16, triton.next_power_of_2(rows)))
    block = triton.next_power_of_2(block_size)
    widest = max(head_dim, head_dim_v)
    if itemsize == 4:
        # fp32 products run on the vector units; more rows or fewer warps spill.
        return AttendTile(min(block_m, 64 if widest <= 128 else 32), max(block, 32), 8, 1)
    if tma and block == block_size >= 64:
        # 128 rows, D 128, blocks of 64, H200, 64k and 256k keys: 4.27 and 19.6 ms; 8 warps 4.45 and 20.0; pointers instead
        # of the copy engine 6.2 and 25.9; two blocks a step, or the next block's products before the softmax: slower.
        rows = min(block_m, 64) if widest > 128 else block_m
        return AttendTile(rows, block, 8 if rows == 128 and block == 128 else 4, 2, tma=True)
    if block_m == 128 and widest <= 128:
        return AttendTile(128, max(block, 64), 8, 3)
    return AttendTile(min(block_m, 64), max(block, 64), 4, 2 if widest > 128 else 3)


def attend_portable(
    q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection, scale: float, tile: AttendTile
) -> tuple[Tensor, Tensor]:
    """Output [B, H, M, Dv] in q's dtype and log-sum-exp [B, H, M] in fp32; any strides with a contiguous last dimension."""
    batch, heads, seq_len_q, head_dim = q.shape
    kv_heads, seq_len_kv, head_dim_v = k.shape[1], k.shape[2], v.shape[3]
    indices, counts = selection.indices.contiguous(), selection.counts.contiguous()
    sets, tiles, width = indices.shape[1:]
    out = torch.empty(batch, heads, seq_len_q, head_dim_v, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, seq_len_q, dtype=torch.float32, device=q.device)
    block_d, block_dv = (max(16, triton.next_power_of_2(dim)) for dim in (head_dim, head_dim_v))
    k_blocks, v_blocks = (
        TensorDescriptor.from_tensor(x, [1, 1, tile.BLOCK_N, block]) if tile.tma else None
        for x, block in ((k, block_d), (v, block_dv))
    )
    grid = (batch * sets * tiles * triton.cdiv(heads // sets * selection.query_tile, tile.BLOCK_M),)
    _attend_fwd[grid](
        q, k, v, out, lse, indices, counts, k_blocks, v_blocks, q.stride()[:3], k.stride()[:3], v.stride()[:3],
        scale * LOG2_E, heads, kv_heads, sets, tiles, width, seq_len_q, seq_len_kv,
        QUERY_TILE=selection.query_tile, BLOCK_SIZE=selection.block_size, HEAD_DIM=head_dim, HEAD_DIM_V=head_dim_v,
        BLOCK_M=tile.BLOCK_M, BLOCK_N=tile.BLOCK_N, BLOCK_D=block_d, BLOCK_DV=block_dv,
        IS_CAUSAL=selection.causal, USE_TMA=tile.tma, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out, lse
