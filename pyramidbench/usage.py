"""Usage: what a model's attention did, and the tally that counts it without making a GPU wait."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch

from pyramidbench.selection import BlockSelection
from pyramidbench.tiling import Tiling

MOST_HELD_ELEMENTS = 1 << 24
"""Listed blocks that wait to be counted, at most: 64 MiB. A pass of 30 layers over 8 192 tokens leaves a hundredth of it."""


@dataclass(frozen=True)
class Usage:
    """What a model's attention did. Numbers add up over layers, sequences and calls; batch entries count apart.

    sparse_calls, dense_calls: calls that chose blocks, and calls that attended to everything (`dense`, dense_layers).
    step_calls: those sparse calls that were one step of a method's decoder, which made no summary anew.
    queries, queries_with_choice: queries of sparse calls, and those with more eligible blocks than the method keeps by
    rank: for all others sparse attention is dense attention in disguise. tiles, tiles_with_choice: likewise, by tile.
    pairs, visible_pairs: attended (query, key) pairs of sparse calls per set of blocks, and those of dense attention.
    backends: what ran, such as "triton" or "sdpa-flash", in alphabetical order; of a difference, all up to its end.
    """

    sparse_calls: int = 0
    dense_calls: int = 0
    tiles: int = 0
    tiles_with_choice: int = 0
    queries: int = 0
    queries_with_choice: int = 0
    pairs: float = 0.0
    visible_pairs: float = 0.0
    step_calls: int = 0
    backends: tuple[str, ...] = ()

    @property
    def choice_share(self) -> float | None:
        """Share of the queries with a real choice; None where no sparse call was made."""
        return self.queries_with_choice / self.queries if self.queries else None

    @property
    def density(self) -> float | None:
        """Attended ÷ visible pairs of the sparse calls; None where none was made."""
        return self.pairs / self.visible_pairs if self.visible_pairs else None

    def __add__(self, other: Usage) -> Usage:
        names = tuple(sorted({*self.backends, *other.backends}))
        return Usage(*[*(a + b for a, b in zip(_numbers(self), _numbers(other))), names])

    def __sub__(self, other: Usage) -> Usage:
        return Usage(*[*(a - b for a, b in zip(_numbers(self), _numbers(other))), self.backends])


def _numbers(usage: Usage) -> tuple[Any, ...]:
    return tuple(getattr(usage, entry.name) for entry in dataclasses.fields(usage))[:-1]


@dataclass
class Tally:
    """Counts calls as they come. Lists of blocks stay on their device and are counted together when `read` asks.

    Nothing here waits for a GPU but `read`, and the call that brings MOST_HELD_ELEMENTS together.
    """

    counted: Usage = field(default_factory=Usage)
    held: dict[tuple[str, Tiling, torch.Size], list[BlockSelection]] = field(default_factory=dict)
    waiting: int = 0
    steps: int = 0

    def dense(self, backend: str) -> None:
        """One call that attended to everything."""
        self.counted += Usage(dense_calls=1, backends=(backend,))

    def sparse(self, selection: BlockSelection, backend: str, *, is_step: bool = False) -> None:
        """One call that attended to the blocks of a selection; is_step: a step of a method's decoder."""
        self.steps += is_step
        self.held.setdefault((backend, selection.tiling, selection.indices.shape), []).append(selection)
        self.waiting += selection.indices.numel()
        if self.waiting >= MOST_HELD_ELEMENTS:
            self.read()

    def read(self) -> Usage:
        """All that was counted so far."""
        held, steps = self.held, self.steps
        self.held, self.waiting, self.steps = {}, 0, 0
        self.counted += Usage(step_calls=steps)
        for (backend, tiling, _), selections in held.items():
            self.counted += _counted(backend, tiling, selections)
        return self.counted


def _counted(backend: str, tiling: Tiling, selections: list[BlockSelection]) -> Usage:
    """What selections of one shape listed, by one transfer from their device."""
    indices = torch.stack([selection.indices for selection in selections]).flatten(0, 1)
    counts = torch.stack([selection.counts for selection in selections]).flatten(0, 1)
    tile = torch.arange(tiling.tiles, device=counts.device)
    first, last = tiling.first_position(tile), tiling.last_position(tile)
    # What is listed is short of what is visible exactly where there was more to choose from than could be kept.
    visible = torch.div(last, tiling.block_size, rounding_mode="floor") + 1
    chosen = counts.amin(1) < visible
    pairs = tiling.pairs(tile[:, None], indices.long()).double().sum((0, 2, 3)).mean()
    found = torch.stack([chosen.sum().double(), (chosen * (last - first + 1)).sum().double(), pairs])
    tiles, queries, pairs_per_set = found.tolist()
    sequences = len(indices)
    return Usage(
        sparse_calls=len(selections), tiles=sequences * tiling.tiles, tiles_with_choice=int(tiles),
        queries=sequences * tiling.seq_len_q, queries_with_choice=int(queries), pairs=pairs_per_set,
        visible_pairs=sequences * tiling.visible_pairs(), backends=(backend,),
    )  # fmt: skip
