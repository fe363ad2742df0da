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
        changes: Counter[int] = Counter()
        for mine, count in zip(self.held, blocks, strict=True):
            changes.subtract(reversed(mine[count:]))
        returned = self._returned(changes)
        shared: list[tuple[int, int]] = []
        for sequence, (mine, begin, count) in enumerate(zip(self.held, full, blocks, strict=True)):
            for block in range(begin, min(count, len(mine))):
                if self.users[mine[block]] + changes[mine[block]] > 1:
                    changes[mine[block]] -= 1
                    shared.append((sequence, block))
        self._check(len(shared), len(self.free) + returned)
        self._change(changes)
        for mine, count in zip(self.held, blocks, strict=True):
            del mine[count:]
        source, target = [self.held[sequence][block] for sequence, block in shared], self._taken(len(shared))
        for (sequence, block), page in zip(shared, target, strict=True):
            self.held[sequence][block] = page
        if any(changes.values()):
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
        changes: Counter[int] = Counter()
        for mine, row in zip(self.held, rows, strict=True):
            changes.subtract(mine)
            changes.update(row)
        self._check(len(lacking), len(self.free) + self._returned(changes))
        self._change(changes)
        before, self.held = self.held, rows
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

    def _returned(self, changes: Counter[int]) -> int:
        """Pages that have no user any more after such changes of their numbers of users."""
        return sum(1 for page, change in changes.items() if change < 0 and self.users[page] + change == 0)

    def _change(self, changes: Counter[int]) -> None:
        for page, change in changes.items():
            self.users[page] += change
            if change < 0 and not self.users[page]:
                self.free.append(page)

    def _copy(self) -> None:
        width = self.table.shape[1]
        rows = [mine + [-1] * (width - len(mine)) for mine in self.held]
        self.table.copy_(torch.tensor(rows, dtype=torch.int32))
