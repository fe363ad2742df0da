"""Which keys a tile of queries can see: the geometry that every block-sparse method shares.

Query i of M sits at absolute position p = i + N - M (bottom-right causal alignment). A tile is `query_tile`
consecutive queries that share one set of blocks; a block is `block_size` consecutive keys, the last one ragged.
A run of keys is *complete* for a tile when its last key is at or before the tile's first query. Blocks that are
always kept are two intervals: the sinks at the start, and the blocks up to and including those that the tile overlaps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Forced:
    """Blocks that are always kept, for T tiles: [0, sink_end) and [local_start, local_end), both int64 [T]."""

    sink_end: Tensor
    local_start: Tensor
    local_end: Tensor

    def contains(self, node: Tensor, blocks_per_node: int) -> Tensor:
        """True where a node (tile dimension first, like `sink_end`) holds at least one forced block."""
        shape = (-1,) + (1,) * (node.dim() - 1)
        first, last = node * blocks_per_node, (node + 1) * blocks_per_node - 1
        sink = first < self.sink_end.view(shape)
        local = (last >= self.local_start.view(shape)) & (first < self.local_end.view(shape))
        return sink | local

    def count(self) -> Tensor:
        """Number of distinct forced blocks, int64 [T]."""
        return self.sink_end + (self.local_end - torch.maximum(self.local_start, self.sink_end)).clamp(min=0)

    def list(self, width: int | None = None) -> Tensor:
        """The forced blocks in ascending order, padded with -1, int64 [T, width].

        width: blocks that no tile has more of; without it the most that one has, for which a GPU is waited for.
        """
        start = torch.maximum(self.local_start, self.sink_end)
        if width is None:
            width = int(self.count().max()) if self.sink_end.numel() else 0
        step = torch.arange(width, device=self.sink_end.device)
        block = torch.where(step < self.sink_end[:, None], step, start[:, None] + step - self.sink_end[:, None])
        return block.masked_fill(step >= self.count()[:, None], -1)


@dataclass(frozen=True)
class Tiling:
    """The sizes that decide visibility. All lengths are in tokens."""

    seq_len_q: int
    seq_len_kv: int
    block_size: int
    query_tile: int
    causal: bool

    @property
    def tiles(self) -> int:
        return -(-self.seq_len_q // self.query_tile)

    @property
    def blocks(self) -> int:
        return -(-self.seq_len_kv // self.block_size)

    @property
    def offset(self) -> int:
        """Absolute position of query 0."""
        return self.seq_len_kv - self.seq_len_q

    def first_position(self, tile: Tensor) -> Tensor:
        """Absolute position of a tile's first query (negative before the first key)."""
        return tile * self.query_tile + self.offset

    def last_position(self, tile: Tensor) -> Tensor:
        """Absolute position of a tile's last query; a ragged last tile ends at the last query."""
        return ((tile + 1) * self.query_tile).clamp(max=self.seq_len_q) - 1 + self.offset

    def complete(self, node: Tensor, tile: Tensor, keys_per_node: int) -> Tensor:
        """True where all keys of a node are visible to every query of the tile (shapes broadcast)."""
        if not self.causal:
            return node * keys_per_node < self.seq_len_kv
        end = ((node + 1) * keys_per_node).clamp(max=self.seq_len_kv)
        return (end - 1 <= self.first_position(tile)) & (node * keys_per_node < self.seq_len_kv)

    def forced(self, tile: Tensor, sink_blocks: int, local_blocks: int) -> Forced:
        """The blocks that a tile always keeps: `sink_blocks` first ones, and `local_blocks` up to its own.

        Causal: every block that the tile overlaps is forced, so `local_blocks` counts back from the block of the tile's
        first query. Not causal: sinks only. A tile that lies before the first key has none.
        """
        if not self.causal:
            none = torch.zeros_like(tile)
            return Forced(none + min(sink_blocks, self.blocks), none, none)
        own_last = torch.div(self.last_position(tile), self.block_size, rounding_mode="floor")
        own_first = torch.div(self.first_position(tile), self.block_size, rounding_mode="floor")
        end = (own_last + 1).clamp(min=0)
        start = torch.minimum((own_first - local_blocks + 1).clamp(min=0), end)
        return Forced(end.clamp(max=sink_blocks), start, end)

    def eligible(self, tile: Tensor, forced: Forced) -> Tensor:
        """Number of blocks that a tile may rank: complete and not forced, int64 [T]."""
        if not self.causal:
            return self.blocks - forced.count()
        seen = (self.first_position(tile) + 1).clamp(min=0, max=self.seq_len_kv)
        complete = torch.where(seen == self.seq_len_kv, self.blocks, seen // self.block_size)
        sinks = torch.minimum(forced.sink_end, complete)
        locals_ = (torch.minimum(forced.local_end, complete) - torch.maximum(forced.local_start, sinks)).clamp(min=0)
        return complete - sinks - locals_

    def visible_pairs(self) -> int:
        """Number of (query, key) pairs that dense attention computes: N²/2 and a bit when causal and M = N."""
        if not self.causal:
            return self.seq_len_q * self.seq_len_kv
        first = max(0, -self.offset)
        low, high = first + self.offset + 1, self.seq_len_kv
        return (low + high) * (self.seq_len_q - first) // 2 if self.seq_len_q > first else 0

    def pairs(self, tile: Tensor, block: Tensor) -> Tensor:
        """Number of visible (query, key) pairs between tiles and blocks (shapes broadcast; -1 holds none), int64."""
        start = block * self.block_size
        width = (self.seq_len_kv - start).clamp(min=0, max=self.block_size)
        width = torch.where(block < 0, 0, width)
        first, last = self.first_position(tile), self.last_position(tile)
        if not self.causal:
            return (last - first + 1) * width
        return _pairs_up_to(last + 1 - start, width) - _pairs_up_to(first - start, width)


def _pairs_up_to(rows: Tensor, width: Tensor) -> Tensor:
    """Sum over r = 1 … rows of min(r, width): the pairs of the first `rows` queries that can see a block."""
    rows = rows.clamp(min=0)
    short = torch.minimum(rows, width)
    return short * (short + 1) // 2 + (rows - short) * width
