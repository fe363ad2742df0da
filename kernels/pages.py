"""Which page of a paged cache holds which block of which sequence: a free list on the host, the table on the device.

Sequences that come from one another (beams) share the pages of the blocks that are full. A page that a token may still be
written to (the open block's, and those in reserve behind it) has one user always: `reorder` and `cut` see to that and say
which pages must be copied, so that neither `append` nor a replayed CUDA graph ever meets a shared one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyramidbench.errors import UserError


@dataclass(frozen=True)
class Copies:
    """Pages whose content goes to other pages, which nobody else uses: source[i] to target[i]."""

    source: list[int]
    target: list[int]


class PageTable:
    """Assigns pages to the blocks of sequences, block by block, and takes them back from the end."""

    def __init__(self, table: Tensor, pages: int) -> None:
        """table: int32 [B, blocks], which this keeps up to date, -1 where a block has no page."""
        self.table = table
        self.free = list(range(pages - 1, -1, -1))
        self.held: list[list[int]] = [[] for _ in range(table.shape[0])]
        self.users = [0] * pages

    def assign(self, blocks: Sequence[int]) -> None:
        """Give every sequence pages for its first blocks[b] blocks; those that it holds stay.

        Raises:
            UserError: too few pages are free; then none was given.
        """
        missing = [max(0, wanted - len(mine)) for wanted, mine in zip(blocks, self.held, strict=True)]
        self._check(sum(missing), len(self.free))
        for mine, count in zip(self.held, missing, strict=True):
            mine.extend(self._taken(count))
        if any(missing):
            self._copy()

    def cut(self, blocks: Sequence[int], full: Sequence[int]) -> Copies:
        """Take back the pages behind a sequence's first blocks[b] blocks, and give it its own ones behind its first full[b].

        Raises:
            UserError: too few pages are free for those that must be copied; then nothing changed.
        """
        kept = [mine[:count] for mine, count in zip(self.held, blocks, strict=True)]
        users = Counter(page for mine in kept for page in mine)
        shared: list[tuple[int, int]] = []
        for sequence, (mine, begin) in enumerate(zip(kept, full, strict=True)):
            for block in range(begin, len(mine)):
                if users[mine[block]] > 1:
                    users[mine[block]] -= 1
                    shared.append((sequence, block))
        returned = sum(1 for page, count in enumerate(self.users) if count and not users[page])
        self._check(len(shared), len(self.free) + returned)
        source = [kept[sequence][block] for sequence, block in shared]
        self._hold(kept)
        target = self._taken(len(shared))
        for (sequence, block), old, new in zip(shared, source, target, strict=True):
            self.users[old] -= 1
            self.held[sequence][block] = new
        self._copy()
        return Copies(source, target)

    def reorder(self, sources: Sequence[int], full: Sequence[int], used: Sequence[int]) -> Copies:
        """Make sequence b what sources[b] is: the same pages for its full blocks, as many others behind them as that one holds.

        full, used: of each sequence as it is now, the blocks that are full, and those that hold a token. The first that takes a
        sequence over takes its pages; the others get the open block's content in a page of their own.

        Raises:
            UserError: too few pages are free; then nothing changed.
        """
        rows: list[list[int]] = []
        lacking: list[tuple[int, int]] = []
        for sequence, source in enumerate(sources):
            held = self.held[source]
            is_first = sequence == (source if sources[source] == source else sources.index(source))
            rows.append(held[:] if is_first else held[: full[source]])
            if not is_first:
                lacking.extend((sequence, block) for block in range(full[source], len(held)))
        users = Counter(page for row in rows for page in row)
        returned = sum(1 for page, count in enumerate(self.users) if count and not users[page])
        self._check(len(lacking), len(self.free) + returned)
        before = self.held
        self._hold(rows)
        fresh = self._taken(len(lacking))
        copies = Copies([], [])
        for (sequence, block), page in zip(lacking, fresh, strict=True):
            self.held[sequence].append(page)
            if block < used[sources[sequence]]:
                copies.source.append(before[sources[sequence]][block])
                copies.target.append(page)
        self._copy()
        return copies

    def _check(self, wanted: int, free: int) -> None:
        if wanted > free:
            raise UserError(
                f"the cache is full: {wanted} more pages are needed and {free} are free; nothing was "
                "written. Truncate or reset sequences, or give the cache more pages"
            )

    def _taken(self, count: int) -> list[int]:
        """Pages from the free list, each with its one user."""
        pages = [self.free.pop() for _ in range(count)]
        for page in pages:
            self.users[page] = 1
        return pages

    def _hold(self, rows: list[list[int]]) -> None:
        """Let sequences hold these of the pages that are in use; those that none of them holds are free again."""
        users = Counter(page for row in rows for page in row)
        dropped = [page for mine in self.held for page in reversed(mine) if not users[page]]
        self.free.extend(dict.fromkeys(dropped))
        self.users = [users[page] for page in range(len(self.users))]
        self.held = rows

    def _copy(self) -> None:
        width = self.table.shape[1]
        rows = [mine + [-1] * (width - len(mine)) for mine in self.held]
        self.table.copy_(torch.tensor(rows, dtype=torch.int32))
