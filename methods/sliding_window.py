"""Sliding window: the first blocks and the last ones. No selection at all, and often a strong baseline."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from pyramidbench.cost import Cost, StageCost, attention_cost
from pyramidbench.kernels import backends
from pyramidbench.kernels.walk_cost import attention_scratch
from pyramidbench.method import BlockMethod
from pyramidbench.problem import Problem
from pyramidbench.selection import BlockSelection, ranked_count
from pyramidbench.stages import stage


@dataclass(frozen=True)
class SlidingWindow(BlockMethod):
    """Keeps the sinks and a window that ends at the query: the K blocks of the budget are the nearest ones.

    The forced blocks of the shared budget are kept as by every method, and the window reaches K blocks further back, so
    that a row keeps as many keys as with any other method. Cost: attention only, 4·D·H·M·(K + forced)·C.
    Differs from the paper: whole blocks, and no positions are reassigned.
    """

    source: ClassVar[str] = "StreamingLLM, arXiv 2309.17453"

    def unsupported(self, problem: Problem) -> str | None:
        if not problem.causal:
            return "a window that ends at the query needs causal attention"
        return super().unsupported(problem)

    def backend(self, problem: Problem) -> str:
        return backends.shown("reference", self._attend_backend(problem))

    def _attend_backend(self, problem: Problem) -> backends.Backend:
        return backends.chosen(self.implementation, backends.attention_gap(problem, self.block_size))

    def select(self, q: Tensor, k: Tensor, problem: Problem) -> BlockSelection:
        tiling = self.tiling(problem)
        tile = torch.arange(tiling.tiles, device=q.device)
        with stage("route"):
            forced = tiling.forced(tile, self.sinks(problem), self.locals(problem))
            window = ranked_count(self.top_k, forced, self.forced_in_budget)
            listed = replace(forced, local_start=(forced.local_start - window).clamp(min=0)).list()
        return BlockSelection.from_indices(listed.expand(k.shape[0], k.shape[1], -1, -1), tiling)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection | None, problem: Problem) -> Tensor:
        assert selection is not None
        return backends.attend(q, k, v, selection, problem, self.implementation)

    def cost(self, problem: Problem) -> Cost:
        planned = self.planned(problem)
        lists = 4.0 * problem.batch * problem.kv_heads * planned.listed
        attend = attention_cost(problem, planned.pairs, planned.listed, self.block_size)
        scratch = attention_scratch(problem) if self._attend_backend(problem) == "reference" else 0.0
        return Cost((StageCost("route", 0.0, lists), attend), lists + scratch, 0.0, lists)
