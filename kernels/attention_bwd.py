"""Block-sparse attention backward in Triton: gradients in q, k and v with the lists as constants.

With p_ix = exp(s·q_i·k_x - lse_i) over the listed keys x ≤ p_i, δ_i = o_i·do_i and ds_ix = p_ix·(do_i·v_x - δ_i):
dq_i = s·Σ_x ds_ix·k_x,  dk_x = s·Σ_i ds_ix·q_i,  dv_x = Σ_i p_ix·do_i.
 1. attention_dq.py: dq, list by list, and the rows' δ; where few rows share a list (token level), attention_dq_by_key.py.
 2. transpose.py: each block's pairs. 3. attention_dkdv.py: dk and dv, block by block. 4. attention_pieces.py: the sums of
 blocks that many tiles list. Key/value heads go through 2 to 4 in windows, so that scratch stays bounded.
Lists whose table outgrows TABLE_BYTES for one head (token level past 128k queries) go through 2 to 4 in runs of tiles, one
after the other, which add to fp32 sums of that head.
Cost: 2·(3·D + 2·Dv) operations a (row, key) pair for five products, and 2·(D + Dv) to compute two of them twice.
Memory beside the results: 8 bytes a row; 8 bytes a (tile, block) pair, for a window of heads; TABLE_BYTES and PIECE_BYTES at
most; with runs also 4·N·(D + Dv) bytes. No atomics in any sum: two runs agree bit for bit.
The twin is autograd through `kernels.attention.sparse_attention`.
Source: FlashAttention-2 (arXiv 2307.08691), algorithm 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from pyramidbench.kernels.attention_by_key import pays_by_key
from pyramidbench.kernels.attention_dkdv import dkdv_tile, run_dkdv
from pyramidbench.kernels.attention_dq import RowStats, dq_tile, run_dq
from pyramidbench.kernels.attention_dq_by_key import GradientTile, gradient_tile, run_dq_by_key
from pyramidbench.kernels.attention_fwd import has_tile_copies
from pyramidbench.kernels.attention_pieces import add_pieces, piece_places, pieces_room
from pyramidbench.kernels.attention_portable import AttendTile
from pyramidbench.kernels.transpose import PART, Cut, Transposed, transpose, transposed_room
from pyramidbench.problem import Problem
from pyramidbench.selection import BlockSelection
from pyramidbench.stages import part
from pyramidbench.tiling import Tiling

TABLE_BYTES = 64 * 2**20
PIECE_BYTES = 512 * 2**20
CHUNK_ROWS = 16384
"""Rows that one program of `_attend_dkdv` streams at most. H200, ms for 4k/8k/16k/32k/64k rows: tiles of 128 at 64k keys
10.0/9.3/9.0/9.7/9.9, at 256k 48.5/47.7/42.7/42.6/41.8; token level at 64k 12.6/11.4/11.2/12.5/16.0."""
CHUNK_ROWS_FP32 = 512
"""The same for fp32 inputs: sums over 16 384 rows were 7 times less exact than the twin's on an H200, at a block that every
query lists."""


@dataclass(frozen=True)
class Plan:
    """How dK and dV are cut: lists [key/value heads, their sets × tiles, S] in segments, `tabled` segments a transposition,
    `windowed` of them a launch, `most_pairs` pairs a chunk."""

    cut: Cut
    tabled: int
    windowed: int
    most_pairs: int


def plan(selection: BlockSelection, kv_heads: int, rows: int, dims: int, chunk_rows: int) -> Plan:
    """rows: of a list; dims: D + Dv; chunk_rows: rows that one program streams at most."""
    (batch, sets, tiles, width), blocks = selection.indices.shape, selection.tiling.blocks
    tiles *= sets // kv_heads
    part_bytes = 8 * blocks
    longest = min(TABLE_BYTES // part_bytes * PART.value, (2**31 - 1) // width)
    runs = triton.cdiv(tiles, max(PART.value, longest))
    cut = Cut(batch * kv_heads, tiles, triton.cdiv(tiles, runs))
    piece_bytes = 4 * selection.block_size * dims
    # Pieces of one segment must fit.
    fewest = triton.cdiv(2 * cut.run * width * piece_bytes, PIECE_BYTES)
    most_pairs = max(1, chunk_rows // rows, fewest)
    if runs > 1:
        return Plan(cut, 1, 1, most_pairs)
    segment_bytes = piece_places(cut.run * width, most_pairs) * piece_bytes
    most_tabled = TABLE_BYTES // (cut.parts() * part_bytes)
    launches = triton.cdiv(cut.segments, max(1, min(PIECE_BYTES // segment_bytes, most_tabled)))
    windowed = triton.cdiv(cut.segments, launches)
    tabled = max(1, most_tabled // windowed) * windowed
    return Plan(cut, min(tabled, cut.segments), windowed, most_pairs)


def scratch_bytes(problem: Problem, tiling: Tiling, sets: int, longest: int) -> float:
    """Bytes of tables and pieces at most, for `sets` sets a batch of lists up to `longest` blocks."""
    rows, kv_heads = problem.heads // sets * tiling.query_tile, problem.batch * problem.kv_heads
    tiles = tiling.tiles * sets // problem.kv_heads
    chunk_rows = CHUNK_ROWS_FP32 if problem.itemsize == 4 else CHUNK_ROWS
    places = piece_places(tiles * longest, max(1, chunk_rows // rows))
    pieces = 4.0 * kv_heads * places * tiling.block_size * (problem.head_dim + problem.head_dim_v)
    tables = 8.0 * kv_heads * triton.cdiv(tiles, PART.value) * tiling.blocks
    return min(pieces, PIECE_BYTES) + min(tables, TABLE_BYTES)


def gradient_of_queries(
    inputs: tuple[Tensor, Tensor, Tensor], outputs: tuple[Tensor, Tensor, Tensor], lists: tuple[Tensor, Tensor],
    selection: BlockSelection, scale: float, tile: AttendTile | GradientTile,
) -> tuple[Tensor, RowStats]:  # fmt: skip
    """dq and the rows' statistics, as `attention_dq.run_dq`, by the kernel that the type of `tile` names."""
    if isinstance(tile, GradientTile):
        return run_dq_by_key(inputs, outputs, lists, selection, scale, tile)
    return run_dq(inputs, outputs, lists, selection, scale, tile)


def _part(by_block: Transposed, begin: int, end: int) -> Transposed:
    """Some of the segments of a transposition."""
    return Transposed(*(getattr(by_block, name)[begin:end] for name in Transposed.__dataclass_fields__))


def gradients_of_keys(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor], stats: RowStats, lists: tuple[Tensor, Tensor],
    selection: BlockSelection, scale: float, tile: AttendTile, plan: Plan,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dk and dv, contiguous [B, G, N, ..] in k's and v's dtypes. inputs: q, k, v, d_out; lists: indices, counts."""
    (_, k, v, _), (indices, counts), cut = inputs, lists, plan.cut
    lowest = torch.zeros_like(counts)
    grouped = indices.view(cut.sets, cut.tiles, -1)
    width, runs = grouped.shape[2], cut.runs
    by_block = transposed_room(cut, plan.tabled, width, selection.tiling.blocks, plan.most_pairs, k.device)
    places, shape = piece_places(cut.run * width, plan.most_pairs), (selection.block_size, k.shape[3], v.shape[3])
    pieces = pieces_room(plan.windowed, places, shape, plan.most_pairs, k.device)
    results = torch.empty(k.shape, dtype=k.dtype, device=k.device), torch.empty(v.shape, dtype=v.dtype, device=v.device)
    sums = [result.view(-1, *result.shape[2:]) for result in results]
    wide = [torch.zeros(1, *x.shape[1:], dtype=torch.float32, device=k.device) for x in sums] if runs > 1 else []
    for first in range(0, cut.segments, plan.tabled):
        with part("transpose"):
            transpose(grouped, lowest, counts, cut, first, plan.most_pairs, by_block)
        for start in range(first, min(first + plan.tabled, cut.segments), plan.windowed):
            end = min(start + plan.windowed, first + plan.tabled, cut.segments)
            window = _part(by_block, start - first, end - first)
            into = (wide[0], wide[1]) if runs > 1 else (sums[0][start:end], sums[1][start:end])
            run_dkdv(inputs, stats, window, start, runs, pieces, into, selection, scale, tile)
            add_pieces(pieces, window, runs, into)
        if runs > 1 and (first + 1) % runs == 0:
            for result, total in zip(sums, wide):
                result[first // runs] = total[0]
                total.zero_()
    return results


def chosen_tiles(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, selection: BlockSelection
) -> tuple[AttendTile | GradientTile, AttendTile]:
    """Tile sizes of dQ, by their type list by list or block by block, and of dK and dV."""
    rows = q.shape[1] // selection.indices.shape[1] * selection.query_tile
    sizes = (q.shape[3], v.shape[3], q.element_size())
    by_blocks = dkdv_tile(rows, selection.query_tile, selection.block_size, *sizes, tma=has_tile_copies(q, d_out))
    if pays_by_key(rows, selection.counts.numel(), *sizes):
        return gradient_tile(rows, selection.indices.shape[-1], selection.tiling.blocks, *sizes), by_blocks
    return dq_tile(rows, selection.block_size, *sizes, tma=has_tile_copies(k, v)), by_blocks


def attend_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, selection: BlockSelection, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv: contiguous, in the shapes and dtypes of q, k, v, for the gradient `d_out` [B, H, M, Dv] of `out`.

    out, lse: what `attention_fwd.attend` gave for the same arguments. q, k, v, out: any strides with a contiguous last
    dimension; d_out: any strides. A row without a key, and a key that no row attends to, get zeros.
    """
    indices, counts = selection.indices.contiguous(), selection.counts.contiguous()
    if 0 in (indices.numel(), k.numel(), v.numel()):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    # A sum's gradient is one element at every place; the copy engine takes no stride of 0.
    if d_out.stride(3) != 1 or 0 in d_out.stride():
        d_out = d_out.contiguous()
    of_queries, by_blocks = chosen_tiles(q, k, v, d_out, selection)
    outputs = (out, d_out, lse.contiguous())
    dq, stats = gradient_of_queries((q, k, v), outputs, (indices, counts), selection, scale, of_queries)
    rows = q.shape[1] // indices.shape[1] * selection.query_tile
    chunk_rows = CHUNK_ROWS_FP32 if q.dtype == torch.float32 else CHUNK_ROWS
    cuts = plan(selection, k.shape[1], rows, k.shape[3] + v.shape[3], chunk_rows)
    dk, dv = gradients_of_keys(
        (q, k, v, d_out), stats, (indices, counts), selection, scale, by_blocks, cuts
    )  # fmt: skip
    return dq, dk, dv
