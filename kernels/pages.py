"""Which page of a paged cache holds which block of which sequence: a free list on the host, the table on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyramidbench.errors import UserError


class PageTable:
    """Assigns pages to the blocks of sequences, block by block, and takes them back from the end."""

    def __init__(self, table: Tensor, pages: int) -> None:
        """table: int32 [B, blocks], which this keeps up to date, -1 where a block has no page."""
        self.table = table
        self.free = list(range(pages - 1, -1, -1))
        self.held: list[list[int]] = [[] for _ in range(table.shape[0])]

    def assign(self, blocks: Sequence[int]) -> None:
        """Give every sequence pages for its first blocks[b] blocks; those that it holds stay.

        Raises:
            UserError: too few pages are free; then none was given.
        """
        missing = [max(0, wanted - len(mine)) for wanted, mine in zip(blocks, self.held, strict=True)]
        if sum(missing) > len(self.free):
            raise UserError(
                f"the cache is full: {sum(missing)} more pages are needed and {len(self.free)} are free; nothing was "
                "written. Truncate or reset sequences, or give the cache more pages"
            )
        for mine, count in zip(self.held, missing, strict=True):
            mine.extend(self.free.pop() for _ in range(count))
        if any(missing):
            self._copy()

    def release(self, blocks: Sequence[int]) -> None:
        """Take back all pages behind a sequence's first blocks[b] blocks."""
        for mine, kept in zip(self.held, blocks, strict=True):
            self.free.extend(reversed(mine[kept:]))
            del mine[kept:]
        self._copy()

    def _copy(self) -> None:
        width = self.table.shape[1]
        rows = [mine + [-1] * (width - len(mine)) for mine in self.held]
        self.table.copy_(torch.tensor(rows, dtype=torch.int32))
