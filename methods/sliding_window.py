"""StreamingLLM's sliding window: the first blocks and the last ones. No selection at all, and often a strong baseline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from pyramidbench.cost import Cost, StageCost, append_cost
from pyramidbench.decoder import CacheLayout, Decoder
from pyramidbench.kernels import backends
from pyramidbench.kernels.attending import TorchMethod
from pyramidbench.kernels.walk_rules import WalkRules
from pyramidbench.problem import Problem
from pyramidbench.selection import ranked_count


@dataclass(frozen=True)
class SlidingWindow(TorchMethod):
    """Keeps the sinks and a window that ends at the query (StreamingLLM): the K blocks of the budget are the nearest ones.

    The forced blocks of the shared budget are kept as by every method, and the window reaches K blocks further back, so
    that a row keeps as many keys as with any other method. Cost: attention only, 4·D·H·M·(K + forced)·C.
    Differs from the paper: whole blocks where it has 4 sink tokens, and no positions are reassigned.
    """

    source: ClassVar[str] = "StreamingLLM, arXiv 2309.17453, section 3.2"

    def unsupported(self, problem: Problem) -> str | None:
        if not problem.causal:
            return "a window that ends at the query needs causal attention"
        return super().unsupported(problem)

    def choose(self, q: Tensor, k: Tensor, summary: Tensor, problem: Problem) -> Iterator[Tensor]:  # noqa: ARG002
        tiling = self.tiling(problem)
        tile = torch.arange(tiling.tiles, device=q.device)
        forced = tiling.forced(tile, self.sinks(problem), self.locals(problem))
        window = ranked_count(self.top_k, forced, self.forced_in_budget)
        listed = replace(forced, local_start=(forced.local_start - window).clamp(min=0)).list(
            self.longest_list(problem)
        )
        yield listed.to(torch.int32).expand(k.shape[0], k.shape[1], -1, -1)

    def cost(self, problem: Problem) -> Cost:
        lists = self.lists_bytes(problem)
        route = StageCost("route", 0.0, 4.0 * problem.batch * problem.kv_heads * self.planned(problem).listed)
        # One set is made in int64, a few numbers an entry, and once it is int32 it is written for all.
        made = 8.0 * lists / (problem.batch * problem.kv_heads)
        return Cost((route, self.attend_cost(problem)), lists + max(made, self.attend_bytes(problem)), 0.0, lists)

    def window_rules(self, problem: Problem) -> WalkRules:
        """A walk that ranks nothing: the window is all local blocks."""
        forced = self.sinks(problem) + self.locals(problem) if self.forced_in_budget else 0
        window = max(self.top_k - forced, 0)
        return WalkRules(0, self.sinks(problem), self.locals(problem) + window, levels=1, leaf_score="summary")

    def decoder(self, problem: Problem, layout: CacheLayout) -> Decoder:
        return backends.decoder(problem, self.window_rules(problem), self.block_size, layout, self.implementation)

    def cache_bytes(self, problem: Problem) -> float:
        return backends.cache_bytes(problem, self.window_rules(problem), self.block_size)

    def step_cost(self, problem: Problem) -> Cost:
        held = backends.step_bytes(problem, self.window_rules(problem), self.block_size, self.implementation)
        return Cost((append_cost(problem), self.attend_cost(problem)), held)

    def step_backend(self, problem: Problem) -> str:
        return backends.chosen(
            self.implementation, backends.decode_gap(problem, self.window_rules(problem), self.block_size)
        )
