"""A rule that ranks blocks by the attention to overlapping pools of their keys: NSA's and InfLLM-V2's scoring, in torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from pyramidbench.cost import Cost, StageCost
from pyramidbench.kernels.attending import TorchMethod
from pyramidbench.kernels.pools import pool_means, pool_shares
from pyramidbench.method import Positive
from pyramidbench.problem import Problem
from pyramidbench.selection import ranked_count, stack_lists, top_blocks


@dataclass(frozen=True)
class PooledMethod(TorchMethod):
    """Keeps the K best blocks by `block_scores` of the weights of their pools; a group of heads shares a set."""

    granularity: ClassVar[str] = "any × 4s"

    strides: Positive = 4
    span: Positive = 2
    score_rows: Positive | None = None

    def block_scores(self, shares: Tensor, blocks: int) -> Tensor:
        """Scores [T, blocks] from the weights of the first pools, [T, n]."""
        raise NotImplementedError

    def unsupported(self, problem: Problem) -> str | None:
        if self.block_size % self.strides:
            return f"a block of {self.block_size} keys has no {self.strides} equal strides; set strides to a divisor"
        return super().unsupported(problem)

    def summarise(self, k: Tensor) -> Tensor:
        return pool_means(k, self.block_size // self.strides, self.span)

    def choose(self, q: Tensor, k: Tensor, summary: Tensor, problem: Problem) -> Iterator[Tensor]:  # noqa: ARG002
        grouped = q.unflatten(1, (problem.kv_heads, problem.group)).flatten(0, 1)
        lists = [self._lists(heads, pools, problem) for heads, pools in zip(grouped, summary.flatten(0, 1))]
        yield stack_lists(lists).unflatten(0, (problem.batch, problem.kv_heads, -1))

    def _lists(self, q: Tensor, pools: Tensor, problem: Problem) -> Tensor:
        """Lists [tiles, S] of one set; q: [group, M, D], pools: [n, D]."""
        tiling, stride = self.tiling(problem), self.block_size // self.strides
        parts = []
        for tile, shares in pool_shares(
            q, pools, tiling, stride, self.span, problem.scale, self.score_rows, self.chunk_elements(problem)
        ):
            forced = tiling.forced(tile, self.sinks(problem), self.locals(problem))
            keep = ranked_count(self.top_k, forced, self.forced_in_budget)
            parts.append(top_blocks(self.block_scores(shares, tiling.blocks), tile, tiling, forced, keep).int())
        return stack_lists(parts)[: tiling.tiles]

    def cost(self, problem: Problem) -> Cost:
        tiling = self.tiling(problem)
        rows = min(self.score_rows or self.query_tile, self.query_tile) / self.query_tile
        logits = problem.batch * problem.heads * rows * tiling.visible_pairs() * self.strides / self.block_size
        keys = problem.batch * problem.kv_heads * problem.seq_len_kv * problem.head_dim
        pools = 4.0 * keys * self.strides / self.block_size
        build = StageCost("build", float(keys), keys * problem.itemsize + pools)
        route = StageCost("route", 2.0 * problem.head_dim * logits, 4 * 4.0 * logits)
        return Cost((build, route, self.attend_cost(problem)), *self.workspace(problem, logits, pools))
