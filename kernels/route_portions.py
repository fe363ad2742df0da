"""What a scored leaf does at a time, and the buffers for it: sizes that follow from a call and its candidates alone.

Items, (set, tile) pairs, go in portions, so that masses, rows and lists stay within PORTION_BYTES; one set of buffers, made
for the largest portion, serves all. Within a portion a block's pairs are kept apart by windows of tiles whose rows fit into
L2: each of these rows is read once a candidate, and a window's blocks follow one another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pyramidbench.kernels.route_call import Call, score_rows

PORTION_BYTES = 1 << 28
WINDOW_BYTES = 1 << 24
"""Rows of a window. At token level (16 heads, 64k) all rows are 268 MB and would come from memory for every candidate."""
WORK_ROWS = 2048
"""Rows that share one read of a block's keys, at most. `_mass` at 256k, 16 rows: 512 5.09 ms, 1024 4.84, 2048 4.71."""


@dataclass(frozen=True)
class Job:
    """What the launches of one scored leaf share, beside the call: the candidates of every item, and sizes."""

    call: Call
    candidates: Tensor
    candidate_counts: Tensor

    @property
    def is_mean(self) -> bool:
        return self.call.rules.tile_reduce == "mean"

    @property
    def with_forced(self) -> bool:
        """Whether the masses of forced blocks count (in the normaliser)."""
        return self.call.rules.head_reduce == "sum_prob"

    @property
    def group(self) -> int:
        """Query heads of a set."""
        return int(self.call.shape["GROUP"])

    @cached_property
    def rows(self) -> int:
        """Scoring rows of a tile and head."""
        return 1 if self.is_mean else score_rows(self.call.rules, self.call.tiling)

    @cached_property
    def tall(self) -> int:
        """Scoring rows of a tile, all heads of its set."""
        return self.group * self.rows

    @property
    def terms(self) -> int:
        """Rows of q's dtype that add up to one scoring row: three keep 24 bits of an fp32 mean."""
        return 3 if self.is_mean and self.call.q.dtype != torch.float32 else 1

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a tile's rows."""
        return self.terms * self.tall * int(self.call.shape["BLOCK_D"]) * self.call.q.element_size()

    @cached_property
    def forced_width(self) -> int:
        """Forced blocks of a tile, at most."""
        rules, tiling = self.call.rules, self.call.tiling
        if not tiling.causal:
            return rules.sink_blocks
        return rules.sink_blocks + rules.local_blocks + -(-(tiling.query_tile - 1) // tiling.block_size)

    @cached_property
    def width(self) -> int:
        """Places for the pairs of one item."""
        return self.candidates.shape[1] + (self.forced_width if self.with_forced else 0)

    @property
    def slot_bits(self) -> int:
        """Bits of a place; a pair is item·2^slot_bits + place."""
        return (max(2, self.width) - 1).bit_length()

    @property
    def pairs_per_work(self) -> int:
        return max(1, WORK_ROWS // self.tall)

    @cached_property
    def window_tiles(self) -> int:
        return max(1, WINDOW_BYTES // self.row_bytes)

    @cached_property
    def windows(self) -> int:
        """Windows of a set."""
        return -(-self.call.tiling.tiles // self.window_tiles)

    @property
    def banks(self) -> int:
        """Columns of a block: its whole pairs, and those whose tile sees only some of its keys."""
        return 2 if self.with_forced and self.call.tiling.causal else 1

    def portions(self) -> Iterator[Portion]:
        """Items in equal shares within PORTION_BYTES, of whole sets where one fits, else of sixteens."""
        items, tiles = self.call.items, self.call.tiling.tiles
        most = max(1, PORTION_BYTES // max(1, self.width * (4 * self.tall + 16) + self.row_bytes))
        share = -(-items // -(-items // most))
        unit = tiles if share >= tiles else 16
        step = min(items, -(-share // unit) * unit)
        for first in range(0, items, step):
            yield Portion(self, first, min(step, items - first))


@dataclass(frozen=True)
class Portion:
    """Consecutive items whose leaves are scored together."""

    job: Job
    first_item: int
    items: int

    @cached_property
    def columns(self) -> int:
        """(set, window, block) triples of all sets that the items belong to."""
        tiling = self.job.call.tiling
        sets = (self.first_item + self.items - 1) // tiling.tiles - self.first_item // tiling.tiles + 1
        return sets * self.job.windows * tiling.blocks

    @cached_property
    def pairs(self) -> int:
        return self.items * self.job.width

    @cached_property
    def work(self) -> int:
        """Pieces of work, at most: each column may end in one that is not full."""
        return self.pairs // self.job.pairs_per_work + min(self.columns * self.job.banks, self.pairs)


@dataclass(frozen=True)
class Buffers:
    """Of a portion: the rows of its tiles [items, terms, tall, BLOCK_D] in q's dtype; int32 lists of its pairs, in the order
    of tiles (column, rank: the pair's column and its number there; -1: no pair) and of columns (pair); the numbers
    of all pairs and of all pieces of work, two unused, then the pairs of each column (counts); the first place of each column;
    work [·, 3]: column, first and last place (exclusive); the masses [items, width, tall] in fp32."""

    rows: Tensor
    column: Tensor
    rank: Tensor
    pair: Tensor
    counts: Tensor
    place: Tensor
    work: Tensor
    mass: Tensor

    @property
    def total(self) -> Tensor:
        return self.counts[:4]

    @property
    def column_count(self) -> Tensor:
        return self.counts[4:]

    @classmethod
    def of(cls, job: Job, portions: list[Portion]) -> Buffers:
        """Buffers that hold any of the portions."""
        items, pairs, columns, work = (
            max(getattr(portion, name) for portion in portions) for name in ("items", "pairs", "columns", "work")
        )
        block_d, device = int(job.call.shape["BLOCK_D"]), job.call.q.device
        rows = torch.empty(items, job.terms, job.tall, block_d, dtype=job.call.q.dtype, device=device)
        # Whole multiples of 16 bytes each, for aligned loads.
        sizes = [
            -(-size // 4) * 4 for size in (pairs, pairs, pairs, 4 + columns * job.banks, columns * job.banks, 3 * work)
        ]
        column, rank, pair, counts, place, pieces = torch.empty(sum(sizes), dtype=torch.int32, device=device).split(
            sizes
        )
        mass = torch.empty(items, job.width, job.tall, device=device)
        return cls(rows, column, rank, pair, counts, place, pieces, mass)
