"""Random blocks: the floor. A selection that does not beat it has found nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pyramidbench.cost import Cost, StageCost
from pyramidbench.kernels.attending import TorchMethod
from pyramidbench.method import Kind, NonNegative
from pyramidbench.problem import Problem
from pyramidbench.selection import ranked_count, top_blocks


@dataclass(frozen=True)
class RandomBlocks(TorchMethod):
    """Keeps the forced blocks and K of the others, drawn evenly without replacement, apart for every tile and set.

    Parameters besides the budget: seed. The draw looks at no tensor, so it is the same for all inputs of one shape.
    Cost: M/tile · n₁ random numbers per set, and the attention.
    """

    kind: ClassVar[Kind] = "bound"
    source: ClassVar[str] = "a floor, from no paper"
    selection_cost: ClassVar[str] = "O(N²/C)"

    seed: NonNegative = 0

    def choose(self, q: Tensor, k: Tensor, summary: Tensor, problem: Problem) -> Iterator[Tensor]:  # noqa: ARG002
        tiling = self.tiling(problem)
        generator = torch.Generator(device=q.device).manual_seed(self.seed)
        for tile in self.tile_parts(problem, k.shape[0] * k.shape[1] * tiling.blocks, q.device):
            forced = tiling.forced(tile, self.sinks(problem), self.locals(problem))
            keep = ranked_count(self.top_k, forced, self.forced_in_budget)
            scores = torch.rand(*k.shape[:2], len(tile), tiling.blocks, generator=generator, device=q.device)
            yield top_blocks(scores, tile, tiling, forced, keep)

    def cost(self, problem: Problem) -> Cost:
        tiling = self.tiling(problem)
        drawn = float(problem.batch * problem.kv_heads * tiling.tiles * tiling.blocks)
        return Cost((StageCost("route", drawn, 4 * drawn), self.attend_cost(problem)), *self.workspace(problem, drawn))
