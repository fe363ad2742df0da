"""FlexPrefill: each head decides between blocks by mean query and key, and vertical-slash lines; p decides how many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pyramidbench.kernels.lines import Lines, over_blocks
from pyramidbench.kernels.pools import run_means
from pyramidbench.kernels.probed_method import ProbedMethod
from pyramidbench.kernels.share_method import Share
from pyramidbench.kernels.top_p import top_p_blocks
from pyramidbench.method import NonNegative
from pyramidbench.problem import Problem


@dataclass(frozen=True)
class FlexPrefill(ProbedMethod):
    """Keeps, head by head, the blocks that reach `top_p` by their means, or as many columns and slashes as reach it.

    A head whose probed attention over blocks is what mean query × mean key would make of it (square root of the Jensen-Shannon
    divergence below `divergence`) is query-aware: each tile keeps the fewest blocks whose shares reach p. Any other head is
    vertical-slash: the keys that reach p of the probe, strongest first, are counted, a block more than they fill is the number
    of block columns that it keeps, the first and those of the largest sums; in the same way block distances, the nearest and
    those of the largest sums. Of both, every head keeps the best ones that come to `min_budget` keys.
    Parameters besides blocks and tiles: top_p (γ), divergence (τ), min_budget, probe_rows, probe_every (queries from probe to
    probe).
    Cost: 2·D·H·probe_rows·N per probe, 2·D·H·(M/tile)·n₁/2 for the means, attention 4·D·H·(attended pairs).
    Differs from the source: it probes with the last queries of the prompt, so that early queries choose by later keys; here a
    tile goes by the newest probe before it, and tiles before the first keep everything. p of a query-aware head holds for each
    tile, and the block that reaches it is kept, where the source takes p of the whole map and stops before it; the forced
    blocks are kept besides; blocks of 64 where it has 128. Blocks on lines are those of its code (the paper's lines are keys).
    """

    source: ClassVar[str] = "FlexPrefill, arXiv 2502.20766, sections 3.2 and 3.3"

    top_p: Share = 0.9
    divergence: Share = 0.1
    min_budget: NonNegative = 1024

    @property
    def adaptive(self) -> bool:
        return True

    def summarise(self, k: Tensor) -> Tensor:
        return run_means(k, self.block_size)

    def pattern(
        self, q: Tensor, summary: Tensor, starts: list[int], lines: Lines, problem: Problem
    ) -> tuple[Tensor, ...]:
        """Which block columns and block distances a head keeps, [g, P, blocks], and whether it goes by its means, [g, P, 1]."""
        tiling = self.tiling(problem)
        by_column, by_distance = (over_blocks(sums, tiling) for sums in (lines.vertical, lines.slash))
        aware = self._query_aware(q, summary, starts, by_column, problem)[..., None]
        columns = _largest(by_column, self._filled(lines.vertical, aware))
        distances = _largest(by_distance, self._filled(lines.slash, aware))
        return columns, distances, aware

    def _filled(self, sums: Tensor, aware: Tensor) -> Tensor:
        """How many blocks a head keeps: one more than is filled by the lines that hold top_p of all, strongest first, and no
        fewer than the least, which is also what a query-aware head keeps: int64 [g, P, 1]."""
        held = sums.sort(dim=-1, descending=True).values.cumsum(-1)
        counted = (held <= self.top_p * sums.sum(-1, keepdim=True)).sum(-1, keepdim=True) + 1
        return (counted // self.block_size + 1).masked_fill(aware, 0).clamp(min=-(-self.min_budget // self.block_size))

    def _query_aware(self, q: Tensor, summary: Tensor, starts: list[int], true: Tensor, problem: Problem) -> Tensor:
        """Which heads the means describe well: bool [g, P]. true: the probes' attention by block, [g, P, blocks]."""
        whole = torch.tensor(starts, device=q.device) // self.block_size
        sees = torch.arange(summary.shape[0], device=q.device) < whole[:, None]
        probes = torch.stack(
            [q[:, start - self.probe_rows : start].to(summary.dtype).mean(1) for start in starts], dim=1
        )
        estimate = _softmax(probes @ summary.mT * problem.scale, sees)
        true = true.masked_fill(~sees, 0)
        true = true / true.sum(-1, keepdim=True)
        return (jensen_shannon(estimate, true).sqrt() < self.divergence) & (whole > 0)

    def lists(
        self, q: Tensor, summary: Tensor, tile: Tensor, pattern: tuple[Tensor, ...] | None, problem: Problem
    ) -> Tensor:
        tiling = self.tiling(problem)
        forced = tiling.forced(tile, self.sinks(problem), self.locals(problem))
        if pattern is None:
            values = torch.zeros(*q.shape[:2], len(tile), tiling.blocks, device=q.device)
            return top_p_blocks(values, tile, tiling, forced, float(self.top_p > 0))
        columns, distances, aware = pattern
        rows = q[:, :, int(tile[0]) * self.query_tile : (int(tile[-1]) + 1) * self.query_tile]
        queries = run_means(rows, self.query_tile).unflatten(1, (problem.kv_heads, problem.group))
        logits = (queries @ summary[:, :, None].mT * problem.scale).flatten(1, 2)
        sees = tiling.complete(torch.arange(tiling.blocks, device=q.device), tile[:, None], self.block_size)
        crossed = columns | self._at_distances(distances, tile, problem)
        return top_p_blocks(_softmax(logits, sees) * aware, tile, tiling, forced, self.top_p, crossed)

    def _at_distances(self, distances: Tensor, tile: Tensor, problem: Problem) -> Tensor:
        """Blocks that lie a kept distance before one of the blocks that a tile overlaps: bool [B, H, T, blocks]."""
        tiling, size = self.tiling(problem), self.block_size
        first, last = tiling.first_position(tile) // size, tiling.last_position(tile) // size
        found = torch.zeros_like(distances)
        for step in range((self.query_tile + size - 2) // size + 1):
            own = torch.minimum(first + step, last)
            away = own[:, None] - torch.arange(tiling.blocks, device=tile.device)
            found |= distances.gather(-1, away.clamp(min=0).expand(*distances.shape)) & (away >= 0)
        return found


def _softmax(logits: Tensor, sees: Tensor) -> Tensor:
    """Softmax over the blocks that are seen, [..., blocks]; 0 for the others, and where none is seen."""
    return logits.masked_fill(~sees, -torch.inf).softmax(-1).masked_fill(~sees.any(-1, keepdim=True), 0)


def jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    """Jensen-Shannon divergence in nats over the last dimension: 0 where p = q, ln 2 where they share nothing."""
    middle = (p + q) / 2
    return (torch.special.entr(middle) - (torch.special.entr(p) + torch.special.entr(q)) / 2).sum(-1).clamp(min=0)


def _largest(sums: Tensor, count: Tensor) -> Tensor:
    """The first block and those of the largest sums, `count` together: bool like `sums`, of equal ones the lower."""
    ranked = torch.cat([torch.full_like(sums[..., :1], torch.inf), sums[..., 1:]], dim=-1)
    order = ranked.sort(dim=-1, descending=True, stable=True).indices
    place = torch.arange(sums.shape[-1], device=sums.device)
    return torch.zeros_like(sums, dtype=torch.bool).scatter_(-1, order, place < count)
