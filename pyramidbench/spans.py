"""Spans: which keys each query sees, read from a model's mask, and the runs of queries that a causal method can do alone.

A mask that a block-sparse method can serve is made of sequences: within one, query after query sees the same first key
and one more last key. Padding on either side, packed sequences and cached keys all have this form; a sliding window or a
bidirectional prefix have not. A mask is read in strips of rows, so that no [M, N] array outlives one strip.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from pyramidbench.errors import UserError

STRIP_ELEMENTS = 1 << 24
MaskRows = Callable[[int, int], Tensor]
"""The visible keys of queries `start` … `end`: bool [B or 1, end - start, N]."""


@dataclass(frozen=True)
class Sequence:
    """Queries `rows` of batch entry `batch` and the keys `keys` that they see causally: the last query sees all of them."""

    batch: int
    rows: slice
    keys: slice


@dataclass(frozen=True)
class Spans:
    """Query i of batch entry b sees the keys first[b, i] … last[b, i], or none where last is -1; both int64 [B, M].

    A query that does not see its own key (`own`, its column: bool [B, M]) is padding.
    """

    first: Tensor
    last: Tensor
    own: Tensor

    @classmethod
    def read(cls, rows: MaskRows, queries: int, keys: int, position: Tensor) -> Spans:
        """Read a mask strip by strip; position: int64 [M], the column of each query's own key.

        Raises:
            UserError: a query sees keys with a gap between them, or keys after its own.
        """
        strips = []
        step = max(1, STRIP_ELEMENTS // max(1, keys))
        for start in range(0, queries, step):
            end = min(queries, start + step)
            strips.append(_read_strip(rows(start, end), position[start:end]))
        first, last, own = (torch.cat(parts, dim=1) for parts in zip(*strips))
        return cls(first, last, own)

    def sequences(self) -> list[Sequence]:
        """The sequences of the whole batch, padding left out.

        Raises:
            UserError: the mask is not made of causal sequences, as with a sliding window.
        """
        found = []
        for batch, (first, last, own) in enumerate(zip(self.first.tolist(), self.last.tolist(), self.own.tolist())):
            found += [Sequence(batch, *slices) for slices in _runs(first, last, own)]
        return found

    def mask(self, keys: int) -> Tensor:
        """The same as a mask for dense attention, bool [B, 1, M, N]; padding sees its first key, so that no row is empty."""
        key = torch.arange(keys, device=self.first.device)
        last = torch.maximum(self.last, torch.zeros_like(self.last))
        return ((key >= self.first[..., None]) & (key <= last[..., None]))[:, None]


def _read_strip(seen: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """First and last visible key and whether the own one is visible, each [B, rows]."""
    keys = seen.shape[-1]
    count = seen.sum(-1)
    first = seen.int().argmax(-1)
    last = torch.where(count > 0, keys - 1 - seen.flip(-1).int().argmax(-1), -1)
    if bool((count != torch.where(count > 0, last - first + 1, 0)).any()):
        raise UserError(
            "the attention mask leaves out keys between visible ones; accepted: causal sequences, padded or packed."
        )
    if bool((last > position).any()):
        raise UserError("the attention mask shows a query later keys than its own; accepted: causal attention.")
    return first, last, last == position


def _runs(first: list[int], last: list[int], own: list[bool]) -> list[tuple[slice, slice]]:
    """Rows and keys of each run of queries with the same first key, of one batch entry."""
    runs: list[tuple[slice, slice]] = []
    start = 0
    for row in range(1, len(first) + 1):
        if row < len(first) and own[row] == own[start] and first[row] == first[start]:
            continue
        if own[start]:
            runs.append((slice(start, row), slice(first[start], last[row - 1] + 1)))
        start = row
    if any(later[1].start < earlier[1].stop for earlier, later in pairwise(runs)):
        raise UserError(
            "the attention mask is a sliding window or chunks that overlap; sparse attention needs layers that see "
            "all earlier tokens of their sequence: list the others in dense_layers."
        )
    return runs
