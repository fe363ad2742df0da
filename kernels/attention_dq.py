"""Gradient of block-sparse attention in the queries, list by list: the first step of `kernels.attention_bwd`.

For a row i of a tile with listed blocks L, with p_ix = exp(s·q_i·k_x - lse_i) and δ_i = Σ_d o_id·do_id:
dq_i = s · Σ_{x ∈ L, x ≤ p_i} p_ix·(do_i·v_x - δ_i)·k_x. A row without a key has lse_i = -inf and dq_i = 0.
Tiling: as in attention_portable.py, one program = BLOCK_M of the rows that share a list (query heads of a set × queries of a
tile, head-major), which streams its list's keys, BLOCK_N a step; complete blocks need no mask. It also writes what dK and
dV need of its rows: δ, and lse in base 2 with +inf for a row without a key, so that every weight there is 0.
Cost: 2·(2·D + Dv) operations per (row, key) pair; each step reads BLOCK_N·(D + Dv) elements through L2, shared by BLOCK_M
rows. Bound by the matrix units and the exponentials at 128 rows, by L2 at few rows (token level).
Sums are fp32; the gradients of the logits are rounded to k's dtype before they meet k.
Source: FlashAttention-2 (arXiv 2307.08691), algorithm 2, with its loops over dQ and over dK, dV in launches of their own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from pyramidbench.kernels.attention_portable import LOG2_E, AttendTile, complete_prefix, load_rows
from pyramidbench.selection import BlockSelection


@triton.jit
def _load_row_stats(
    lse_ptr, out_at, log_sums_ptr, delta_ptr, d_out, stats_row, row_mask, out_mask
):  # fmt: skip
    """The rows' log-sum-exps, base 2, and δ [BLOCK_M], which it also writes for dK and dV."""
    lse = tl.load(lse_ptr + stats_row, mask=row_mask, other=float("-inf"))
    log_sum = tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)
    out = tl.load(out_at, mask=out_mask, other=0.0)
    delta = tl.sum(out.to(tl.float32) * d_out.to(tl.float32), 1)
    tl.store(log_sums_ptr + stats_row, log_sum, mask=row_mask)
    tl.store(delta_ptr + stats_row, delta, mask=row_mask)
    return log_sum, delta


@triton.jit
def _attend_dq(
    q_ptr, k_ptr, v_ptr, out_ptr, d_out_ptr, lse_ptr, dq_ptr, log_sums_ptr, delta_ptr, indices_ptr, counts_ptr,
    k_blocks, v_blocks, q_strides, k_strides, v_strides, out_strides, d_out_strides,
    scale, scale_log2, heads, kv_heads, sets, tiles, width, seq_len_q, seq_len_kv,
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

    kv_head = which * kv_heads // sets
    k_tile = k_ptr + batch * k_strides[0] + kv_head * k_strides[1] + offs_d[None, :]
    v_tile = v_ptr + batch * v_strides[0] + kv_head * v_strides[1] + offs_dv[None, :]
    indices_ptr += listed * width
    count = tl.load(counts_ptr + listed)

    # of shape [BLOCK_M, BLOCK_D]
    q_mask = row_mask[:, None] & (offs_d < HEAD_DIM)[None, :]
    q_row = batch * q_strides[0] + head * q_strides[1] + query.to(tl.int64) * q_strides[2]
    q = tl.load(q_ptr + q_row[:, None] + offs_d[None, :], mask=q_mask, other=0.0)
    # of shape [BLOCK_M, BLOCK_DV]
    out_mask = row_mask[:, None] & (offs_dv < HEAD_DIM_V)[None, :]
    d_out_row = batch * d_out_strides[0] + head * d_out_strides[1] + query.to(tl.int64) * d_out_strides[2]
    d_out = tl.load(d_out_ptr + d_out_row[:, None] + offs_dv[None, :], mask=out_mask, other=0.0)
    out_row = batch * out_strides[0] + head * out_strides[1] + query.to(tl.int64) * out_strides[2]
    out_at = out_ptr + out_row[:, None] + offs_dv[None, :]
    stats_row = (batch * heads + head) * seq_len_q + query
    log_sum, delta = _load_row_stats(
        lse_ptr, out_at, log_sums_ptr, delta_ptr, d_out, stats_row, row_mask, out_mask
    )  # fmt: skip
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    # Steps count the listed keys, whatever their block.
    complete = complete_prefix(indices_ptr, count, tile, seq_len_q, seq_len_kv, QUERY_TILE, BLOCK_SIZE, IS_CAUSAL)
    complete = complete * BLOCK_SIZE // BLOCK_N * BLOCK_N
    for start in range(0, complete, BLOCK_N):
        # k of shape [BLOCK_N, BLOCK_D], v [BLOCK_N, BLOCK_DV]
        if USE_TMA:
            first = tl.load(indices_ptr + start // BLOCK_SIZE) * BLOCK_SIZE + start % BLOCK_SIZE
            k = k_blocks.load([batch.to(tl.int32), kv_head.to(tl.int32), first, 0]).reshape(BLOCK_N, BLOCK_D)
            v = v_blocks.load([batch.to(tl.int32), kv_head.to(tl.int32), first, 0]).reshape(BLOCK_N, BLOCK_DV)
        else:
            place = start + offs_n
            key = tl.load(indices_ptr + place // BLOCK_SIZE) * BLOCK_SIZE + place % BLOCK_SIZE
            k = load_rows(k_tile, key, k_strides[2], offs_d, HEAD_DIM, BLOCK_D)
            v = load_rows(v_tile, key, v_strides[2], offs_dv, HEAD_DIM_V, BLOCK_DV)
        # of shape [BLOCK_M, BLOCK_N]
        weights = tl.exp2(tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2 - log_sum[:, None])
        d_scores = weights * (tl.dot(d_out, tl.trans(v), input_precision="ieee") - delta[:, None])
        acc = tl.dot(d_scores.to(k.dtype), k, acc, input_precision="ieee")

    for start in tl.range(complete, count * BLOCK_SIZE, BLOCK_N, num_stages=1):
        # of shape [BLOCK_N]
        place = start + offs_n
        listed_mask = place < count * BLOCK_SIZE
        block = tl.load(indices_ptr + place // BLOCK_SIZE, mask=listed_mask, other=0)
        key = block * BLOCK_SIZE + place % BLOCK_SIZE
        key_mask = listed_mask & (key < seq_len_kv)
        # A key that no row sees stands past every position.
        limit = position if IS_CAUSAL else tl.full([BLOCK_M], 2147483646, tl.int32)
        seen = tl.where(key_mask, key, 2147483647)[None, :] <= limit[:, None]
        key = key.to(tl.int64)
        # k of shape [BLOCK_N, BLOCK_D], v [BLOCK_N, BLOCK_DV]
        k_mask = key_mask[:, None] & (offs_d < HEAD_DIM)[None, :]
        k = tl.load(k_tile + key[:, None] * k_strides[2], mask=k_mask, other=0.0)
        v_mask = key_mask[:, None] & (offs_dv < HEAD_DIM_V)[None, :]
        v = tl.load(v_tile + key[:, None] * v_strides[2], mask=v_mask, other=0.0)
        # of shape [BLOCK_M, BLOCK_N]
        weights = tl.exp2(tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2 - log_sum[:, None])
        d_scores = weights * (tl.dot(d_out, tl.trans(v), input_precision="ieee") - delta[:, None])
        d_scores = tl.where(seen, d_scores, 0.0)
        acc = tl.dot(d_scores.to(k.dtype), k, acc, input_precision="ieee")

    dq_at = dq_ptr + stats_row[:, None] * HEAD_DIM + offs_d[None, :]
    tl.store(dq_at, (acc * scale).to(dq_ptr.dtype.element_ty), mask=q_mask)


class RowStats(NamedTuple):
    """What dK and dV need of the rows, fp32 [B, H, M]: log-sum-exps in base 2 (+inf for a row with no key), and δ."""

    log_sums: Tensor
    delta: Tensor


def dq_tile(
    rows: int, block_size: int, head_dim: int, head_dim_v: int, itemsize: int, *, tma: bool = False
) -> AttendTile:
    """Tile sizes for lists shared by `rows` rows.

    H200, bf16, D 128, blocks of 64, ms by rows/warps/stages. Tiles of 128 at 256k, 16 heads: 64/4/2 26.9, 64/4/3 27.4,
    128/8/2 27.4, 128/8/3 28.2, 128/4/2 51.4. Token level at 64k, 32 heads in groups of 4: 16/2/2 37.4, 16/4/2 43.2, 16/4/3
    43.7. 32 keys a step: 37.8 at tile level; 128 keys by pointers: 48.9 at token level.
    """
    block_m = min(64, max(16, triton.next_power_of_2(rows)))
    block, widest = triton.next_power_of_2(block_size), max(head_dim, head_dim_v)
    if itemsize == 4:
        # fp32 products run on the vector units; more rows or keys spill.
        return AttendTile(min(block_m, 32), 32, 8, 1) if widest <= 128 else AttendTile(16, 16, 8, 1)
    # The copy engine takes a whole part of a block.
    tma = tma and block == block_size >= 64
    if widest > 128:
        return AttendTile(min(block_m, 64), 64, 8, 1, tma=tma)
    return AttendTile(block_m, 64, 2 if block_m == 16 else 4, 2, tma=tma)


def run_dq(
    inputs: tuple[Tensor, Tensor, Tensor], outputs: tuple[Tensor, Tensor, Tensor], lists: tuple[Tensor, Tensor],
    selection: BlockSelection, scale: float, tile: AttendTile,
) -> tuple[Tensor, RowStats]:  # fmt: skip
    """dq, contiguous [B, H, M, D] in q's dtype, and the rows' statistics. inputs: q, k, v; outputs: output, its gradient,
    log-sum-exp (contiguous); lists: indices, counts (contiguous)."""
    (q, k, v), (out, d_out, lse) = inputs, outputs
    batch, heads, seq_len_q, head_dim = q.shape
    sets, tiles, width = lists[0].shape[1:]
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    stats = RowStats(torch.empty_like(lse), torch.empty_like(lse))
    block_d, block_dv = (max(16, triton.next_power_of_2(dim)) for dim in (head_dim, v.shape[3]))
    blocks = [
        TensorDescriptor.from_tensor(x, [1, 1, tile.BLOCK_N, block]) if tile.tma else None
        for x, block in ((k, block_d), (v, block_dv))
    ]
    grid = (batch * sets * tiles * triton.cdiv(heads // sets * selection.query_tile, tile.BLOCK_M),)
    _attend_dq[grid](
        q, k, v, out, d_out, lse, dq, *stats, *lists, *blocks, *(x.stride()[:3] for x in (q, k, v, out, d_out)),
        scale, scale * LOG2_E, heads, k.shape[1], sets, tiles, width, seq_len_q, k.shape[2],
        QUERY_TILE=selection.query_tile, BLOCK_SIZE=selection.block_size, HEAD_DIM=head_dim, HEAD_DIM_V=v.shape[3],
        BLOCK_M=tile.BLOCK_M, BLOCK_N=tile.BLOCK_N, BLOCK_D=block_d, BLOCK_DV=block_dv,
        IS_CAUSAL=selection.causal, USE_TMA=tile.tma, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return dq, stats
