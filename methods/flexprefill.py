"""FlexPrefill: each head decides between blocks by mean query and key, and vertical-slash lines; p decides how many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from pyramidbench.kernels.lines import Lines, over_blocks, over_windows
from pyramidbench.kernels.pools import run_means
from pyramidbench.kernels.probed_method import ProbedMethod
from pyramidbench.kernels.share_method import Share
from pyramidbench.kernels.top_p import top_p_blocks
from pyramidbench.problem import Problem


@dataclass(frozen=True)
class FlexPrefill(ProbedMethod):
    """Keeps, head by head, the blocks that reach `top_p` by their means, or those on the lines that reach it.

    A head whose probed attention over blocks is what mean query × mean key would make of it (square root of the Jensen-Shannon
    divergence below `divergence`) is query-aware: each tile keeps the fewest blocks whose shares reach p. Any other head is
    vertical-slash: the fewest columns and the fewest distances that reach p of the probe, and every block that one crosses.
    Parameters besides blocks and tiles: top_p (γ), divergence (τ), probe_rows, probe_every (queries between probes).
    Cost: 2·D·H·probe_rows·N per probe, 2·D·H·(M/tile)·n₁/2 for the means, attention 4·D·H·(attended pairs).
    Differs from the source: it probes with the last queries of the prompt, so that early queries choose by later keys; here a
    tile goes by the newest probe before it, and tiles before the first keep everything. p holds for each tile where the source
    takes it of the whole map; the least budget is the forced blocks; blocks of 64 where it has 128.
    """

    source: ClassVar[str] = "FlexPrefill, arXiv 2502.20766, sections 3.2 and 3.3"

    top_p: Share = 0.9
    divergence: Share = 0.1

    @property
    def adaptive(self) -> bool:
        return True

    def summarise(self, k: Tensor) -> Tensor:
        return run_means(k, self.block_size)

    def lists(
        self,
        q: Tensor,
        summary: Tensor,
        tile: Tensor,
        lines: Lines | None,
        problem: Problem,
    ) -> Tensor:
        tiling = self.tiling(problem)
        forced = tiling.forced(tile, self.sinks(problem), self.locals(problem))
        if lines is None:
            values = torch.zeros(*q.shape[:2], len(tile), tiling.blocks, device=q.device)
            return top_p_blocks(values, tile, tiling, forced, float(self.top_p > 0))
        rows = q[:, :, int(tile[0]) * self.query_tile : (int(tile[-1]) + 1) * self.query_tile]
        block = torch.arange(tiling.blocks, device=q.device)
        sees = tiling.complete(block, tile[:, None], self.block_size)
        values = _shares(run_means(rows, self.query_tile), summary, sees, problem)
        aware = self._query_aware(q, summary, lines, problem)[..., None, None]
        return top_p_blocks(
            values * aware, tile, tiling, forced, self.top_p, self._crossed(lines, tile, problem) & ~aware
        )

    def _query_aware(self, q: Tensor, summary: Tensor, lines: Lines, problem: Problem) -> Tensor:
        """Which heads the means describe well: bool [B, H]."""
        whole = lines.start // self.block_size
        if whole == 0:
            return torch.zeros(q.shape[:2], dtype=torch.bool, device=q.device)
        probe = q[:, :, max(0, lines.start - self.probe_rows) : lines.start]
        sees = torch.ones(1, whole, dtype=torch.bool, device=q.device)
        estimate = _shares(run_means(probe, probe.shape[2]), summary[:, :, :whole], sees, problem)[:, :, 0]
        true = over_blocks(lines.vertical, self.tiling(problem), lambda keys: keys.sum(-1))[..., :whole]
        return jensen_shannon(estimate, true / true.sum(-1, keepdim=True)).sqrt() < self.divergence

    def _crossed(self, lines: Lines, tile: Tensor, problem: Problem) -> Tensor:
        """Blocks that a chosen column or slash of a head crosses: bool [B, H, T, blocks]."""
        tiling = self.tiling(problem)
        columns, slashes = (_fewest_lines(sums, self.top_p).to(sums.dtype) for sums in (lines.vertical, lines.slash))
        held = over_blocks(columns, tiling, lambda keys: keys.amax(-1))[:, :, None]
        return (held + over_windows(slashes, tile, tiling, max_pool1d)) > 0


def _shares(queries: Tensor, means: Tensor, sees: Tensor, problem: Problem) -> Tensor:
    """Softmax of mean query × mean key over the blocks that a tile sees: [B, H, T, blocks]."""
    grouped = queries.unflatten(1, (problem.kv_heads, problem.group))
    logits = (grouped @ means[:, :, None].mT * problem.scale).flatten(1, 2)
    return logits.masked_fill(~sees, -torch.inf).softmax(-1).masked_fill(~sees.any(-1, keepdim=True), 0)


def jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    """Jensen-Shannon divergence in nats over the last dimension: 0 where p = q, ln 2 where they share nothing."""
    middle = (p + q) / 2
    return (torch.special.entr(middle) - (torch.special.entr(p) + torch.special.entr(q)) / 2).sum(-1).clamp(min=0)


def _fewest_lines(sums: Tensor, top_p: float) -> Tensor:
    """The fewest lines, strongest first, that hold `top_p` of all: bool like `sums`."""
    ranked, order = sums.sort(dim=-1, descending=True, stable=True)
    before = torch.nn.functional.pad(ranked.cumsum(-1)[..., :-1], (1, 0))
    return torch.zeros_like(sums, dtype=torch.bool).scatter_(-1, order, before < top_p * ranked.sum(-1, keepdim=True))
