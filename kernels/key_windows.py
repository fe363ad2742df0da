"""The lists of a call in windows whose partial results fit, each with its pairs by key block: the loop of what goes by key.

Attention by key block (attention_by_key.py, attention_dq_by_key.py) writes a partial result for every (row, block) pair and
adds up those of a row. A window is as many lists as PARTIAL_BYTES and TABLE_BYTES allow: segments of even length, one or
several (`transpose.Cut`), so that scratch does not grow with the length. One transposition serves as many windows as its
table holds, since each of them is launches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import triton
from torch import Tensor

from pyramidbench.kernels.transpose import PART, Cut, Transposed, transpose, transposed_room
from pyramidbench.stages import part

PARTIAL_BYTES = 384 * 2**20
TABLE_BYTES = 64 * 2**20
"""Larger windows are fewer launches: H200, 4/1 heads, 256k keys, windows of 4k / 8k / 12.9k lists 27 / 12.3 / 8.5 ms."""


@dataclass(frozen=True)
class Window:
    """`segments` segments from `first` on; `skip` segments of the same transposition stand before them."""

    first: int
    skip: int
    segments: int


@dataclass(frozen=True)
class KeyWindows:
    """Lists cut into segments; `segments` of them are a window, `held` a transposition."""

    cut: Cut
    segments: int
    held: int

    @property
    def lists(self) -> int:
        """Lists of a window, at most."""
        return self.segments * self.cut.run


def longest_window(width: int, row_bytes: int, blocks: int) -> int:
    """Lists of a window, for `width` blocks a list and `row_bytes` bytes of partial results for each block of a list."""
    most = PARTIAL_BYTES // (max(1, width) * row_bytes)
    return max(PART.value, min(most, TABLE_BYTES * PART.value // (8 * blocks)))


def key_windows(sets: int, tiles: int, blocks: int, window: int) -> KeyWindows:
    """Windows of at most `window` of the lists [sets, tiles]; sets count through the batch."""
    cut = Cut(sets, tiles, triton.cdiv(tiles, triton.cdiv(tiles, min(window, tiles))))
    segments = min(cut.segments, max(1, window // cut.run))
    table_bytes = segments * cut.parts() * blocks * 8
    held = min(triton.cdiv(cut.segments, segments), max(1, TABLE_BYTES // table_bytes)) * segments
    return KeyWindows(cut, segments, held)


def each_window(
    windows: KeyWindows, lists: tuple[Tensor, Tensor, Tensor], blocks: int, most_pairs: int
) -> Iterator[tuple[Transposed, Window]]:
    """Every window, with the transposition that it stands in. lists: the lists [.., S], and where the slots that count begin
    and end, contiguous; most_pairs: of a chunk."""
    indices, begins, ends = lists
    cut, held = windows.cut, windows.held
    by_block = transposed_room(cut, held, indices.shape[-1], blocks, most_pairs, indices.device)
    for first in range(0, cut.segments, held):
        with part("transpose"):
            transpose(indices, begins, ends, cut, first, most_pairs, by_block)
        for start in range(first, min(first + held, cut.segments), windows.segments):
            yield by_block, Window(start, start - first, min(windows.segments, cut.segments - start))
