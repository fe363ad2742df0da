"""Vertical-slash: the keys that everyone looks at, and the distances that everyone looks back by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pyramidbench.kernels.lines import Lines, over_blocks, over_windows, window_of
from pyramidbench.kernels.probed_method import ProbedMethod
from pyramidbench.kernels.share_method import Share
from pyramidbench.problem import Problem
from pyramidbench.selection import ranked_count, top_blocks, top_n_indices


@dataclass(frozen=True)
class VerticalSlash(ProbedMethod):
    """Keeps the K blocks on the strongest lines of MInference's vertical-slash head: `vertical`·K by column, the rest by slash.

    The attention of a probe (`probe_rows` queries) is summed over rows for each key, and for each distance. A block scores by
    the column sums of its keys, and by the sums of the distances at which the tile sees it.
    Parameters besides the budget: vertical (share of K), probe_rows, probe_every (queries between probes).
    Cost: 2·D·H·probe_rows·N per probe, attention 4·D·H·M·(K + forced)·C.
    Differs from the source: whole blocks where it has single columns and blocks along slashes; one division of K for all heads,
    half and half by default, where it searches one for each (1 000 columns and 6 096 slashes where it has not searched); the
    forced blocks stand for its first 30 columns and last 100 distances, which it always keeps; and it probes with the last
    queries of the prompt, so that early queries choose by later keys: here a tile goes by the newest probe before it, so there
    is one every `probe_every` queries.
    """

    source: ClassVar[str] = "MInference vertical-slash, arXiv 2407.02490, section 3.2"

    vertical: Share = 0.5

    def pattern(
        self,
        q: Tensor,  # noqa: ARG002 - part of the contract
        summary: Tensor,  # noqa: ARG002
        starts: list[int],  # noqa: ARG002
        lines: Lines,
        problem: Problem,
    ) -> tuple[Tensor, ...]:
        """Sums of the columns of each block, and of the distances of each window."""
        tiling = self.tiling(problem)
        return over_blocks(lines.vertical, tiling), over_windows(lines.slash, tiling)

    def lists(
        self,
        q: Tensor,
        summary: Tensor,  # noqa: ARG002
        tile: Tensor,
        pattern: tuple[Tensor, ...] | None,
        problem: Problem,
    ) -> Tensor:
        tiling = self.tiling(problem)
        forced = tiling.forced(tile, self.sinks(problem), self.locals(problem))
        keep = ranked_count(self.top_k, forced, self.forced_in_budget)
        if pattern is None:
            scores = torch.zeros(*q.shape[:2], len(tile), tiling.blocks, device=q.device)
            return top_blocks(scores, tile, tiling, forced, keep)
        columns, windows = pattern
        slashes = windows.gather(-1, window_of(tile, tiling).expand(*columns.shape))
        block = torch.arange(tiling.blocks, device=q.device)
        may = tiling.complete(block, tile[:, None], self.block_size) & ~forced.contains(block.expand(len(tile), -1), 1)
        best = top_n_indices(torch.where(may, columns, -torch.inf), (keep * self.vertical).long())
        first = torch.zeros(*slashes.shape[:-1], tiling.blocks + 1, dtype=torch.bool, device=q.device)
        first.scatter_(-1, torch.where(best < 0, tiling.blocks, best), True)
        return top_blocks(slashes.masked_fill(first[..., :-1], torch.inf), tile, tiling, forced, keep)
