"""SubBlock: queries and keys as means of a few tokens each, and the LogSumExp over all pairs of these in a block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import ClassVar, Literal

import torch
from torch import Tensor

from pyramidbench.cost import Cost, StageCost
from pyramidbench.kernels.attending import TorchMethod
from pyramidbench.kernels.pools import run_means
from pyramidbench.method import Positive
from pyramidbench.problem import Problem
from pyramidbench.selection import ranked_count, top_blocks


@dataclass(frozen=True)
class SubBlock(TorchMethod):
    """Keeps the K blocks with the highest LogSumExp of mean query × mean key over all pairs of their parts with the tile's.

    A block of keys is cut into `parts`, a tile into parts of as many tokens (of fewer, where they do not divide it). The sum
    estimates a block's unnormalised attention, and keeps what one mean of a whole block loses.
    Parameters besides the budget: parts, head_reduce ("none": each query head has its own set, as in the source; "sum_lse":
    scores of a group are added). Cost: 2·D·H·(M·N/2)·(parts/block_size)², attention 4·D·H·M·(K + forced)·C.
    Differs from the source: it is for diffusion models, without a causal mask; sink and local blocks come on top of K, where it
    keeps none by force and rounds K up to a multiple of 8; a ragged block's last part is a mean of what it holds; it leaves the
    first steps of denoising dense.
    """

    source: ClassVar[str] = "SubBlock, sgl-project/sglang PR 34148, subblock_sparse/router.py (n_q = n_k = 4)"

    parts: Positive = 4
    head_reduce: Literal["none", "sum_lse"] = "none"

    @property
    def run(self) -> int:
        """Keys in a part."""
        return self.block_size // self.parts

    @property
    def query_run(self) -> int:
        """Queries in a part: as many as keys, if they divide the tile."""
        return gcd(self.run, self.query_tile)

    def unsupported(self, problem: Problem) -> str | None:
        if self.block_size % self.parts:
            return f"a block of {self.block_size} keys has no {self.parts} equal parts; set parts to a divisor"
        return super().unsupported(problem)

    def summarise(self, k: Tensor) -> Tensor:
        return run_means(k, self.run)

    def choose(
        self,
        q: Tensor,
        k: Tensor,  # noqa: ARG002 - part of the contract
        summary: Tensor,
        problem: Problem,
    ) -> Iterator[Tensor]:
        tiling = self.tiling(problem)
        for tile in self.tile_parts(problem, self._logits_per_tile(problem), q.device):
            forced = tiling.forced(tile, self.sinks(problem), self.locals(problem))
            keep = ranked_count(self.top_k, forced, self.forced_in_budget)
            first, last = int(tile[0]), int(tile[-1])
            seen = tiling.blocks
            if problem.causal:
                seen = min(seen, max(0, (last * self.query_tile + tiling.offset + 1) // self.block_size))
            rows = q[:, :, first * self.query_tile : (last + 1) * self.query_tile]
            queries = run_means(rows, self.query_run).to(summary.dtype) * problem.scale
            scores = self._scores(queries, summary[:, :, : seen * self.parts], len(tile), problem)
            # Blocks behind these no tile of this part ranks.
            scores = torch.nn.functional.pad(scores, (0, tiling.blocks - seen))
            yield top_blocks(scores, tile, tiling, forced, keep)

    def _scores(self, queries: Tensor, means: Tensor, tiles: int, problem: Problem) -> Tensor:
        """[B, sets, T, blocks] from the means of the parts of T tiles and of blocks, of which the last may lack some."""
        per_tile = self.query_tile // self.query_run
        missing = (0, -means.shape[2] % self.parts, 0, tiles * per_tile - queries.shape[2])
        grouped = queries.unflatten(1, (problem.kv_heads, problem.group))
        # of shape [B, G, group, parts of the tiles, parts of the blocks]
        logits = (grouped.flatten(2, 3) @ means.mT).unflatten(2, grouped.shape[2:4])
        if any(missing):
            logits = torch.nn.functional.pad(logits, missing, value=-torch.inf)
        # of shape [B, G, group, T, query parts, blocks, parts]
        logits = logits.unflatten(4, (-1, self.parts)).unflatten(3, (tiles, per_tile))
        if logits.numel() == 0:
            return logits.new_zeros(*queries.shape[:1], self.sets(problem), tiles, logits.shape[5])
        high = logits.amax((4, 6), keepdim=True)
        scores = logits.sub_(high).exp_().sum((4, 6)).log_().add_(high[:, :, :, :, 0, :, 0])
        return scores.flatten(1, 2) if self.head_reduce == "none" else scores.sum(2)

    def _logits_per_tile(self, problem: Problem) -> float:
        parts = self.query_tile / self.query_run * self.tiling(problem).blocks * self.parts
        return problem.batch * problem.heads * parts

    def cost(self, problem: Problem) -> Cost:
        logits = problem.batch * problem.heads * self.tiling(problem).visible_pairs() / (self.run * self.query_run)
        keys = float(problem.batch * problem.kv_heads * problem.seq_len_kv * problem.head_dim)
        queries = float(problem.batch * problem.heads * problem.seq_len_q * problem.head_dim)
        build = StageCost("build", keys, keys * problem.itemsize + 4 * keys / self.run)
        route = StageCost("route", 2.0 * problem.head_dim * logits + queries, queries * problem.itemsize + 16 * logits)
        return Cost((build, route, self.attend_cost(problem)), *self.workspace(problem, logits, 4.0 * keys / self.run))
