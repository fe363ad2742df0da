"""Windows of tiles whose scores are held at a time: the sizes on the host, and a program's part of one in a kernel.

A window is a run of tiles, of every set. Its row of scores holds, level by level from the lowest, the nodes that its last
tile may rank: `visible` of them. Windows are as long as their scratch allows, so that memory stays linear in the length.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import triton
import triton.language as tl

from pyramidbench.tiling import Tiling

LEAST_BYTES = 32 << 20
BYTES_PER_ROW = 64
BYTES_PER_TILE = 256
EASY_BYTES = 64 << 20
BYTES_PER_EASY_TILE = 1024
"""Scratch of a window: at least this; this for every query row, and at least that for every tile; and up to the easy amount so
much a tile. It is gone before the output is made, which is larger (256 bytes a row and head at D 128 in 16 bits), so a call's
peak does not rise. Longer windows are fewer launches and fuller ones: 256k keys, 16 heads, tile 128, β 2, H200: kernels 1.94
ms with 16 bytes a row and 1.61 with 32; 64k, 16 heads on one key/value head: 1.93 ms with 256 bytes a tile, 1.15 with 1024."""


COLUMNS = 64
"""A level's scores begin at a multiple of so many columns, the most nodes that are scored at a time: then whole vectors are
stored, without a mask at a level's end. At 256k keys that is 4 % more scratch."""
_COLUMNS = tl.constexpr(COLUMNS)


@dataclass(frozen=True)
class Levels:
    """The levels that are scored: from `lowest` to below `top`, of a pyramid of `branching`."""

    lowest: int
    top: int
    branching: int

    @property
    def spans(self) -> list[int]:
        """Blocks under a node of each level, the lowest first."""
        return [self.branching**level for level in range(self.lowest, self.top)]


@dataclass(frozen=True)
class Window:
    """Tiles [first_tile, first_tile + tiles); `limit`: leaves that the last of them may rank; `seen`: nodes of each level."""

    first_tile: int
    tiles: int
    limit: int
    seen: tuple[int, ...]

    @property
    def columns(self) -> int:
        """Places of a row of scores."""
        return columns_of(self.seen)


def columns_of(seen: tuple[int, ...]) -> int:
    """Places that the scores of so many nodes of each level take: each level begins at a whole group of columns."""
    return sum(-(-nodes // COLUMNS) * COLUMNS for nodes in seen)


def seen_nodes(tiling: Tiling, levels: Levels, end_tile: int) -> tuple[int, tuple[int, ...]]:
    """Leaves that the tile before `end_tile` may rank at most, and the nodes of each level."""
    if not tiling.causal:
        return tiling.blocks, tuple(-(-tiling.blocks // span) for span in levels.spans)
    complete = max(0, (end_tile - 1) * tiling.query_tile + tiling.offset + 1) // tiling.block_size
    limit = min(complete, tiling.blocks)
    return limit, tuple(limit // span for span in levels.spans)


@lru_cache(maxsize=64)
def windows(tiling: Tiling, levels: Levels, sets: int, extra_bytes: int, granule: int) -> tuple[Window, ...]:
    """The windows of a call, in order. extra_bytes: scratch of a tile beside its scores; granule: tiles of a band."""
    tiles = sets * tiling.tiles
    budget = max(LEAST_BYTES, tiles * max(BYTES_PER_TILE, BYTES_PER_ROW * tiling.query_tile))
    budget = max(budget, min(EASY_BYTES, tiles * BYTES_PER_EASY_TILE))
    found, first = [], 0
    while first < tiling.tiles:
        low, high = 1, tiling.tiles - first
        while low < high:
            middle = (low + high + 1) // 2
            row = 4 * columns_of(seen_nodes(tiling, levels, first + middle)[1]) + extra_bytes
            low, high = (middle, high) if sets * middle * row <= budget else (low, middle - 1)
        count = low if low < granule or first + low == tiling.tiles else low // granule * granule
        found.append(Window(first, count, *seen_nodes(tiling, levels, first + count)))
        first += count
    return tuple(found)


@triton.jit
def visible(limit, span, IS_CAUSAL: tl.constexpr):
    """Nodes of a level that a tile may rank which ranks leaves below `limit`; all of them where nothing is hidden."""
    return limit // span if IS_CAUSAL else tl.cdiv(limit, span)


@triton.jit
def room(nodes):
    """Columns that the scores of a level's nodes take in a row."""
    return tl.cdiv(nodes, _COLUMNS) * _COLUMNS


@triton.jit
def window_part(
    first_tile, window_tiles, limit, slices, lowest_node, lowest_span, seq_len_q, seq_len_kv, QUERY_TILE, BLOCK_SIZE,
    BRANCHING: tl.constexpr, BAND: tl.constexpr, SLICE: tl.constexpr, IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    """What a program scores: (set, first tile in the window, level's place in the buffer and in a row, its span, [start, end)).

    start and end number nodes in their level; end is where the band's last tile may rank no more.
    """
    program = tl.program_id(0)
    bands = tl.cdiv(window_tiles, BAND)
    band = program // slices
    start_tile = band % bands * BAND
    part = program % slices
    node = lowest_node
    column = 0
    span = lowest_span
    size = tl.cdiv(tl.cdiv(seq_len_kv, BLOCK_SIZE), span)
    seen = visible(limit, span, IS_CAUSAL)
    while part >= tl.cdiv(seen, SLICE):
        part -= tl.cdiv(seen, SLICE)
        node += size
        column += room(seen)
        span *= BRANCHING
        size = tl.cdiv(size, BRANCHING)
        seen = visible(seen, BRANCHING, IS_CAUSAL)
    own_limit = limit
    if IS_CAUSAL:
        last_tile = first_tile + tl.minimum(start_tile + BAND, window_tiles) - 1
        own_limit = tl.maximum(last_tile * QUERY_TILE + seq_len_kv - seq_len_q + 1, 0) // BLOCK_SIZE
    start = part * SLICE
    end = tl.minimum(start + SLICE, visible(tl.minimum(own_limit, limit), span, IS_CAUSAL))
    # That the column is a multiple is lost in the loop, and said again for the sake of wide stores.
    column = column // _COLUMNS * _COLUMNS
    return (band // bands).to(tl.int64), start_tile, node, column, span, start, end
