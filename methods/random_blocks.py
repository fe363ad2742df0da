"""Random blocks: the floor. A selection that does not beat it has found nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pyramidbench.cost import Cost, StageCost, attention_cost
from pyramidbench.kernels import backends
from pyramidbench.method import BlockMethod, Kind, NonNegative
from pyramidbench.problem import Problem
from pyramidbench.selection import BlockSelection, ranked_count, stack_lists, top_blocks
from pyramidbench.stages import stage

CHUNK_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class RandomBlocks(BlockMethod):
    """Keeps the forced blocks and K of the others, drawn evenly without replacement, apart for every tile and set.

    Parameters besides the budget: seed. The draw looks at no tensor, so it is the same for all inputs of one shape.
    Cost: M/tile · n₁ random numbers per set, and the attention.
    """

    kind: ClassVar[Kind] = "bound"
    source: ClassVar[str] = "a floor, from no paper"
    selection_cost: ClassVar[str] = "O(N²/C)"

    seed: NonNegative = 0

    def backend(self, problem: Problem) -> str:
        return backends.shown("reference", self._attend_backend(problem))

    def _attend_backend(self, problem: Problem) -> backends.Backend:
        return backends.chosen(self.implementation, backends.attention_gap(problem, self.block_size))

    def select(self, q: Tensor, k: Tensor, problem: Problem) -> BlockSelection:
        tiling = self.tiling(problem)
        generator = torch.Generator(device=q.device).manual_seed(self.seed)
        with stage("route"):
            lists = [
                stack_lists(list(self._draw(problem, generator, q.device))) for _ in range(k.shape[0] * k.shape[1])
            ]
        rows = stack_lists(lists).view(k.shape[0], k.shape[1], tiling.tiles, -1)
        return BlockSelection.from_indices(rows, tiling)

    def _draw(self, problem: Problem, generator: torch.Generator, device: torch.device) -> Iterator[Tensor]:
        tiling = self.tiling(problem)
        step = max(1, CHUNK_ELEMENTS // tiling.blocks)
        for start in range(0, tiling.tiles, step):
            tile = torch.arange(start, min(start + step, tiling.tiles), device=device)
            forced = tiling.forced(tile, self.sinks(problem), self.locals(problem))
            keep = ranked_count(self.top_k, forced, self.forced_in_budget)
            scores = torch.rand(len(tile), tiling.blocks, generator=generator, device=device)
            yield top_blocks(scores, tile, tiling, forced, keep)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection | None, problem: Problem) -> Tensor:
        assert selection is not None
        return backends.attend(q, k, v, selection, problem, self.implementation)

    def cost(self, problem: Problem) -> Cost:
        planned, tiling = self.planned(problem), self.tiling(problem)
        sets = problem.batch * problem.kv_heads
        drawn = float(sets * tiling.tiles * tiling.blocks)
        attend = attention_cost(problem, planned.pairs, planned.listed, self.block_size)
        lists = 8.0 * sets * planned.listed
        return Cost((StageCost("route", drawn, 4 * drawn), attend), lists + 16.0 * CHUNK_ELEMENTS, 0.0, lists)
