"""MoBA: each query goes to the blocks whose mean key it likes best; its own block is one of the K."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from pyramidbench.kernels.attending import CachedWalkMethod
from pyramidbench.kernels.walk_rules import WalkRules
from pyramidbench.method import NonNegative, Positive
from pyramidbench.problem import Problem


@dataclass(frozen=True)
class Moba(CachedWalkMethod):
    """Keeps K blocks for every query and head: its own, and the K - 1 earlier ones whose mean key has the highest logit.

    K counts the own block, and nothing else is forced. In a sweep `--top-k` sets K higher by the sink and local blocks that
    the other methods keep besides theirs, so that all attend to as many keys per query.
    Cost: 2·D·H·M·n₁/2 for the logits of n₁ means, attention 4·D·H·M·K·C.
    Differs from the source: no training with the gate, which the source asks for; blocks of 64 by default where it has 512
    to 4096 (preset `paper`: 512 and 3). A `query_tile` above 1, which it lacks, ranks by the LogSumExp over the rows and
    forces all blocks that the tile overlaps. FlashMoBA (arXiv 2511.11571) computes the same sets.
    """

    source: ClassVar[str] = "MoBA, arXiv 2502.13189, section 2.2"
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "default": {},
        "paper": {"block_size": 512, "top_k": 3},
    }

    query_tile: Positive = 1
    sink_blocks: NonNegative | None = 0
    local_blocks: Positive | None = 1
    forced_in_budget: bool = True
    head_reduce: Literal["none", "sum_lse"] = "none"

    def own_top_k(self, shared: int, problem: Problem) -> int:
        return shared + self._forced_by_others(problem) if self.forced_in_budget else shared

    def shared_top_k(self, problem: Problem) -> int:
        return max(0, self.top_k - self._forced_by_others(problem)) if self.forced_in_budget else self.top_k

    def _forced_by_others(self, problem: Problem) -> int:
        """Forced blocks of the other methods, of a tile that has them all."""
        return int(self.shared_forced(torch.tensor([self.tiling(problem).tiles - 1]), problem))

    def rules(self, problem: Problem) -> WalkRules:
        return WalkRules(
            top_k=self.top_k,
            sink_blocks=self.sinks(problem),
            local_blocks=self.locals(problem),
            forced_in_budget=self.forced_in_budget,
            levels=1,
            bound_weight=0.0,
            leaf_candidates=None,
            leaf_score="summary",
            head_reduce=self.head_reduce,
        )
