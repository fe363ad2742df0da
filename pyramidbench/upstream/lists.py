"""Lists of blocks in the forms that other packages' kernels read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyramidbench.selection import BlockSelection


def per_query_head(selection: BlockSelection, heads: int) -> tuple[Tensor, Tensor]:
    """Lists [B, H, tiles, S] and counts [B, H, tiles] for each of `heads` query heads; a group's heads have the same."""
    group = heads // selection.indices.shape[1]
    return selection.indices.repeat_interleave(group, 1), selection.counts.repeat_interleave(group, 1)


@dataclass(frozen=True)
class Columns:
    """Which rows list a block, block by block (compressed columns): the other way round than a selection.

    first: int64 [B, H, blocks], where the rows of a block start in `rows`. counts: int32 [B, H, blocks]. rows: int32, the
    rows of all blocks of all heads one behind another, ascending within a block.
    """

    first: Tensor
    counts: Tensor
    rows: Tensor

    @classmethod
    def of(cls, selection: BlockSelection, heads: int) -> Columns:
        """The columns of a selection for each of `heads` query heads; a row is a tile."""
        lists, _ = per_query_head(selection, heads)
        blocks = selection.tiling.blocks
        batch, _, tiles, _ = lists.shape
        where = (lists >= 0).nonzero()
        column = (where[:, 0] * heads + where[:, 1]) * blocks + lists[lists >= 0]
        key = (column * tiles + where[:, 2]).sort().values
        counts = torch.bincount(column, minlength=batch * heads * blocks)
        first = counts.cumsum(0) - counts
        shape = (batch, heads, blocks)
        return cls(first.view(shape), counts.to(torch.int32).view(shape), (key % tiles).to(torch.int32))
