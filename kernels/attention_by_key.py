"""Block-sparse attention forward by key block, for few rows a list (token level); the twin is `kernels.attention`.

List by list (attention_portable.py) each (list, block) pair reads block·(D + Dv) elements through L2 and meets R =
group·query_tile rows, which fill a matrix product of 16 rows or more only where R is that large; block by block it reads its
R rows of q, and writes and reads R partial outputs: R·(D + 2·Dv) elements, and every product is full.
 1. attention_band.py: the blocks that neighbouring lists share, list-major. 2. transpose.py: the rest by block, for many
 windows of lists at once (key_windows.py). 3. attention_partials.py, window by window (so that the partial outputs fit):
 partial outputs of the rest, and their sum with the band's.
Cost: 2·(D + Dv) operations a (row, key) pair; scratch: PARTIAL_BYTES and TABLE_BYTES, whatever the length.
Bound: by memory, the partial outputs written and read; at short lengths by the host, 9 launches at least.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from pyramidbench.kernels.attention_band import run_band, run_middle
from pyramidbench.kernels.attention_partials import partials_room, run_combine, run_partials
from pyramidbench.kernels.key_windows import each_window, key_windows, longest_window
from pyramidbench.selection import BlockSelection

MOST_ROWS = 8
FEWEST_LISTS = 2**15
"""Measured on an H200, lists of 19 blocks: 4 rows at 256k keys 8.4 ms by key, 20.3 list by list; 16 rows at 64k 6.1 and 5.0.
What lies between, and fewer lists, is not measured."""


@dataclass(frozen=True)
class KeyTile:
    """Rows of a matrix product, launch shape and registers of `_partial` and `_band`; rows of a chunk, programs of
    `_partial` per multiprocessor; rows, warps and slots in flight of `_combine`; lists of a window."""

    BLOCK_M: int = 64
    num_warps: int = 4
    num_stages: int = 2
    registers: int = 168
    band_rows: int = 64
    chunk_rows: int = 1024
    per_sm: int = 3
    combine_rows: int = 4
    combine_warps: int = 1
    combine_slots: int = 8
    window: int = 16384


def pays_by_key(rows: int, lists: int, head_dim: int, head_dim_v: int, itemsize: int) -> bool:
    """Whether `lists` lists shared by `rows` rows each go faster by key block than list by list."""
    return rows <= MOST_ROWS and lists >= FEWEST_LISTS and max(head_dim, head_dim_v) <= 128 and itemsize == 2


def key_tile(rows: int, width: int, blocks: int, head_dim: int, head_dim_v: int, itemsize: int) -> KeyTile:
    """Tile sizes for lists of `width` of `blocks` blocks, shared by `rows` rows."""
    window = longest_window(width, rows * (head_dim_v * itemsize + 4), blocks)
    widest = max(head_dim, head_dim_v)
    if itemsize == 4:
        # fp32 products run on the vector units; more rows spill.
        most = 16 if widest > 128 else 32
        return KeyTile(most, 8, 1, 255, most, per_sm=1, window=window)
    if widest > 128:
        return KeyTile(num_stages=1, registers=255, per_sm=2, window=window)
    return KeyTile(window=window)


def _shape(q: Tensor, v: Tensor, selection: BlockSelection, tile: KeyTile) -> dict[str, int | bool]:
    """The constants that `_partial` and `_band` share."""
    block_n, block_d, block_dv = (
        max(16, triton.next_power_of_2(size)) for size in (selection.block_size, q.shape[3], v.shape[3])
    )
    return {
        "GROUP": q.shape[1] // selection.indices.shape[1], "QUERY_TILE": selection.query_tile,
        "BLOCK_SIZE": selection.block_size, "HEAD_DIM": q.shape[3], "HEAD_DIM_V": v.shape[3], "BLOCK_N": block_n,
        "BLOCK_D": block_d, "BLOCK_DV": block_dv, "IS_CAUSAL": selection.causal,
        "num_warps": tile.num_warps, "num_stages": tile.num_stages, "maxnreg": tile.registers,
    }  # fmt: skip


def attend_by_key(
    q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection, scale: float, tile: KeyTile | None = None
) -> tuple[Tensor, Tensor]:
    """Output [B, H, M, Dv] in q's dtype and log-sum-exp [B, H, M] in fp32: `attention_fwd.attend`, block by block.

    q, k, v: any strides with a contiguous last dimension. tile: tile sizes to try instead of the chosen ones.
    """
    (batch, heads, seq_len_q, head_dim), head_dim_v = q.shape, v.shape[3]
    indices, counts = selection.indices.contiguous(), selection.counts.contiguous()
    (sets, tiles, width), blocks = indices.shape[1:], selection.tiling.blocks
    rows = heads // sets * selection.query_tile
    tile = tile or key_tile(rows, width, blocks, head_dim, head_dim_v, q.element_size())
    out = torch.empty(batch, heads, seq_len_q, head_dim_v, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, seq_len_q, dtype=torch.float32, device=q.device)
    shape = _shape(q, v, selection, tile)
    begins, ends = run_middle(selection, indices, counts)
    banded = {**shape, "BLOCK_M": tile.band_rows}
    run_band((q, k, v), (begins, ends, counts), (out, lse), selection, scale, banded)
    windows = key_windows(batch * sets, tiles, blocks, tile.window)
    room = partials_room(windows.lists * width, rows, q, head_dim_v)
    shape["BLOCK_M"] = tile.BLOCK_M
    sums = {name: int(shape[name]) for name in ("GROUP", "QUERY_TILE", "HEAD_DIM_V", "BLOCK_DV")}
    sums |= {"BLOCK_M": tile.combine_rows, "UNROLL": tile.combine_slots, "num_warps": tile.combine_warps}
    most_pairs = max(1, tile.chunk_rows // rows)
    for by_block, window in each_window(windows, (indices, begins, ends), blocks, most_pairs):
        run_partials((q, k, v), by_block, room, window, windows.cut, selection, scale, tile.per_sm, shape)
        run_combine(room, by_block.places, (begins, ends), (out, lse), window, windows.cut, sums)
    return out, lse
